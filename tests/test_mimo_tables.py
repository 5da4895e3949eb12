"""The layout paper's tables: rows are read as printed, and what is judged is judged as stated."""

from dataclasses import replace
from functools import cache

import pytest

from experiments.harness.printed import printed_rows
from experiments.mimo import calibration, figure5, figure7, figure8, goals, simulated, tablea5
from experiments.mimo.gains import CUT, Gains, gain_evidence, same_sign, speedups
from experiments.mimo.models import (
    LLM,
    VISION,
    Images,
    Workload,
    assumptions,
    at_rates,
    job_of,
    model_of,
    protocol,
    variations,
)
from experiments.mimo.rows import colocated, table_a2, table_a3, table_a4, tables
from workbench.plan.plan import Recompute
from workbench.plan.sequence import dividing
from workbench.plan.work import work_of
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.schedule.action import Action, Pass

SMALL = Workload(encoder="1B", llm="7B", sequence_tokens=8192, vision_pct=50.0, num_gpus=8, num_samples=4)


@cache
def launching_for_nothing():
    return at_rates(1.0, 0.0)


def h_layout(**degrees):
    return LayoutChoice(
        mode=Mode.HOMOGENEOUS,
        encoders=(ModuleChoice(module=VISION, **degrees),),
        llm=ModuleChoice(module=LLM, **degrees),
    )


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch):
    """Collectives as profiled, launches for nothing: what was fitted is data of a run."""
    monkeypatch.setattr(simulated, "calibrated", launching_for_nothing)
    simulated.step_of.cache_clear()
    yield
    simulated.step_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "billions", "module"),
    [
        *[(size, float(size[:-1]), VISION) for size in ("1B", "3B", "6B", "7.2B", "12B")],
        *[(size, float(size[:-1]), LLM) for size in ("7B", "14B", "32B", "70B", "120B")],
    ],
)
def test_modules_are_as_large_as_they_are_called(name, billions, module):
    model = model_of(name, "7B", 1.0) if module == VISION else model_of("1B", name, 1.0)
    assert model.module(module).num_parameters / 1e9 == pytest.approx(billions, rel=0.06)


def test_every_assumption_with_a_range_is_varied_as_the_protocol_says():
    fixed = protocol()["unstated"]
    ends = [f"{name}={end}" for name in ("patches_per_llm_token", "size_factor") for end in fixed[name]]
    assert list(variations()) == ends
    assert variations()["size_factor=0.8"] == replace(assumptions(), size_factor=0.8)


def test_the_protocol_counts_the_rows_that_are_judged():
    rows = sum(map(len, tables().values())) + len(printed_rows("mimo_tableA5"))
    assert rows == protocol()["judged"]["rows"] == 67


@pytest.mark.parametrize("rows", [table_a2, table_a3, table_a4])
def test_printed_layouts_take_the_printed_gpus(rows):
    for row in rows():
        assert row.baseline_layout.num_ranks == row.baseline.num_gpus
        assert row.other_layout.num_ranks == row.other.num_gpus


def test_encoders_from_3b_on_are_computed_again():
    rows = {row["model"]: colocated(row).encoders[0] for row in printed_rows("mimo_tableA2")}
    assert rows["1B+14B"].recompute is Recompute.NONE
    assert rows["3B+14B"].recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("printed", "ours", "same"),
    [(0.1, 0.01, True), (0.1, -0.01, False), (-0.05, -0.2, True), (0.02, -0.02, True), (-0.01, 0.05, False)],
)
def test_on_par_is_within_three_percent(printed, ours, same):
    assert same_sign(printed, ours) is same


def encoder_forward_s(layout, assumed):
    """Of one microbatch: seconds of the encoder's forward pass without its projector."""
    cost, workload = launching_for_nothing(), replace(SMALL, num_samples=layout.llm.dp)
    lowered = simulated.lowered_of(workload, layout, assumed, cost)
    (stage,) = (stage for stage in lowered.plan.stages if stage.module == VISION and stage.replica == 0)
    whole_s = simulated.prices_of(lowered, cost, assumed).duration_s(Action(stage.id, Pass.F, 0))
    projector = lowered.plan.model.module(VISION).layers[-1]
    work = work_of(lowered.plan, lowered.plan.microbatches_of[VISION, 0][0])
    settings = lowered.plan.settings
    alone = dividing(cost, settings, VISION).layer_time(
        projector, work, tp=stage.tp, cp=stage.cp, precision=str(settings.precision)
    )
    return whole_s - alone.forward_s


def test_whole_images_cost_every_context_parallel_rank_what_one_alone_takes():
    whole, cut = assumptions(), replace(assumptions(), under_context=Images.CUT)
    one = encoder_forward_s(h_layout(tp=2, dp=4), whole)
    several = encoder_forward_s(h_layout(tp=2, cp=4), whole)
    assert several == pytest.approx(one, rel=1e-9)
    assert encoder_forward_s(h_layout(tp=2, cp=4), cut) < several


def test_copies_of_images_leave_the_llm_its_tokens():
    once, four = (job_of(SMALL, assumptions(), copies) for copies in (1, 4))
    assert [sample.num_tokens for sample in once.batch] == [sample.num_tokens for sample in four.batch]
    assert len(four.batch[0].of(VISION)) == 4 * len(once.batch[0].of(VISION))


def test_features_that_cross_are_counted_once_for_a_replica():
    encoder, llm = ModuleChoice(module=VISION, dp=8), ModuleChoice(module=LLM, tp=2, dp=4)
    layout = LayoutChoice(mode=Mode.COLOCATED, encoders=(encoder,), llm=llm)
    workload = replace(SMALL, num_samples=8)
    step = simulated.step_of(workload, layout, assumptions())
    boundary_s, num_bytes = simulated.boundary_of(
        simulated.lowered_of(workload, layout, assumptions(), launching_for_nothing())
    )
    assert num_bytes == 2 * 4096 * 4096 * 2  # each rank of the pair lacks the other's sample
    assert 0 < boundary_s < step.passes_s < step.step_s


def test_stages_are_balanced_for_the_machine_that_prices_them():
    """H's first stage, with the largest encoder, is within two layers of the longest."""
    row, cost = next(row for row in table_a2() if row.key == "A2/12B+120B/50"), launching_for_nothing()
    lowered = simulated.lowered_of(row.baseline, row.baseline_layout, assumptions(), cost)
    prices = simulated.prices_of(lowered, cost, assumptions())
    stages = [stage for stage in lowered.plan.stages if stage.replica == 0]
    seconds = [
        sum(prices.duration_s(Action(stage.id, kind, 0)) for kind in (Pass.F, Pass.B)) for stage in stages
    ]
    [encoder_s, first_s, *others_s] = seconds
    layer_s = others_s[0] / (stages[2].layers[1] - stages[2].layers[0])
    assert abs(encoder_s + first_s - max(others_s)) < 2 * layer_s


def test_gradients_are_exchanged_in_float32_as_megatron_does():
    assert job_of(table_a2()[0].baseline, assumptions()).settings.gradient_bytes == 4


def test_replicas_of_an_encoder_share_the_images_of_too_few_samples():
    row = table_a3()[4]
    plan = simulated.plan_of(row.other, row.other_layout, assumptions(), launching_for_nothing())
    held = [sum(len(m.items) for m in plan.microbatches_of[VISION, r]) for r in range(32)]
    assert held == [4] * 32  # 4 samples of 32 images


def test_a_tiny_run_judges_gains_and_writes_our_numbers_beside(monkeypatch):
    monkeypatch.setattr("experiments.mimo.gains.variations", dict)
    rows = table_a2()[:2]
    evidence = gain_evidence("Table A2", rows)
    assert [number.value for number in evidence.paper] == [
        pytest.approx(7570 / 6750),
        pytest.approx(7780 / 6840),
    ]
    assert evidence.ours["modelled/A2/1B+14B/50/h_ms"] > 1000
    assert evidence.ours["modelled/Table_A2/rows"] == 2


def test_the_encoder_is_also_read_as_cut_where_h_has_cp(monkeypatch):
    monkeypatch.setattr("experiments.mimo.gains.gain", lambda row, assumed: assumed.size_factor)
    assert CUT in speedups(table_a3()[0])
    assert CUT not in speedups(table_a2()[0])


def test_figure_7_shows_five_bars():
    assert [row.key for row in table_a4() if figure7.is_shown(row)] == [
        "A4/6B+120B/8K/50/256",
        "A4/6B+120B/8K/50/512",
        "A4/6B+120B/16K/50/512",
        "A4/7.2B+120B/16K/50/512",
        "A4/12B+120B/16K/50/512",
    ]


def test_figure_8_layouts_have_the_printed_replicas():
    for num_gpus, encoder, mode in figure8.LAYOUTS.values():
        layout = LayoutChoice(mode=mode, encoders=(encoder,), llm=figure8.BACKBONE)
        assert layout.num_ranks == num_gpus
    assert figure8.LAYOUTS["colocated"][1].dp == 2 * figure8.BACKBONE.dp  # pairs gather


def test_table_a5_rows_take_the_printed_gpus(monkeypatch):
    monkeypatch.setattr(tablea5, "step_of", lambda workload, layout, _: _Fake(workload, layout))
    for row in printed_rows("mimo_tableA5"):
        assert tablea5.modes_of(row).best in ("H", "C", "NC")


class _Fake:
    def __init__(self, workload, layout):
        assert layout.num_ranks == workload.num_gpus
        self.step_s = 1.0


def test_figure_5_draws_rows_of_the_tables():
    assert [row.key for row in figure5.shorter_context()][:2] == ["A2/1B+14B/50", "A2/3B+14B/50"]
    assert len(figure5.shorter_context()) == 10
    sizes = [row["enc_params_b"] for row in figure5.largest_llm()]
    assert sizes == ["1", "3", "6", "7.2", "12"]


def test_long_contexts_start_at_64k():
    rows = table_a3()
    ours = {row.key: float(row.baseline.sequence_tokens) for row in rows}
    assert figure5.mean_gain(rows, ours, is_long=False) == 24 * 1024
    assert figure5.mean_gain(rows, ours, is_long=True) == 96 * 1024


def test_who_is_best_is_counted_by_encoder(monkeypatch):
    def modes(row):
        nc_s = 0.9 if float(row["enc_params_b"]) >= 6 else 1.1
        return tablea5.Modes(h_s=1.05, c_s=1.0, nc_s=nc_s)

    monkeypatch.setattr(tablea5, "modes_of", modes)
    evidence = figure5.modes()
    assert [claim.holds for claim in evidence.claims] == [True, True]
    assert "5 of 5" in evidence.claims[0].text
    assert evidence.ours["modelled/d/6B+120B/nc/speed_over_h"] == pytest.approx(1.05 / 0.9 * 256 / 264)


ROWS = ("A3/1B+7B/16K/50", "A3/1B+7B/16K/75", "A2/3B+120B/50", "A2/6B+120B/50")


def test_signs_ranks_and_errors_of_gains():
    found = Gains(name="A", rows=ROWS, printed=(0.1, 0.2, -0.1, 0.01), ours=(0.2, 0.1, -0.2, 0.02))
    assert found.right == 4
    assert found.tau == pytest.approx(4 / 6)
    assert found.error_points == pytest.approx(100 * 0.31 / 4)


def test_signs_are_counted_over_all_tables():
    good = Gains(name="A2", rows=ROWS[:2], printed=(0.1, 0.2), ours=(0.1, 0.3))
    bad = Gains(name="A3", rows=ROWS[:2], printed=(0.1, 0.2), ours=(-0.1, -0.3))
    evidence = goals.signs([good, bad])
    assert [claim.holds for claim in evidence.claims[:4]] == [True, True, False, False]
    assert evidence.ours["modelled/all_tables/signs"] == 2
    assert bad.missed() == [
        f"{ROWS[0]}, printed +10.0%, ours -10.0%",
        f"{ROWS[1]}, printed +20.0%, ours -30.0%",
    ]
    assert all(row in evidence.claims[2].cause for row in ROWS[:2])


def test_the_cause_of_a_wrong_order_has_the_error_by_llm():
    text = Gains(
        name="A", rows=ROWS, printed=(0.1, 0.2, -0.1, 0.0), ours=(0.1, 0.2, 0.1, 0.2)
    ).why_out_of_order()
    assert text.endswith("our error in points is 0.0 in 2 rows of 7B, 20.0 in 2 rows of 120B")


def test_the_machine_of_the_smallest_error_is_chosen_and_the_first_of_equals():
    ratios = [
        {(1.0, 0.0): 0.5, (0.5, 0.0): 1.1, (0.4, 0.0): 1.1},
        {(1.0, 0.0): 1.0, (0.5, 0.0): 1.0, (0.4, 0.0): 1.0},
    ]
    assert calibration.best_of(ratios) == (0.5, 0.0)


def test_calibration_prices_the_plan_that_is_judged():
    row = table_a2()[0]
    ratio = calibration.ratios_of(row, [(1.0, 0.0)])
    step = simulated.step_of(row.baseline, row.baseline_layout, assumptions())
    assert list(ratio.values()) == [pytest.approx(step.step_s / row.printed_s[0])]
