"""What the simulator promises whatever the plan: determinism, independence of order, named deadlocks."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from sim.step.deadlock import DeadlockError
from sim.step.engine import simulate
from tests.lowered_by_hand import group, lowered, row
from tests.plans import disjoint_plan, sample, two_encoders
from tests.random_lowered import random_durations, random_lowered
from workbench.memory.account import memory_table
from workbench.memory.account import peak_bytes as planned_peak_bytes
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered, Route
from workbench.plan.plan import Program
from workbench.schedule.action import COMPUTE, Action, parse_action
from workbench.trace import Executor, Lane
from workbench.trace_json import dumps


def shuffled(given: Lowered, rng: Random) -> Lowered:
    """The same plan, told in another order: what the simulator creates first is different."""
    plan = given.plan
    programs = [
        Program(ranks=(rank,), actions=program.actions) for program in plan.programs for rank in program.ranks
    ]

    def mixed(rows: dict[Action, tuple[int, ...]]) -> dict[Action, tuple[int, ...]]:
        items = [(action, tuple(rng.sample(members, len(members)))) for action, members in rows.items()]
        return dict(rng.sample(items, len(items)))

    return replace(
        given,
        plan=replace(
            plan,
            programs=tuple(rng.sample(programs, len(programs))),
            stages=tuple(rng.sample(plan.stages, len(plan.stages))),
        ),
        inputs=mixed(given.inputs),
        outputs=mixed(given.outputs),
        groups=tuple(rng.sample(given.groups, len(given.groups))),
        reductions=dict(rng.sample(list(given.reductions.items()), len(given.reductions))),
    )


@pytest.mark.parametrize("cores", [False, True])
def test_times_do_not_depend_on_what_is_created_first(cores):
    for seed in range(150):
        given = random_lowered(seed, cores=cores)
        wanted = simulate(given, random_durations(seed))
        found = simulate(shuffled(given, Random(seed)), random_durations(seed))
        assert replace(found, plan_hash="") == replace(wanted, plan_hash="")


def test_equal_input_gives_a_byte_identical_trace():
    plan = disjoint_plan(
        two_encoders(), [sample(i) for i in range(4)], {"vision": [3], "audio": [2], "llm": [2, 2]}
    )

    def run() -> str:
        given = lower(plan)
        return dumps(simulate(given, random_durations(0), memory=memory_table(given)))

    assert run() == run()


def test_a_trace_covers_the_whole_plan_in_its_order():
    plan = disjoint_plan(
        two_encoders(),
        [sample(i) for i in range(4)],
        {"vision": [3], "audio": [2], "llm": [2, 2]},
        replicas=2,
    )
    given = lower(plan)
    table = memory_table(given)
    trace = simulate(given, random_durations(1), memory=table)
    assert (trace.plan_hash, trace.executor) == (plan_hash(plan), Executor.SIMULATED)
    for rank, actions in plan.program.items():
        on_lane = {
            lane: [span.action for span in trace.spans if span.rank == rank and span.lane is lane]
            for lane in Lane
        }
        assert on_lane[Lane.COMPUTE] == [a for a in actions if a.kind in COMPUTE or a.stage is None]
        assert on_lane[Lane.REDUCE] == [a for a in actions if a not in on_lane[Lane.COMPUTE]]
    assert list(trace.spans) == sorted(trace.spans, key=lambda s: (s.rank, s.lane.value))
    travelling = [t.row for t in given.transfers if t.route is not Route.LOCAL for _ in t.destination_ranks]
    assert [message.row for message in trace.messages] == travelling
    assert [(m.rank, m.time_s) for m in trace.memory] == sorted((m.rank, m.time_s) for m in trace.memory)
    peaks = {rank: max(m.num_bytes for m in trace.memory if m.rank == rank) for rank in plan.ranks}
    assert peaks == planned_peak_bytes(given, table)


# Deadlocks


def test_two_stages_that_wait_for_each_other_are_named():
    rows = [row(0, "0F0", "1F0", (0, 1)), row(1, "1B0", "0B0", (1, 0)), row(2, "0B0", "1F0", (0, 1))]
    with pytest.raises(DeadlockError) as raised:
        simulate(lowered({(0,): "0F0 0B0 STEP", (1,): "1F0 1B0 STEP"}, rows), lambda _: 1.0)
    assert str(raised.value) == (
        "2 of 2 ranks never finished: "
        "rank 0 before 0B0 (waits for row 1 from 1B0); "
        "rank 1 before 1F0 (waits for row 2 from 0B0)"
    )


def test_ranks_that_come_to_shared_stages_in_another_order_are_named():
    stages = {0: (0, 1), 1: (0, 1)}
    with pytest.raises(DeadlockError) as raised:
        simulate(lowered({(0,): "0F0 1F0", (1,): "1F0 0F0"}, stages=stages), lambda _: 1.0)
    assert str(raised.value) == (
        "2 of 2 ranks never finished: "
        "rank 0 before 0F0 (waits for rank 1, which is before 1F0); "
        "rank 1 before 1F0 (waits for rank 0, which is before 0F0)"
    )


def test_reductions_in_another_order_are_named():
    given = lowered(
        {(0,): "0F0 0REDUCE_GRAD STEP", (1,): "1F0 1REDUCE_GRAD", (2,): "2F0"},
        groups=[group(0, (0, 1), 1), group(1, (0, 1), 1)],
        reductions={"0REDUCE_GRAD": (0, 1), "1REDUCE_GRAD": (1, 0)},
    )
    with pytest.raises(DeadlockError) as raised:
        simulate(given, lambda _: 1.0)
    assert str(raised.value) == (
        "2 of 3 ranks never finished: "
        "rank 0 before STEP (rank 0 in 0REDUCE_GRAD: gradient group 0 waits for rank 1); "
        "rank 1 in 1REDUCE_GRAD: gradient group 1 waits for rank 0"
    )


def test_a_long_report_is_cut():
    rows = [row(rank, f"{rank + 1}F0", f"{rank}F0", (rank + 1, rank)) for rank in range(11)]
    rows.append(row(11, "0F0", "11F0", (0, 11)))
    with pytest.raises(
        DeadlockError, match=r"^12 of 12 ranks never finished: rank 0 .*; and 4 more programs$"
    ):
        simulate(lowered({(rank,): f"{rank}F0" for rank in range(12)}, rows), lambda _: 1.0)


# Refusals


@pytest.mark.parametrize("price_s", [-1.0, float("nan"), float("inf")])
def test_a_bad_duration_is_refused(price_s):
    with pytest.raises(ValueError, match="action 0F0: duration must be >= 0 s and finite, got"):
        simulate(lowered({(0,): "0F0"}), lambda _: price_s)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(lambda: lowered({(0,): "0F0 0F0"}), "rank 0: .* 0F0 stands twice", id="twice"),
        pytest.param(lambda: lowered({(0,): "STEP 0F0"}), "STEP must be the last action, 0F0 is", id="step"),
        pytest.param(lambda: lowered({(0,): "7F0"}), "rank 0: there is no stage 7", id="stage"),
        pytest.param(
            lambda: lowered({(0,): "0F0", (1,): "1F0"}, stages={0: (0, 1), 1: (1,)}),
            "action 0F0 is missing from the program of rank 1",
            id="missing",
        ),
        pytest.param(
            lambda: lowered({(0,): "0F0", (1,): "0F0"}, stages={0: (0,)}),
            "rank 1 has actions of stage 0, which it does not hold",
            id="foreign",
        ),
        pytest.param(
            lambda: lowered(
                {(0, 1): "0REDUCE_GRAD 1REDUCE_GRAD"},
                stages={0: (0, 1), 1: (0, 1)},
                groups=[group(0, (0, 1), 1)],
                reductions={"0REDUCE_GRAD": (0,), "1REDUCE_GRAD": (0,)},
            ),
            "rank 0: gradient group 0 must be reduced once, it stands in 0REDUCE_GRAD and 1REDUCE_GRAD",
            id="reduced-twice",
        ),
    ],
)
def test_programs_that_do_not_fit_their_stages_are_refused(given: Callable[[], Lowered], message: str):
    with pytest.raises(ValueError, match=message):
        simulate(given(), lambda _: 1.0)


def test_durations_are_asked_once_per_action():
    asked: list[Action] = []

    def duration_s(action: Action) -> float:
        asked.append(action)
        return 1.0

    simulate(lowered({(0, 1): "0F0 0B0 STEP"}, stages={0: (0, 1)}), duration_s)
    assert asked == [parse_action(word) for word in ("0F0", "0B0", "STEP")]
