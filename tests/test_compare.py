"""compare: errors and spreads of known traces, and what it refuses."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import disjoint_plan, sample, two_encoders
from workbench.plan.plan import Plan
from workbench.report.compare import ComparedRow, Group, compare
from workbench.report.tables import comparison_headers, comparison_table, milliseconds, percent, rank_runs
from workbench.schedule.action import STEP, Action, Pass
from workbench.trace import Executor, Lane, MemorySample, Span, Trace

F0, B0, REDUCE = Action(0, Pass.F, 0), Action(0, Pass.B, 0), Action(0, Pass.REDUCE_GRAD)
F1 = Action(1, Pass.F, 0)


def trace(executor: Executor, *, forward_s: float, backward_s: float, plan_hash: str = "a" * 64) -> Trace:
    """Rank 0 runs 0F0 and 0B0 with rank 1's 1F0 between; then it reduces and steps."""
    second = forward_s + 0.5
    end = second + backward_s
    return Trace(
        plan_hash=plan_hash,
        executor=executor,
        spans=(
            Span(0, Lane.COMPUTE, F0, 0.0, forward_s),
            Span(0, Lane.COMPUTE, B0, second, end),
            Span(0, Lane.COMPUTE, STEP, end + 0.25, end + 0.5),
            Span(0, Lane.REDUCE, REDUCE, end, end + 0.25),
            Span(1, Lane.COMPUTE, F1, forward_s, second),
        ),
        memory=(MemorySample(0, 0.0, 100), MemorySample(0, forward_s, 160), MemorySample(0, second, 90)),
    )


SIMULATED = trace(Executor.SIMULATED, forward_s=1.0, backward_s=2.0)


def executed(*seconds: tuple[float, float]) -> list[Trace]:
    return [trace(Executor.EXECUTED, forward_s=forward, backward_s=backward) for forward, backward in seconds]


def row(rows: tuple[ComparedRow, ...], name: str) -> ComparedRow:
    return next(row for row in rows if row.name == name)


def test_known_traces():
    comparison = compare(SIMULATED, executed((0.8, 2.0), (1.25, 2.0), (1.3, 2.0)))

    forward = row(comparison.of(Group.KIND), "F")
    assert (forward.count, forward.simulated) == (2, 1.5)
    assert forward.executed == pytest.approx((1.3, 1.75, 1.8))
    assert forward.error_fraction == pytest.approx(1.5 / 1.75 - 1)
    assert forward.spread_fraction == pytest.approx(0.5 / 1.75)
    assert [r.name for r in comparison.of(Group.KIND)] == ["F", "B", "REDUCE_GRAD", "STEP"]

    assert row(comparison.of(Group.STAGE), "0").executed_median == pytest.approx(3.25)
    assert row(comparison.of(Group.STAGE), "1").error_fraction == pytest.approx(0.0)
    assert comparison.total.simulated == 4.0
    assert comparison.total.executed == pytest.approx((3.8, 4.25, 4.3))
    assert row(comparison.of(Group.MEMORY), "0").simulated == 160


def test_one_repetition_has_no_spread():
    comparison = compare(SIMULATED, executed((1.0, 2.0)))
    assert all(row.spread_fraction is None for row in comparison.rows)
    assert comparison.as_json()["spread_fraction"] is None
    assert comparison.as_json()["error_fraction"] == 0.0


@given(st.floats(0.25, 4.0))
def test_a_uniformly_slower_machine_has_one_error_everywhere(factor: float):
    slower = replace(
        SIMULATED,
        executor=Executor.EXECUTED,
        spans=tuple(s._replace(start_s=s.start_s * factor, end_s=s.end_s * factor) for s in SIMULATED.spans),
    )
    comparison = compare(SIMULATED, [slower])
    timed = [row for row in comparison.rows if row.group is not Group.MEMORY]
    assert all(row.error_fraction == pytest.approx(1 / factor - 1) for row in timed)


def test_stages_add_up_to_the_passes():
    comparison = compare(SIMULATED, executed((1.1, 1.9)))
    passes = sum(r.simulated for r in comparison.of(Group.KIND) if r.name in ("F", "B"))
    assert sum(r.simulated for r in comparison.of(Group.STAGE)) == pytest.approx(passes)


@pytest.mark.parametrize(
    ("simulated", "others", "words"),
    [
        pytest.param(
            SIMULATED,
            [trace(Executor.EXECUTED, forward_s=1, backward_s=2, plan_hash="b" * 64)],
            ("a" * 16, "b" * 16),
            id="another-plan-both-named",
        ),
        pytest.param(SIMULATED, [], ("at least one executed",), id="nothing-executed"),
        pytest.param(SIMULATED, [SIMULATED], ("trace 1 of 1", "simulated"), id="executed-is-simulated"),
        pytest.param(executed((1, 2))[0], executed((1, 2)), ("executed",), id="simulated-is-executed"),
        pytest.param(
            SIMULATED,
            [replace(executed((1, 2))[0], spans=executed((1, 2))[0].spans[1:])],
            ("rank 0 has no 0F0", "1 of 3"),
            id="incomplete",
        ),
    ],
)
def test_refused(simulated: Trace, others: list[Trace], words: tuple[str, ...]):
    with pytest.raises(ValueError) as caught:
        compare(simulated, others)
    assert all(word in str(caught.value) for word in words)


def test_table_names_stages_where_there_is_a_plan(small_plan: Plan):
    table = comparison_table(compare(SIMULATED, executed((1, 2), (1, 2))), small_plan)
    cells = list(table.columns[0].cells)
    assert "  stage 0: vision 0..1" in cells
    assert table.title == "plan aaaaaaaaaaaa, 2 executed runs"


@pytest.mark.parametrize(
    ("ranks", "text"), [((0, 1, 2, 5), "0-2, 5"), ((3,), "3"), ((4, 2, 3), "2-4"), ((0, 2), "0, 2")]
)
def test_rank_runs(ranks: tuple[int, ...], text: str):
    assert rank_runs(ranks) == text


def test_numbers_as_printed():
    assert milliseconds(0.0123456) == "12.3 ms"
    assert milliseconds(1.5) == "1,500 ms"
    assert percent(None, signed=True) == "-"
    assert percent(0.0512, signed=True) == "+5.1%"
    assert percent(0.0512, signed=False) == "5.1%"


@pytest.fixture
def small_plan() -> Plan:
    cuts = {"vision": [2, 1], "audio": [2], "llm": [2, 2]}
    return disjoint_plan(two_encoders(), [sample(0), sample(1)], cuts)


def test_emulated_runs_are_compared_as_such_and_never_with_executed_ones() -> None:
    simulated = trace(Executor.SIMULATED, forward_s=1.0, backward_s=2.0)
    emulated = trace(Executor.EMULATED, forward_s=1.1, backward_s=2.0)
    executed = trace(Executor.EXECUTED, forward_s=1.1, backward_s=2.0)
    found = compare(simulated, [emulated])
    assert found.as_json()["executor"] == "emulated"
    assert comparison_headers(found)[2] == "emulated (median)"
    for others in ([emulated, executed], [simulated]):
        with pytest.raises(ValueError, match="want executed ones, or emulated ones"):
            compare(simulated, others)
