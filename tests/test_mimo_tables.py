"""The layout paper's tables: rows are read as printed, and what is judged is judged as stated."""

from dataclasses import replace

import pytest

from experiments.harness.printed import printed_rows
from experiments.mimo import figure5, figure7, figure8, goals, tablea2, tablea3, tablea4, tablea5
from experiments.mimo.compared import gain_evidence, same_sign, step_of, with_whole_encoder
from experiments.mimo.models import LLM, VISION, assumptions, model_of, variations
from workbench.plan.plan import Recompute
from workbench.planner.layout_choice import LayoutChoice


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


def test_every_assumption_with_a_range_is_varied_one_at_a_time():
    names = list(variations())
    assert names == [
        "patches_per_llm_token=0.2",
        "patches_per_llm_token=0.3",
        "size_factor=0.8",
        "size_factor=1.2",
    ]
    assert variations()["size_factor=0.8"] == replace(assumptions(), size_factor=0.8)


@pytest.mark.parametrize(
    ("table", "script"), [("A2", tablea2), ("A3", tablea3), ("A4", tablea4)], ids=["A2", "A3", "A4"]
)
def test_printed_layouts_take_the_printed_gpus(table, script):
    for row in printed_rows(f"mimo_table{table}"):
        found = script.compared(row)
        assert found.baseline_layout.num_ranks == found.baseline.num_gpus
        assert found.other_layout.num_ranks == found.other.num_gpus


def test_encoders_from_3b_on_are_computed_again():
    rows = {row["model"]: tablea2.colocated(row).encoders[0] for row in printed_rows("mimo_tableA2")}
    assert rows["1B+14B"].recompute is Recompute.NONE
    assert rows["3B+14B"].recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("printed", "ours", "same"),
    [(0.1, 0.01, True), (0.1, -0.01, False), (-0.05, -0.2, True), (0.02, -0.02, True), (-0.01, 0.05, False)],
)
def test_on_par_is_within_three_percent(printed, ours, same):
    assert same_sign(printed, ours) is same


def test_a_whole_encoder_under_cp_costs_h_more():
    row = tablea3.compared(printed_rows("mimo_tableA3")[4])
    cut = step_of(row.baseline, row.baseline_layout, assumptions())
    whole = step_of(row.baseline, with_whole_encoder(row.baseline_layout), assumptions())
    assert whole.passes_s > cut.passes_s


def test_a_tiny_run_judges_gains_and_writes_our_numbers_beside(monkeypatch):
    monkeypatch.setattr("experiments.mimo.compared.variations", lambda: {})
    rows = [tablea2.compared(row) for row in printed_rows("mimo_tableA2")[:2]]
    evidence = gain_evidence("Table A2", rows, tablea2.step_s)
    assert [number.value for number in evidence.paper] == [
        pytest.approx(7570 / 6750),
        pytest.approx(7780 / 6840),
    ]
    assert evidence.ours["modelled/A2/1B+14B/50/h_ms"] > 1000
    assert {"sign_share", "kendall_tau", "gain_error_points"} <= evidence.ours.keys()
    for unstated in evidence.unstated.values():
        assert unstated.low <= unstated.high


def test_figure_7_shows_five_bars():
    shown = [row for row in printed_rows("mimo_tableA4") if figure7.is_shown(row)]
    assert [(row["model"], row["seq_len_k"], row["h_n_gpus"]) for row in shown] == [
        ("6B+120B", "8", "256"),
        ("6B+120B", "8", "512"),
        ("6B+120B", "16", "512"),
        ("7.2B+120B", "16", "512"),
        ("12B+120B", "16", "512"),
    ]


def test_figure_8_layouts_have_the_printed_replicas():
    for num_gpus, encoder, mode in figure8.LAYOUTS.values():
        layout = LayoutChoice(mode=mode, encoders=(encoder,), llm=figure8.BACKBONE)
        assert layout.num_ranks == num_gpus
    assert figure8.LAYOUTS["colocated"][1].dp == 2 * figure8.BACKBONE.dp  # pairs gather


def test_table_a5_rows_take_the_printed_gpus(monkeypatch):
    monkeypatch.setattr(tablea5, "step_of", lambda workload, layout, _: _Fake(workload, layout))
    monkeypatch.setattr(tablea5, "fastest_beside", lambda workload, island: 1.0)
    for row in printed_rows("mimo_tableA5"):
        assert tablea5.modes_of(row).best in ("H", "C", "NC")


class _Fake:
    def __init__(self, workload, layout):
        assert layout.num_ranks == workload.num_gpus
        self.step_s = 1.0


def test_figure_5_draws_rows_of_the_tables():
    assert [row.key for row in figure5.shorter_context()][:2] == ["A2/1B+14B/50", "A2/3B+14B/50"]
    assert len(figure5.shorter_context()) == 10
    assert len(figure5.longer_context()) == 16
    sizes = [row["enc_params_b"] for row in figure5.largest_llm()]
    assert sizes == ["1", "3", "6", "7.2", "12"]


def test_long_contexts_start_at_64k():
    rows = figure5.longer_context()
    ours = {row.key: float(row.baseline.sequence_tokens) for row in rows}
    assert figure5.mean_gain(rows, ours, is_long=False) == 24 * 1024
    assert figure5.mean_gain(rows, ours, is_long=True) == 96 * 1024


def test_who_is_best_is_counted_by_encoder(monkeypatch):
    def modes(row):
        nc_s = 0.9 if float(row["enc_params_b"]) >= 6 else 1.1
        return tablea5.Modes(h_s=1.05, c_s=1.0, nc_s=nc_s, nc_searched_s=nc_s)

    monkeypatch.setattr(tablea5, "modes_of", modes)
    evidence = figure5.modes()
    assert [claim.holds for claim in evidence.claims] == [True, True]
    assert "5 of 5" in evidence.claims[0].text
    assert evidence.ours["modelled/d/6B+120B/nc/speed_over_h"] == pytest.approx(1.05 / 0.9 * 256 / 264)


def test_signs_ranks_and_errors_of_gains():
    found = goals.Gains(name="A", printed=(0.1, 0.2, -0.1, 0.01), ours=(0.2, 0.1, -0.2, 0.02))
    assert found.right == 4
    assert found.tau == pytest.approx(4 / 6)
    assert found.error_points == pytest.approx(100 * 0.31 / 4)
    assert found.apart_tau == (pytest.approx(4 / 6), 6)
    assert goals.Gains(name="A", printed=(0.1, 0.11), ours=(0.2, 0.1)).apart_tau == (0.0, 0)


def test_a_cause_is_told_only_of_what_is_missed():
    good = goals.Gains(name="A2", printed=(0.1, 0.2), ours=(0.1, 0.3))
    bad = goals.Gains(name="A3", printed=(0.1, 0.2), ours=(-0.1, -0.3))
    evidence = goals.gains_evidence([good, bad], {"A2": lambda: "none", "A3": lambda: "signs"})
    told = [note for note in evidence.notes if note.startswith("cause")]
    assert told == ["cause, A3: signs"]
    assert [claim.holds for claim in evidence.claims[:4]] == [True, True, False, False]
    assert evidence.ours["modelled/all_tables/sign_share"] == 0.5


def test_launches_are_those_of_the_public_fit():
    execution = goals.with_launches().execution
    assert 0 < execution.kernel_gap_s < execution.host_kernel_s < 1e-3
    assert execution.matmul_rate == 1.0  # nothing but launches
