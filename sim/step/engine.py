"""Simulates one step of a lowered plan: what happens when, on every rank and link."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from types import MappingProxyType

from simpy.core import Environment

from sim.step.deadlock import check_finished
from sim.step.exchange import ExchangeLanes
from sim.step.memory import memory_over_time
from sim.step.reduction import ReduceLanes
from sim.step.stage import ComputeLanes
from sim.step.wire import Network
from workbench.elastic.layerwise import LastBackward
from workbench.memory.account import MemoryTable
from workbench.plan.codec import plan_hash
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan, Program
from workbench.schedule.action import STEP, Action, Pass
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

    An action starts when it is next on every rank of its stage and its input rows are
    there, and holds all of them for its duration. Its end makes its output rows ready; a row
    waits for its link, occupies it for bytes / bandwidth and arrives latency later.
    UNSHARD and RESHARD take their stage's turn like a pass. REDUCE_GRAD runs beside later
    passes, group by group, each a rendezvous of its ranks; STEP waits for its rank's
    reductions. Where weights are sharded, UNSHARD and REDUCE_GRAD of a round run beside the
    passes, one at a time, each a rendezvous of all replicas, and `waits_of` says what waits for
    them. Ranks that share fewer cores than they are share their speed. At one instant
    everything that ends comes first, to a fixpoint; then every free link takes its lowest
    (ready time, row); and again, until nothing changes.

    Args:
        lowered: the plan and what was derived from it.
        duration_s: seconds of an action; asked once per action.
        step_s: seconds of a rank's STEP, where ranks differ; None: `duration_s(STEP)` on all.
        memory: what actions acquire and release; None leaves the memory curve out.
        overlapped: REDUCE_GRADs whose groups start layer by layer within a backward, see
            `workbench.elastic.layerwise`; of ranks with cores of their own.

    Returns:
        A trace with a span on every rank of an action's stage, a message per row and
        destination, and the memory curve. Equal input gives an equal trace.

    Raises:
        ValueError: a duration that is negative or not finite, programs that do not fit the
            stages, an action the simulator has no rule for, overlap on ranks that share cores.
        DeadlockError: actions that never ran, and what each waited for.

    Complexity: O(n log n) for n actions, rows and spans.
    """
    _check_programs(lowered.plan)
    prices = _prices(lowered.plan, duration_s)
    steps_s = _steps(lowered.plan, prices, step_s)
    with _no_garbage_collection():
        return _run(lowered, prices, steps_s, memory, overlapped)


def _run(
    lowered: Lowered,
    prices: Mapping[Action, float],
    steps_s: Mapping[int, float],
    memory: MemoryTable | None,
    overlapped: Mapping[Action, LastBackward],
) -> Trace:
    env = Environment(initial_time=0.0)
    compute = ComputeLanes(env, lowered, prices, steps_s)
    if overlapped and compute.shares_cores:
        raise ValueError("ranks share cores: how far a backward is, is not known; want cores of their own")
    reduce = ReduceLanes(env, lowered, prices, compute.reduced, overlapped)

    def exchanged(name: Action) -> None:
        compute.exchanged(name)
        reduce.exchanged(name)

    exchange = ExchangeLanes(env, lowered, prices, exchanged)
    network = Network(env, lowered.plan.cluster, lowered.transfers, compute.arrived)

    compute.start(send=network.send, issue=reduce.issue, issue_exchange=exchange.issue, began=reduce.began)
    env.run()

    check_finished(lowered, compute, reduce, exchange, network)
    spans, samples = _spans(lowered.plan, compute, reduce, exchange, memory)
    return Trace(
        plan_hash=plan_hash(lowered.plan),
        executor=Executor.SIMULATED,
        spans=spans,
        messages=_messages(lowered, network),
        memory=samples,
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A simulation makes many objects that last; walking them again and again takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    for action, num_holders in holders.items():
        if action.stage is not None and num_holders != len(plan.stage[action.stage].flat_ranks):
            ranks = plan.stage[action.stage].flat_ranks
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
        _check_price(f"action {action}", price_s)
    return prices


def _steps(
    plan: Plan, prices: Mapping[Action, float], step_s: Callable[[int], float] | None
) -> dict[int, float]:
    if step_s is None:
        return {rank: prices.get(STEP, 0.0) for rank in plan.program}
    steps_s = {rank: float(step_s(rank)) for rank in plan.program}
    for rank, price_s in steps_s.items():
        _check_price(f"rank {rank} in {STEP}", price_s)
    return steps_s


def _check_price(name: str, price_s: float) -> None:
    if not isfinite(price_s) or price_s < 0:
        raise ValueError(f"{name}: duration must be >= 0 s and finite, got {price_s}")


def _spans(
    plan: Plan,
    compute: ComputeLanes,
    reduce: ReduceLanes,
    exchange: ExchangeLanes,
    memory: MemoryTable | None,
) -> tuple[tuple[Span, ...], tuple[MemorySample, ...]]:
    """Of all ranks, by (rank, lane, start), with the memory curve that follows from them."""
    spans: list[Span] = []
    samples: list[MemorySample] = []
    for rank, actions in sorted(plan.program.items()):
        lane = reduce.lanes.get(rank, [])
        reductions = {r.action: Span(rank, Lane.REDUCE, r.action, r.start_s, r.end_s) for r in lane}
        passes = {}
        for action in actions:
            if exchange.names.is_one(action):
                found = exchange.of(action)
                reductions[action] = Span(rank, Lane.REDUCE, action, found.start_s, found.end_s)
            elif action.kind is not Pass.REDUCE_GRAD:
                turn = compute.steps[rank] if action == STEP else compute.turns[action]
                passes[action] = Span(rank, Lane.COMPUTE, action, turn.start_s, turn.end_s)
        spans.extend(passes.values())
        spans.extend(sorted(reductions.values(), key=lambda span: span.start_s))
        if memory is not None:
            both = passes | reductions
            samples.extend(memory_over_time(memory, rank, (both[action] for action in actions)))
    return tuple(spans), tuple(samples)


def _messages(lowered: Lowered, network: Network) -> tuple[Message, ...]:
    """One per row and destination; local rows never started on a link."""
    return tuple(
        Message(
            row.row,
            row.edge,
            row.source_rank,
            destination,
            row.num_bytes,
            network.ready_s[row.row],
            network.start_s[row.row],
            network.end_s[row.row],
        )
        for row in lowered.transfers
        if row.row in network.start_s
        for destination in row.destination_ranks
    )
