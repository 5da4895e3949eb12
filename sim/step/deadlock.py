"""Says who never finished, and what each waited for, when a simulation ends too early."""

from sim.step.exchange import ExchangeLanes
from sim.step.reduction import ReduceLanes
from sim.step.stage import ComputeLanes
from sim.step.wire import Network
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Program
from workbench.schedule.action import STEP, Action

MOST_PROGRAMS = 8  # of one report


class DeadlockError(ValueError):
    """Some actions of a plan never ran: its orders, or its times, do not go together."""


def check_finished(
    lowered: Lowered,
    compute: ComputeLanes,
    reduce: ReduceLanes,
    exchange: ExchangeLanes,
    network: Network,
) -> None:
    """Raise DeadlockError naming ranks, actions and what they wait for, unless all has run."""
    stuck = [
        (program, reason)
        for index, program in enumerate(lowered.plan.programs)
        if (reason := _reason(lowered, compute, reduce, exchange, network, index)) is not None
    ]
    if not stuck:
        return
    num_stuck = sum(len(program.ranks) for program, _ in stuck)
    num_ranks = sum(len(program.ranks) for program in lowered.plan.programs)
    told = [f"{_name(program)} {reason}" for program, reason in stuck[:MOST_PROGRAMS]]
    if len(stuck) > MOST_PROGRAMS:
        told.append(f"and {len(stuck) - MOST_PROGRAMS} more programs")
    raise DeadlockError(f"{num_stuck} of {num_ranks} ranks never finished: {'; '.join(told)}")


def _reason(
    lowered: Lowered,
    compute: ComputeLanes,
    reduce: ReduceLanes,
    exchange: ExchangeLanes,
    network: Network,
    index: int,
) -> str | None:
    """Where a program stands and what for; None when it has ended."""
    program = lowered.plan.programs[index]
    late = next((rank for rank in program.ranks if _lane_reason(reduce, rank) is not None), None)
    position = compute.position[index]
    if position == len(program.actions):
        return None if late is None else f"in {_lane_reason(reduce, late)}"
    action = program.actions[position]
    if action == STEP:
        if all(compute.steps[rank].has_ended for rank in program.ranks):
            return None
        if late is not None:
            return f"before STEP (rank {late} in {_lane_reason(reduce, late)})"
    waits = [] if action == STEP else _missing(lowered, compute, network, action)
    for rank in program.ranks:
        if (stuck := exchange.stuck(rank)) is not None:
            waits.append(f"{stuck[0]} of its weights, which waits for rank {stuck[1][0]}")
            break
    return f"before {action} (waits for {', '.join(waits)})"


def _missing(lowered: Lowered, compute: ComputeLanes, network: Network, action: Action) -> list[str]:
    rows = [row for row in lowered.inputs.get(action, ()) if row not in network.end_s]
    waits = [f"row {row} from {lowered.transfers[row].producer}" for row in rows]
    for index in compute.turns[action].programs:
        program = lowered.plan.programs[index]
        position = compute.position[index]
        if program.actions.index(action) > position:
            waits.append(f"{_name(program)}, which is before {program.actions[position]}")
    return waits


def _lane_reason(reduce: ReduceLanes, rank: int) -> str | None:
    """The first issued reduction of a rank that never ended."""
    for reduction in reduce.lanes.get(rank, ()):
        if reduction.is_issued and not reduction.has_ended:
            group = reduction.current
            there = [r for r in group.ranks if _is_at(reduce, r, group)]
            missing = sorted(set(group.ranks) - set(there))
            return f"{reduction.action}: gradient group {group.index} waits for rank {missing[0]}"
    return None


def _is_at(reduce: ReduceLanes, rank: int, group: object) -> bool:
    unfinished = next((r for r in reduce.lanes.get(rank, ()) if not r.has_ended), None)
    return unfinished is not None and unfinished.is_issued and unfinished.current is group


def _name(program: Program) -> str:
    if len(program.ranks) == 1:
        return f"rank {program.ranks[0]}"
    return f"ranks {', '.join(map(str, program.ranks))}"
