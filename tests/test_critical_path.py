"""The critical path adds up to the step and is a longest path; idle pieces add up to idle time."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench.speed_cases import PROFILE, plan_of
from sim.predict import IterationJudge, predict
from sim.step.durations import task_durations_s
from sim.step.engine import simulate
from sim.step.sweep import Sweep
from tests.lowered_by_hand import FAST, group, lowered, one_node, row
from tests.random_lowered import random_durations, random_lowered
from tests.test_alike import SMALL, changed_sample
from tests.test_fsdp import sharded_parameters
from tests.test_parity import mixed
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.explain.critical_path import Cause, PathStep, critical_path, path_of, seconds_by_cause
from workbench.explain.idle import IdleCause, idle_by_cause, idle_time
from workbench.explain.timeline import timeline
from workbench.metrics import busy_s
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import MEANING, STEP, Action, parse_action
from workbench.timing.accept import accept
from workbench.timing.price import price
from workbench.trace import Lane, Message, Span, Trace

SEEDS = st.integers(0, 10_000)


def traced(plan: Lowered, seed: int) -> Trace:
    return simulate(plan, random_durations(seed))


def idle_s(plan: Lowered, trace: Trace) -> dict[tuple[IdleCause, str, int | None], float]:
    """Rank-seconds by cause, where and the place of the stage."""
    found = idle_by_cause(plan.plan, idle_time(plan, trace))
    return {each[:3]: each.seconds * plan.plan.cluster.num_ranks for each in found}


def assert_adds_up(plan: Lowered, trace: Trace) -> None:
    """Exactly, in rational numbers: each step begins where the one before it ends."""
    path = critical_path(plan, trace)
    total = sum((Fraction(step.end_s) - Fraction(step.start_s) for step in path), Fraction(0))
    assert total == Fraction(trace.iteration_s)
    assert all(one.end_s == after.start_s for one, after in pairwise(path))
    assert all(step.seconds > 0 for step in path)


def assert_idle_adds_up(plan: Lowered, trace: Trace) -> None:
    """Idle pieces and the compute lane's spans cover every rank's time, nothing twice."""
    pieces = idle_time(plan, trace)
    for rank in range(plan.plan.cluster.num_ranks):
        spans = [(s.start_s, s.end_s) for s in trace.spans if s.rank == rank and s.lane is Lane.COMPUTE]
        idle = [(piece.start_s, piece.end_s) for piece in pieces if piece.rank == rank]
        reached_s = 0.0
        for start_s, end_s in sorted((*(span for span in spans if span[0] < span[1]), *idle)):
            assert start_s == reached_s
            reached_s = end_s
        assert reached_s == trace.iteration_s
    idle_s = sum((Fraction(piece.end_s) - Fraction(piece.start_s) for piece in pieces), Fraction(0))
    busy = busy_s(trace)
    whole_s = plan.plan.cluster.num_ranks * trace.iteration_s
    assert float(idle_s) == pytest.approx(whole_s - sum(busy.values()), abs=1e-9)


@given(SEEDS, st.booleans())
def test_steps_of_the_path_add_up_to_the_step(seed: int, cores: bool) -> None:
    plan = random_lowered(seed, cores=cores)
    assert_adds_up(plan, traced(plan, seed))


@given(SEEDS, st.booleans())
def test_idle_pieces_add_up_to_idle_time(seed: int, cores: bool) -> None:
    plan = random_lowered(seed, cores=cores)
    assert_idle_adds_up(plan, traced(plan, seed))


def longest_path_s(plan: Lowered, seconds: list[float]) -> float:
    """Relaxes every edge until nothing changes: slow, obviously right."""
    graph = plan.tasks
    edges = list(zip(graph.before.tolist(), graph.after.tolist(), strict=True))
    ends_s = list(seconds)
    for _ in range(graph.num_nodes):
        changed = False
        for before, after in edges:
            if ends_s[before] + seconds[after] > ends_s[after]:
                ends_s[after] = ends_s[before] + seconds[after]
                changed = True
        if not changed:
            break
    return max(ends_s)


@given(SEEDS)
def test_it_is_a_longest_path_through_the_task_graph(seed: int) -> None:
    plan, duration_s = random_lowered(seed), random_durations(seed)
    trace = simulate(plan, duration_s)
    prices = {action: duration_s(action) for action in plan.plan.program_actions}
    tasks_s = task_durations_s(plan, prices, dict.fromkeys(plan.plan.program, prices.get(STEP, 0.0)))
    rows_s = [0.0] * len(plan.transfers)
    for message in trace.messages:
        rows_s[message.row] = message.end_s - message.ready_s
    seconds = [*tasks_s, *rows_s]
    path = critical_path(plan, trace)
    assert sum(step.seconds for step in path) == pytest.approx(longest_path_s(plan, seconds))
    nodes = list(dict.fromkeys(step.node for step in path))
    assert None not in nodes, "a simulated step has no time without a cause"
    assert sum(seconds[node] for node in nodes if node is not None) == pytest.approx(trace.iteration_s)


@given(SEEDS)
def test_neighbours_on_the_path_wait_for_each_other(seed: int) -> None:
    """Each step's node comes behind the one before it, at most through nodes that took no time."""
    plan = random_lowered(seed)
    graph, trace = plan.tasks, traced(plan, seed)
    offsets, followers = graph.adjacency
    for one, after in pairwise(critical_path(plan, trace)):
        if one.node == after.node:
            continue
        assert one.node is not None
        reached, edge = {one.node}, [one.node]
        while edge:
            node = edge.pop()
            for later in followers[offsets[node] : offsets[node + 1]].tolist():
                if later not in reached:
                    reached.add(later)
                    edge.append(later)
        assert after.node in reached


@given(SEEDS)
def test_the_sweep_tells_when_everything_happens_as_the_trace_does(seed: int) -> None:
    """But for sums of several groups, of which a trace has only the first start and the last end."""
    plan, durations = random_lowered(seed), random_durations(seed)
    trace = simulate(plan, durations)
    swept, told = Sweep(plan).timeline(durations), timeline(plan, trace)
    in_one_span = {
        task
        for lane in plan.tasks.reductions.values()
        for joined in lane
        for task in joined.tasks
        if len(joined.tasks) > 1
    }
    for node in set(range(plan.tasks.num_nodes)) - in_one_span:
        assert (swept.start_s[node], swept.end_s[node]) == (told.start_s[node], told.end_s[node])
    assert (swept.sent_s, swept.earlier) == (told.sent_s, told.earlier)
    path = path_of(swept)
    assert (path[0].start_s, path[-1].end_s) == (0.0, trace.iteration_s)
    assert all(one.end_s == after.start_s for one, after in pairwise(path))
    assert all(step.node is not None for step in path)


ON_NODES = replace(SMALL, name="nodes", layout={"vision": (1, 1), "audio": (1, 1), "llm": (3, 2)})


@pytest.mark.parametrize(
    ("whole", "num_judged"),
    [
        (plan_of(ON_NODES), 1),
        (changed_sample(plan_of(ON_NODES)), 2),
        (plan_of(replace(ON_NODES, is_drawn=True)), 3),
    ],
)
def test_the_part_that_is_judged_tells_where_the_time_of_the_whole_goes(whole: Plan, num_judged: int) -> None:
    """Of equal replicas the first one's microbatches are on the path of both."""
    cost = CostModel(load_profile(PROFILE))
    part = IterationJudge(cost).timeline(whole)
    assert len({stage.replica for stage in part.lowered.plan.stages}) == num_judged
    told = critical_path(lower(whole), predict(*accept(whole), cost))

    def passes(path: tuple[PathStep, ...]) -> list[tuple[object, ...]]:
        return [step[:6] for step in path if step.action is not None and step.action.microbatch is not None]

    assert passes(path_of(part)) == passes(told) != []


def test_causes_of_a_step_by_hand() -> None:
    """Two stages, one microbatch: all of it in a line, with a message there and one back."""
    plan = lowered(
        {(0,): "0F0 0B0 STEP", (1,): "1F0 1B0 STEP"},
        rows=[row(0, "0F0", "1F0", (0, 1), num_bytes=2), row(1, "1B0", "0B0", (1, 0), num_bytes=2)],
        cluster=one_node(2, link=SLOW),
    )
    message_s = 2 / SLOW.bytes_per_s + SLOW.latency_s
    trace = simulate(plan, lambda action: SECONDS[action.kind])
    path = critical_path(plan, trace)
    assert [(str(step.action), step.cause) for step in path] == [
        ("0F0", Cause.FORWARD),
        ("0F0", Cause.MESSAGE),
        ("1F0", Cause.FORWARD),
        ("1B0", Cause.BACKWARD),
        ("1B0", Cause.MESSAGE),
        ("0B0", Cause.BACKWARD),
        ("STEP", Cause.STEP),
    ]
    assert sum(seconds_by_cause(path).values()) == pytest.approx(6.5 + 2 * message_s)
    idle = idle_s(plan, trace)
    assert idle[IdleCause.FILL, "m", 0] == 1.0
    assert idle[IdleCause.STAGE, "m", 0] == 3.0


SLOW = replace(FAST, bytes_per_s=8.0, latency_s=0.5)
SECONDS = {"F": 1.0, "B": 2.0, "STEP": 0.5, "REDUCE_GRAD": 1.0}


def test_a_heavy_microbatch_is_told_from_a_slow_stage() -> None:
    """The second waits for the first one's heavy forward: 4 s, where its forwards take 2 s in the mean."""
    plan = lowered(
        {(0,): "0F0 0F1 0F2", (1,): "1F0 1F1 1F2"},
        rows=[row(index, f"0F{index}", f"1F{index}", (0, 1), num_bytes=0) for index in range(3)],
        cluster=one_node(2),
    )
    slow = {parse_action("0F2"): 4.0}
    trace = simulate(plan, lambda action: slow.get(action, 1.0))
    idle = idle_s(plan, trace)
    assert idle[IdleCause.FILL, "m", 0] == pytest.approx(1.0)
    waits_s = idle[IdleCause.STAGE, "m", 0] + idle[IdleCause.MICROBATCHES, "m", 0]
    assert waits_s == pytest.approx(3.0)
    assert idle[IdleCause.MICROBATCHES, "m", 0] == pytest.approx(waits_s * (1 - 2.0 / 4.0))


def test_a_sum_of_gradients_waits_for_the_slower_replica() -> None:
    """Rank 0 has finished; its exposed sum and its wait for rank 1 are told apart."""
    plan = lowered(
        {(0,): "0F0 0REDUCE_GRAD STEP", (1,): "1F0 1F1 1REDUCE_GRAD STEP"},
        cluster=one_node(2),
        groups=[group(0, (0, 1), 10)],
        reductions={"0REDUCE_GRAD": (0,), "1REDUCE_GRAD": (0,)},
    )
    trace = simulate(plan, lambda action: SECONDS[action.kind])
    assert [step.cause for step in critical_path(plan, trace)] == [
        Cause.FORWARD,
        Cause.FORWARD,
        Cause.ALL_REDUCE,
        Cause.STEP,
    ]
    idle = idle_s(plan, trace)
    assert idle[IdleCause.RANKS, "m", None] == 1.0
    assert idle[IdleCause.ALL_REDUCE, "m", None] == 2.0


def test_a_rank_that_does_not_join_a_sum_yet_is_told_from_what_it_waits_for() -> None:
    """Rank 0 sums with rank 2, whose last backward follows one of stage 3: a drain, then more work."""
    plan = lowered(
        {(0,): "0F0 0B0 0REDUCE_GRAD STEP", (2,): "2F0 2B0 2REDUCE_GRAD STEP", (3,): "3F0 3B0"},
        rows=[row(0, "2F0", "3F0", (2, 3), num_bytes=0), row(1, "3B0", "2B0", (3, 2), num_bytes=0)],
        cluster=one_node(4),
        groups=[group(0, (0, 2), 10)],
        reductions={"0REDUCE_GRAD": (0,), "2REDUCE_GRAD": (0,)},
    )
    seconds = {parse_action("3B0"): 5.0, parse_action("3F0"): 3.0}
    trace = simulate(plan, lambda action: seconds.get(action, SECONDS[action.kind]))
    waits = [
        (piece.cause, piece.seconds)
        for piece in idle_time(plan, trace)
        if piece.rank == 0 and piece.cause is not IdleCause.MESSAGE
    ]
    assert waits == [
        (IdleCause.DRAIN, pytest.approx(1.0)),  # of 3F0, after rank 0 has done 0F0 and 0B0
        (IdleCause.DRAIN, pytest.approx(5.0)),
        (IdleCause.RANKS, pytest.approx(2.0)),
        (IdleCause.ALL_REDUCE, pytest.approx(1.0)),
    ]


def test_a_plan_with_sharded_weights_adds_up_too() -> None:
    cost = CostModel(load_profile("A40"))
    plan = lower(sharded_parameters(mixed("llm"), tiny_batch(), replicas=2))
    prices = price(plan, cost)
    trace = simulate(plan, prices.duration_s, step_s=prices.step_s)
    assert_adds_up(plan, trace)
    assert_idle_adds_up(plan, trace)
    assert any(step.cause is Cause.ALL_GATHER for step in critical_path(plan, trace))


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_a_collective_is_exposed_only_while_none_of_its_ranks_computes(slower: float) -> None:
    """Of two ranks that share weights, the one with less work waits for the other, not for the link."""
    cost = CostModel(load_profile("A40"))
    plan = lower(sharded_parameters(mixed("llm"), tiny_batch(), replicas=2))
    prices = price(plan, cost)
    of_last = {stage.id for stage in plan.plan.stages if max(plan.plan.ranks) in stage.flat_ranks}

    def seconds(action: Action) -> float:
        is_slow = action.stage in of_last and MEANING[action.kind].operation is None
        return prices.duration_s(action) * (slower if is_slow else 1.0)

    trace = simulate(plan, seconds, step_s=prices.step_s)
    assert_idle_adds_up(plan, trace)
    computing = [(span.start_s, span.end_s) for span in trace.spans if span.lane is Lane.COMPUTE]
    waited_s = dict.fromkeys(IdleCause, 0.0)
    for piece in idle_time(plan, trace):
        middle_s = (piece.start_s + piece.end_s) / 2
        waited_s[piece.cause] += piece.seconds
        if piece.cause in (IdleCause.ALL_GATHER, IdleCause.REDUCE_SCATTER, IdleCause.RANKS):
            is_computing = any(start_s < middle_s < end_s for start_s, end_s in computing)
            assert is_computing is (piece.cause is IdleCause.RANKS)
    exposed_s = waited_s[IdleCause.ALL_GATHER] + waited_s[IdleCause.REDUCE_SCATTER]
    assert waited_s[IdleCause.RANKS] > 10 * exposed_s > 0.0
    assert not any(waited_s[cause] for cause in (IdleCause.FILL, IdleCause.STAGE, IdleCause.DRAIN))


@given(SEEDS, st.floats(0.001, 0.5))
def test_what_an_executed_trace_has_between_actions_is_named(seed: int, late_s: float) -> None:
    """All but the first moment of a step comes later by as much: that much is between actions."""
    plan = random_lowered(seed)
    simulated = traced(plan, seed)

    def later(time_s: float) -> float:
        return time_s + late_s

    spans = tuple(Span(*span[:3], later(span.start_s), later(span.end_s)) for span in simulated.spans)
    messages = tuple(Message(*each[:5], *map(later, each[5:])) for each in simulated.messages)
    trace = replace(simulated, spans=spans, messages=messages)
    assert_adds_up(plan, trace)
    assert_idle_adds_up(plan, trace)
    between = seconds_by_cause(critical_path(plan, trace))[Cause.HOST, ""]
    assert between == pytest.approx(late_s)


def test_a_rank_without_work_is_idle_all_the_time() -> None:
    plan = lowered({(0,): "0F0 STEP"}, cluster=one_node(2))
    trace = simulate(plan, lambda _: 1.0)
    assert idle_s(plan, trace) == {(IdleCause.UNUSED, "", None): 2.0}


def test_the_trace_must_be_of_the_plan() -> None:
    plan = lowered({(0,): "0F0 STEP"}, cluster=one_node(1))
    trace = replace(simulate(plan, lambda _: 1.0), plan_hash="another")
    with pytest.raises(ValueError, match="the trace is of plan another, this plan is"):
        critical_path(plan, trace)


def test_an_action_of_a_path_says_who_does_it() -> None:
    plan = lowered({(0,): "0F0 STEP"}, cluster=one_node(1))
    first, last = critical_path(plan, simulate(plan, lambda _: 1.0))
    assert (first.action, first.rank, first.where) == (Action(0, parse_action("0F0").kind, 0), 0, "m")
    assert (last.action, last.rank, last.where) == (STEP, 0, "")
