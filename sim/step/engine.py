"""Simulates one step of a lowered plan, on every rank and link."""

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from itertools import repeat
from math import inf, isnan
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from simpy.core import Environment

from sim.step.deadlock import check_finished
from sim.step.durations import task_durations_s
from sim.step.lanes import Lanes
from sim.step.memory import Curve, memory_over_time
from sim.step.wire import Network
from workbench.collector import collector_paused
from workbench.elastic.layerwise import LastBackward
from workbench.memory.account import MemoryTable
from workbench.plan.codec import plan_hash
from workbench.plan.lowered import Lowered, Transfer
from workbench.plan.plan import Plan, Program
from workbench.schedule.action import STEP, Action
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace


def simulate(
    lowered: Lowered,
    duration_s: Callable[[Action], float],
    *,
    step_s: Callable[[int], float] | None = None,
    memory: MemoryTable | None = None,
    overlapped: Mapping[Action, LastBackward] = MappingProxyType({}),
) -> Trace:
    """Run the programs of a plan against a virtual clock.

    An action starts when it is next on every rank of its stage and its input rows have arrived, and occupies
    all of them for its duration. Its end makes its output rows ready; a row waits for its link, occupies it
    for bytes / bandwidth and arrives latency later. OFFLOAD, ONLOAD and FREE take their turn on the stage
    like a pass. Gradient reductions overlap later passes, group by group, each a rendezvous of its ranks;
    STEP waits for its rank's reductions. With sharded parameters, all-gathers and reduce-scatters overlap
    the passes, one at a time, each a rendezvous of all replicas; `waits_of` says what waits for them. Ranks
    that outnumber their node's cores share them, and on a node with a number of cores a rank's passes share
    its core with the exchanges of sharded parameters. Within an instant, all ends are processed first, to a
    fixpoint; then every free link takes its lowest (ready time, row); this repeats until nothing changes.

    Args:
        lowered: the plan and its derived tasks and rows.
        duration_s: seconds of an action; asked once per action.
        step_s: seconds of a rank's STEP, where ranks differ; None: `duration_s(STEP)` on all.
        memory: bytes that actions acquire and release; None: no memory curve.
        overlapped: reductions whose groups start layer by layer within a backward, see
            `workbench.elastic.layerwise`; only on ranks with cores of their own.

    Returns:
        A trace with a span on every rank of an action's stage, a message per row and
        destination, and the memory curve. Equal input gives an equal trace.

    Raises:
        ValueError: a duration that is negative or not finite, programs that do not fit the
            stages, an action the simulator has no rule for, overlap on ranks that share cores.
        DeadlockError: actions that never ran; the message says what each waits for.

    Complexity: O(n log n) for n actions, rows and spans.
    """
    _check_programs(lowered.plan)
    prices = _prices(lowered.plan, duration_s)
    steps_s = _steps(lowered.plan, prices, step_s)
    with collector_paused():
        return _run(lowered, prices, steps_s, memory, overlapped)


# There are 10^5 of each; `Span(*fields)` would run Python code for every one.
_as_span: Callable[[Iterable[Any]], Span] = partial(tuple.__new__, Span)
_as_sample: Callable[[Iterable[Any]], MemorySample] = partial(tuple.__new__, MemorySample)
_CARRIED = itemgetter(
    *map(Transfer._fields.index, ("row", "edge", "source_rank", "destination_ranks", "num_bytes"))
)
_as_message: Callable[[Iterable[Any]], Message] = partial(tuple.__new__, Message)


def _run(
    lowered: Lowered,
    prices: Mapping[Action, float],
    steps_s: Mapping[int, float],
    memory: MemoryTable | None,
    overlapped: Mapping[Action, LastBackward],
) -> Trace:
    lanes = Lanes(
        Environment(initial_time=0.0), lowered, task_durations_s(lowered, prices, steps_s), overlapped
    )
    lanes.run()
    check_finished(lowered, lanes.end_s, lanes.network.end_s)
    spans, samples = _spans(lowered, lanes, memory)
    return Trace(
        plan_hash=plan_hash(lowered.plan),
        executor=Executor.SIMULATED,
        spans=spans,
        messages=_messages(lowered, lanes.network),
        memory=samples,
    )


def _check_programs(plan: Plan) -> None:
    holders: dict[Action, int] = {}
    for program in plan.programs:
        name = f"rank {program.ranks[0]}"
        if len(set(program.actions)) != len(program.actions):
            twice = next(action for action in program.actions if program.actions.count(action) > 1)
            raise ValueError(f"{name}: an action stands once in a program, {twice} stands twice")
        if STEP in program.actions[:-1]:
            raise ValueError(f"{name}: STEP must be the last action, {program.actions[-1]} is")
        for action in program.actions:
            holders[action] = holders.get(action, 0) + len(program.ranks)
        _check_held(plan, program)
    ranks_of = {stage.id: stage.flat_ranks for stage in plan.stages}
    for action, num_holders in holders.items():
        if action.stage is not None and num_holders != len(ranks_of[action.stage]):
            ranks = ranks_of[action.stage]
            missing = next(rank for rank in ranks if action not in plan.program.get(rank, ()))
            raise ValueError(f"action {action} is missing from the program of rank {missing}")


def _check_held(plan: Plan, program: Program) -> None:
    for stage in {action.stage for action in program.actions} - {None}:
        if stage not in plan.stage:
            raise ValueError(f"rank {program.ranks[0]}: there is no stage {stage} in the plan")
        if outside := set(program.ranks) - set(plan.stage[stage].flat_ranks):
            raise ValueError(f"rank {min(outside)} has actions of stage {stage}, which it does not hold")


def _prices(plan: Plan, duration_s: Callable[[Action], float]) -> dict[Action, float]:
    actions = dict.fromkeys(action for program in plan.programs for action in program.actions)
    prices = {action: float(duration_s(action)) for action in actions}
    for action, price_s in prices.items():
        if not _is_price(price_s):
            raise ValueError(_price_text(f"action {action}", price_s))
    return prices


def _steps(
    plan: Plan, prices: Mapping[Action, float], step_s: Callable[[int], float] | None
) -> dict[int, float]:
    if step_s is None:
        return {rank: prices.get(STEP, 0.0) for rank in plan.program}
    steps_s = {rank: float(step_s(rank)) for rank in plan.program}
    for rank, price_s in steps_s.items():
        if not _is_price(price_s):
            raise ValueError(_price_text(f"rank {rank} in {STEP}", price_s))
    return steps_s


def _is_price(price_s: float) -> bool:
    return 0 <= price_s < inf


def _price_text(name: str, price_s: float) -> str:
    return f"{name}: duration must be >= 0 s and finite, got {price_s}"


class _Done(NamedTuple):
    """The actions of a rank with their times, in program order; shared by ranks with equal times.

    Args:
        sharded: those that are exchanges of sharded parameters.
    """

    lanes: list[Lane]
    actions: tuple[Action, ...]
    start_s: list[float]
    end_s: list[float]
    sharded: frozenset[Action]

    def by_lane(self) -> tuple[tuple[Any, ...], ...]:
        """Lanes, actions, starts and ends: first compute, in program order, then the others by start."""
        indices = range(len(self.actions))
        compute = [index for index in indices if self.lanes[index] is Lane.COMPUTE]
        aside = [index for index in indices if self.lanes[index] is not Lane.COMPUTE]
        aside.sort(key=lambda index: (self.start_s[index], self.actions[index] in self.sharded))
        order = (*compute, *aside)
        columns = self.lanes, self.actions, self.start_s, self.end_s
        return tuple(tuple([column[index] for index in order]) for column in columns)


def _spans(
    lowered: Lowered, lanes: Lanes, memory: MemoryTable | None
) -> tuple[tuple[Span, ...], tuple[MemorySample, ...]]:
    """Spans of all ranks, by (rank, lane, start), and the memory curve that follows from them."""
    spans: list[Span] = []
    samples: list[MemorySample] = []
    by_lane: dict[int, tuple[tuple[Any, ...], ...]] = {}
    curves: dict[tuple[int, int, int], Curve] = {}
    for rank, done in sorted(_done(lowered, lanes).items()):
        if id(done) not in by_lane:
            by_lane[id(done)] = done.by_lane()
        spans += map(_as_span, zip(repeat(rank), *by_lane[id(done)]))
        if memory is not None:
            key = id(done), id(memory.acquired_bytes[rank]), memory.static_bytes[rank]
            if key not in curves:
                curves[key] = memory_over_time(memory, rank, done.lanes, done.start_s, done.end_s)
            samples += map(_as_sample, zip(repeat(rank), *curves[key]))
    return tuple(spans), tuple(samples)


def _done(lowered: Lowered, lanes: Lanes) -> dict[int, _Done]:
    """Rank -> its actions and their times."""
    graph, start_s, end_s = lowered.tasks, lanes.start_s, lanes.end_s
    done_by_rank: dict[int, _Done] = {}
    for program, collectives in zip(lowered.plan.programs, graph.fsdp, strict=True):
        sharded = {joined.action: joined.tasks for joined in collectives}
        together = sharded | {
            action: (graph.passes[action],) for action in program.actions if action in graph.passes
        }
        done_by_times: dict[tuple[tuple[float, float], ...], _Done] = {}
        for rank in program.ranks:
            rank_tasks = {joined.action: joined.tasks for joined in graph.reductions[rank]}
            if rank in graph.steps:
                rank_tasks[STEP] = (graph.steps[rank],)
            times = tuple((start_s[tasks[0]], end_s[tasks[-1]]) for tasks in rank_tasks.values())
            if times not in done_by_times:
                tasks_of = rank_tasks | together
                tasks = [tasks_of[action] for action in program.actions]
                done_by_times[times] = _Done(
                    [_lane(action, together, sharded) for action in program.actions],
                    program.actions,
                    [start_s[first] for first, *_ in tasks],
                    [end_s[last] for *_, last in tasks],
                    frozenset(sharded),
                )
            done_by_rank[rank] = done_by_times[times]
    return done_by_rank


def _lane(action: Action, together: Container[Action], sharded: Container[Action]) -> Lane:
    is_pass = action in together and action not in sharded
    return Lane.COMPUTE if is_pass or action == STEP else Lane.REDUCE


def _messages(lowered: Lowered, network: Network) -> tuple[Message, ...]:
    """One message per row and destination; rows that stay on their rank are none."""
    rows = map(_CARRIED, lowered.transfers)
    columns = zip(rows, network.ready_s, network.start_s, network.end_s, strict=True)
    each = [
        (row, edge, source, destination, num_bytes, ready_s, start_s, end_s)
        for (row, edge, source, destinations, num_bytes), ready_s, start_s, end_s in columns
        if not isnan(start_s)
        for destination in destinations
    ]
    return tuple(map(_as_message, each))
