"""Intervals of predictions: their form, what feeds them, and where commands show them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command_line import accept, answered
from workbench.cost.execution import Execution
from workbench.cost.profile import Fit, ideal_profile, load_profile
from workbench.llm_table.columns import SHARES, read_row
from workbench.llm_table.cost_parts import CostParts
from workbench.llm_table.row_interval import OF_FUSION, reasons_of
from workbench.timing.doubts import BETWEEN_NODES, OF_OTHERS, SCALED, deviation_of, doubts_of
from workbench.timing.interval import MEDIAN_OF_NORMAL, Doubt, Interval, Z, interval
from workbench.timing.provenance import interval_of, with_interval
from workbench.timing.shares import SLOWER, Source, shares_of
from workbench.timing.systems import (
    ANY_SYSTEM,
    KERNELS_AND_LINKS,
    LOST_BY_MULTIMODAL,
    LOST_BY_SYSTEM,
    MULTIMODAL_TRAINER,
    STRETCH,
    by_executor,
)
from workbench.trace import Executor, Trace

SIZES = st.lists(st.floats(0, 0.5), min_size=1, max_size=6)
JOB, CPU_PROFILE = "examples/tiny.yaml", "examples/elastic-cpu.json"
EVEN = {source: 1 / len(Source) for source in Source}


def doubts(sizes: list[float]) -> list[Doubt]:
    return [Doubt(str(index), size) for index, size in enumerate(sizes)]


def half_width(found: Interval) -> float:
    return math.log(found.high_s / found.low_s) / 2


@given(st.floats(1e-3, 1e3), SIZES, st.floats(0, 1))
def test_prediction_lies_in_the_middle_of_its_logarithm(seconds: float, sizes: list[float], together: float):
    found = interval(seconds, doubts(sizes), together=together)
    assert math.sqrt(found.low_s * found.high_s) == pytest.approx(seconds)
    assert found.holds(seconds)


@given(st.floats(1e-3, 1e3), SIZES, st.lists(st.floats(-1, 1), min_size=1, max_size=3))
def test_centres_move_both_ends_alike(seconds: float, sizes: list[float], centres: list[float]):
    plain = interval(seconds, doubts([*sizes, *[0.0] * len(centres)]))
    moved = interval(seconds, (*doubts(sizes), *(Doubt("x", 0.0, centre=each) for each in centres)))
    factor = math.exp(sum(centres))
    assert (moved.low_s, moved.high_s) == pytest.approx((plain.low_s * factor, plain.high_s * factor))


@given(SIZES)
def test_reasons_add_up_between_squares_and_sums(sizes: list[float]):
    apart, joint = (half_width(interval(1.0, doubts(sizes), together=each)) for each in (0.0, 1.0))
    assert apart == pytest.approx(Z * math.sqrt(sum(size**2 for size in sizes)))
    assert joint == pytest.approx(Z * sum(sizes))
    assert apart - 1e-12 <= half_width(interval(1.0, doubts(sizes))) <= joint + 1e-12


@given(SIZES, st.floats(1e-3, 0.5))
def test_one_more_reason_makes_it_wider(sizes: list[float], more: float):
    assert half_width(interval(1.0, doubts([*sizes, more]))) > half_width(interval(1.0, doubts(sizes)))


def test_four_of_five_draws_lie_within():
    rng, parts = np.random.default_rng(0), (0.1, 0.05)
    found = interval(1.0, doubts(list(parts)), together=0.0)
    drawn = np.exp(rng.normal(0, parts, (100_000, 2)).sum(axis=1))
    assert np.mean((drawn >= found.low_s) & (drawn <= found.high_s)) == pytest.approx(0.8, abs=0.005)


def test_overlap_is_mutual():
    left, right, far = Interval(1.0, 2.0), Interval(2.0, 3.0), Interval(2.5, 4.0)
    assert left.overlaps(right)
    assert right.overlaps(left)
    assert not left.overlaps(far)
    assert not far.overlaps(left)


@pytest.mark.parametrize("size", [-0.1, math.inf, math.nan])
def test_a_deviation_is_a_finite_number(size: float):
    with pytest.raises(ValueError, match="want a deviation >= 0"):
        Doubt("x", size)


def test_shares_are_those_of_a_sum():
    rates = {Source.PRODUCTS: 5.0, Source.ATTENTION: 2.0, Source.MEMORY: 1.0, Source.REST: 2.0}

    def seconds(run: Execution) -> float:
        work = rates[Source.PRODUCTS] / run.matmul_rate + rates[Source.ATTENTION] / run.attention_rate
        return work + rates[Source.MEMORY] / run.memory_rate + rates[Source.REST]

    shares = shares_of(seconds, Execution(), seconds(Execution()))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {name: share * 10 for name, share in shares.items() if share > 1e-9} == pytest.approx(rates)


def test_hidden_costs_have_no_share():
    def seconds(run: Execution) -> float:
        return max(10.0 / run.matmul_rate, 8.0 / run.collective_rate)

    assert 8 * (1 + SLOWER) < 10
    shares = shares_of(seconds, Execution(), 10.0)
    assert shares[Source.COLLECTIVES] == 0.0
    assert shares[Source.PRODUCTS] == pytest.approx(1.0)


def test_tables_err_as_their_fits_say():
    profile = replace(ideal_profile(), fits=(Fit(table="matmul", num_points=9, median=0.02, p90=0.1),))
    found = deviation_of(profile, Source.PRODUCTS, across_nodes=False)
    assert found == pytest.approx(0.02 / MEDIAN_OF_NORMAL)
    assert deviation_of(profile, Source.ATTENTION, across_nodes=False) == SCALED[Source.ATTENTION]
    assert deviation_of(profile, Source.REDUCTION, across_nodes=True) == BETWEEN_NODES


def test_a_device_by_data_sheet_is_less_sure_than_its_like():
    found = {
        name: half_width(interval(1.0, doubts_of(load_profile(name), EVEN, across_nodes=False)))
        for name in ("H100", "H100-500W", "B200", "GB300")
    }
    assert found["H100-500W"] < found["B200"] < found["GB300"]


def test_presumed_cells_are_named():
    said = {doubt.about for doubt in doubts_of(load_profile("GB300"), EVEN, across_nodes=False)}
    assert "card_gbytes_per_s presumed" in said
    assert "products, scaled from H100" in said


def test_what_nobody_said_widens():
    profile, unsaid = load_profile("H100"), (Doubt("recompute not said", 0.1),)
    known, unknown = (
        interval(1.0, doubts_of(profile, EVEN, across_nodes=False, unsaid=more)) for more in ((), unsaid)
    )
    assert half_width(unknown) > half_width(known) > Z * OF_OTHERS


@pytest.mark.parametrize(
    ("attention", "more"), [("flash", 0.0), ("flash2", 0.0), ("flash1", 0.17), ("stored", 0.17)]
)
def test_attention_that_a_table_does_not_hold_is_as_unsure_as_a_scaled_one(attention: str, more: float):
    profile = load_profile("A100-80GB")  # its table is of generation 2
    cells = {"hidden": "768", "layers": "12", "heads": "12", "vocab": "50304", "sequence": "2048"}
    cells |= {"gpus": "8", "global_batch": "64", "micro_batch": "1", "attention": attention}
    taken = {"products": 0.4, "attention": 0.4, "memory_bound": 0.2}
    parts = CostParts(**dict.fromkeys(SHARES, 0.0) | taken)
    found = {doubt.about: doubt.deviation for doubt in reasons_of(read_row(cells), profile, parts, {})}
    table = deviation_of(profile, Source.ATTENTION, across_nodes=False)
    assert found[Source.ATTENTION] == pytest.approx(STRETCH * 0.4 * math.hypot(table, more))
    moved = deviation_of(profile, Source.MEMORY, across_nodes=False)
    assert found[Source.MEMORY] == pytest.approx(STRETCH * 0.2 * math.hypot(moved, OF_FUSION))


def test_a_trace_keeps_its_interval():
    trace = Trace(plan_hash="0" * 64, executor=Executor.SIMULATED, spans=())
    assert interval_of(trace) is None
    found = interval(1.0, doubts([0.1, 0.2]))
    assert interval_of(with_interval(trace, found)) == found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the tiny job and its simulated trace."""
    made = tmp_path_factory.mktemp("interval")
    accept("plan", JOB, "--profile", "H100", "-o", made / "a.plan.json")
    accept("simulate", made / "a.plan.json", "--profile", "H100", "--trace", made / "a.sim.json")
    return made


def test_simulate_compare_and_report_show_it(folder: Path):
    plan, trace = folder / "a.plan.json", folder / "a.sim.json"
    record = answered("simulate", plan, "--profile", "H100")
    found = record["interval_80"]
    assert found["low_s"] < record["iteration_s"] < found["high_s"]
    assert found["doubts"]["the step beyond its kernels"] == STRETCH * OF_OTHERS
    assert "80 % within" in accept("simulate", plan, "--profile", "H100").stdout
    executed = folder / "a.run.json"
    executed.write_text(trace.read_text().replace('"simulated"', '"executed"'))
    assert "holds the executed" in accept("compare", trace, executed).stdout
    assert answered("compare", trace, executed)["interval_80"] == found
    accept("report", folder, "-o", folder / "report.html")
    assert "80 % within" in (folder / "report.html").read_text()


def test_a_shipped_profile_does_not_say_who_executes_the_plan(folder: Path):
    record = answered("simulate", folder / "a.plan.json", "--profile", "H100")
    kernels, system, trainer = record["interval_80_by_executor"]
    assert [each["executor"] for each in (kernels, system, trainer)] == [
        KERNELS_AND_LINKS,
        ANY_SYSTEM.about,
        MULTIMODAL_TRAINER.about,
    ]
    assert math.sqrt(kernels["low_s"] * kernels["high_s"]) == pytest.approx(record["iteration_s"])
    for each, lost in ((system, LOST_BY_SYSTEM), (trainer, LOST_BY_MULTIMODAL)):
        middle_s = math.sqrt(each["low_s"] * each["high_s"])
        assert math.log(middle_s / record["iteration_s"]) == pytest.approx(lost)
    assert record["interval_80"]["high_s"] == system["high_s"]
    assert MULTIMODAL_TRAINER.about in accept("simulate", folder / "a.plan.json", "--profile", "H100").stdout


def test_a_measured_machine_has_one_executor(folder: Path):
    plan, profile = folder / "a.plan.json", CPU_PROFILE
    record = answered("simulate", plan, "--profile", profile)
    assert record["interval_80_by_executor"] == []
    assert "by who executes" not in accept("simulate", plan, "--profile", profile).stdout


def test_a_language_model_alone_is_no_research_trainer():
    about = [each.executor for each in by_executor(1.0, doubts([0.1]), is_multimodal=False)]
    assert about == [KERNELS_AND_LINKS, ANY_SYSTEM.about]


def test_what_one_executor_adds_decides_no_tie():
    record = answered("search", JOB, "--profile", "H100")
    best, *others = (each for each in record["candidates"] if "iteration_s" in each)
    for each in others:
        kernels, best_kernels = each["interval_80_by_executor"][0], best["interval_80_by_executor"][0]
        assert each["tie"] is (kernels["low_s"] <= best_kernels["high_s"])
    assert {True, False} == {each["tie"] for each in others}
