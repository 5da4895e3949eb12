"""Memory of every rank over a step: its static bytes, and what each action allocates and frees."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.collector import collector_paused
from workbench.memory.accounts import Accounts
from workbench.memory.entries import Lines, rank_lines
from workbench.memory.equal_ranks import equal_ranks
from workbench.memory.moves import Moves
from workbench.memory.peak_parts import held_at
from workbench.memory.stage import GRADIENTS, state_of
from workbench.plan.action_columns import action_columns
from workbench.plan.alike import alike_replicas
from workbench.plan.instance_cache import cached_on_instance, set_cached
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import Action
from workbench.units import gib_text, wanted_memory_text

NUM_PARTS_NAMED = 6


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Bytes by rank.

    Args:
        static_bytes: rank -> parameters and optimizer state.
        acquired_bytes: rank -> allocated when an action starts, by its position in the rank's program.
        released_bytes: rank -> freed when it ends, likewise.
    """

    static_bytes: dict[int, int]
    acquired_bytes: dict[int, Sequence[int]]
    released_bytes: dict[int, Sequence[int]]


@collector_paused()
def memory_table(lowered: Lowered) -> MemoryTable:
    """Account for parameters, gradients, optimizer state, activations and boundary tensors.

    Static are parameters and optimizer state. Actions allocate, until it is freed:
      forward: what autograd keeps for its backward (with recompute: the inputs of layers that
        will be computed again), the stage's inputs and its output, until the last backward of
        the microbatch; where there is none, the output until its send is known to be received;
        and the largest layer's working set until its own end.
      backward: gradients of its tensors in work, and the gradient it received, until its end;
        the gradient it sends until that is received; at a stage's first, its weights'
        gradients until the end of STEP.
      any pass: the receive buffers of the next one that receives.
      OFFLOAD frees the weights and optimizer state of its stage, ONLOAD allocates them again.
        Of sharded weights ALL_GATHER allocates the whole ones until FREE, and its own shard as it is sent:
        until FREE, or until the first pass if weights stay for several;
        REDUCE_SCATTER allocates what it sends, until the first action that waits for it starts; STEP
        where stages reduce once, whose sums over replicas wait beside the passes.
      gradient reduction: a copy of what it reduces, until STEP; STEP: the optimizer's temporaries.
    What runs beside passes allocates when the program comes to it, however late its lane is free: so
    memory depends on the order of a rank's program alone, and on no time.
    A tensor passed to a stage on the same rank is counted once, until its last reader ends.
    A step's data is not counted, nor what a transport or an allocator holds beside tensors.

    Complexity: O(actions x layers of a stage + rows x rows of a pair of ranks), of the first of equal
    replicas; O(actions) for each other.
    """
    plan = lowered.plan
    original = _original_ranks(plan)
    ranks = plan.ranks
    account_of = _rank_accounts(lowered, [rank for rank in ranks if rank not in original])
    table = MemoryTable({}, {}, {})
    for rank in ranks:
        table.static_bytes[rank], lines = account_of[original.get(rank, rank)]
        table.acquired_bytes[rank], table.released_bytes[rank] = lines.acquired, lines.released
    return table


def _rank_accounts(lowered: Lowered, ranks: Sequence[int]) -> dict[int, tuple[int, Lines]]:
    """Return each rank's static bytes and lines; ranks whose accounts are equal share them."""
    accounts = Accounts(lowered, ranks)
    first_of = equal_ranks(accounts)
    firsts = tuple(dict.fromkeys(first_of.values()))
    if len(firsts) < len(ranks):
        accounts = Accounts(lowered, firsts)
    lines, moves = rank_lines(accounts), Moves(accounts)
    account_of: dict[Hashable, tuple[int, Lines]] = {}
    of_firsts: dict[int, tuple[int, Lines]] = {}
    for rank in firsts:
        key = accounts.shape(rank), id(lines[rank])
        if key not in account_of:
            static = sum(size for _, kind, size in accounts.state(rank) if kind.part != GRADIENTS)
            account_of[key] = static, _with_moves(moves, lowered.plan, rank, lines[rank])
        of_firsts[rank] = account_of[key]
    return {rank: of_firsts[first] for rank, first in first_of.items()}


def _original_ranks(plan: Plan) -> dict[int, int]:
    """Map each rank of a replica that equals an earlier one to the corresponding rank there."""
    return {
        rank: first_rank
        for first, *others in alike_replicas(plan)
        for other in others
        for first_rank, rank in zip(first.ranks, other.ranks, strict=True)
    }


def _with_moves(moves: Moves, plan: Plan, rank: int, lines: Lines) -> Lines:
    """Return a rank's lines with the weights that are offloaded, onloaded, gathered and freed."""
    if not action_columns(plan).moves_weights:
        return lines
    acquired, released = lines.acquired.copy(), lines.released.copy()
    for position, is_acquired, _, moved in moves.of(rank):
        column = acquired if is_acquired else released
        column[position] += moved.num_bytes
    return Lines(acquired, released)


def static_holders(plan: Plan, rank: int) -> dict[str, int]:
    """Return the bytes of a rank's parameters with all their state, by holder; a tied weight counts once.

    Complexity: O(parameters of the rank's stages).
    """
    holders: Counter[str] = Counter()
    for _, kind, num_bytes in state_of(plan, rank):
        holders[str(kind)] += num_bytes
    return dict(holders)


def moved_bytes(plan: Plan, table: MemoryTable, rank: int, action: Action) -> tuple[int, int]:
    """Return the bytes that an action allocates on a rank when it starts and frees when it ends."""
    index = plan.program[rank].index(action)
    return table.acquired_bytes[rank][index], table.released_bytes[rank][index]


class Peak(NamedTuple):
    """Peak bytes, and the position in the program of the action that first reaches them; None: at rest."""

    num_bytes: int
    position: int | None


def peak_bytes(lowered: Lowered, table: MemoryTable) -> dict[int, int]:
    """Map each rank to its peak bytes over its program, which are those of its simulated timeline too."""
    return {rank: peak.num_bytes for rank, peak in peaks_of(lowered.plan, table).items()}


@cached_on_instance
def fullest_bytes(plan: Plan) -> int:
    """Return the highest peak of any rank of a plan; cached by `check_memory`."""
    lowered = lower(plan)
    return max(peak_bytes(lowered, memory_table(lowered)).values())


def check_memory(lowered: Lowered, table: MemoryTable) -> None:
    """Raise ValueError for a plan that does not fit, with rank, action, what is in its peak and a remedy.

    A node whose ranks share cores shares its memory too: the peaks of its ranks are added.
    """
    plan = lowered.plan
    peaks = peaks_of(plan, table)
    set_cached(plan, fullest_bytes, max(peak.num_bytes for peak in peaks.values()))
    for index, group in memory_groups(plan):
        node = plan.cluster.nodes[index]
        total = sum(peaks[rank].num_bytes for rank in group)
        if total <= node.memory_bytes:
            continue
        worst = max(group, key=lambda rank: (peaks[rank].num_bytes, -rank))
        moment = _moment_text(plan, worst, peaks[worst])
        raise ValueError(
            f"rank {worst}{_node_mates(group)} does not fit: {gib_text(total)} {moment}, "
            f"but node {index} ({node.device}) has {gib_text(node.memory_bytes)}; in it: "
            f"{_parts_text(lowered, worst, peaks[worst])}; want {wanted_memory_text(total)}, "
            "or recompute, sharding or more stages"
        )


def memory_groups(plan: Plan) -> Iterator[tuple[int, list[int]]]:
    """Yield nodes with ranks that share memory there: one rank each, or all where ranks share CPU cores."""
    ranks_on: dict[int, list[int]] = {}
    for rank in plan.ranks:
        ranks_on.setdefault(plan.cluster.node_of(rank), []).append(rank)
    for index, ranks in sorted(ranks_on.items()):
        shared = plan.cluster.nodes[index].num_cores is not None
        yield from ((index, group) for group in ([ranks] if shared else [[rank] for rank in ranks]))


def _moment_text(plan: Plan, rank: int, peak: Peak) -> str:
    return "at rest" if peak.position is None else f"during {plan.program[rank][peak.position]}"


def _parts_text(lowered: Lowered, rank: int, peak: Peak) -> str:
    """Describe what is in a peak, largest first, e.g. `optimizer of llm 4.20 GiB`."""
    parts = held_at(lowered, rank, peak.position)
    named = [f"{held.name} {gib_text(held.num_bytes)}" for held in parts[:NUM_PARTS_NAMED]]
    rest = sum(held.num_bytes for held in parts[NUM_PARTS_NAMED:])
    return ", ".join([*named, *([f"others {gib_text(rest)}"] if rest else ())])


def peaks_of(plan: Plan, table: MemoryTable) -> dict[int, Peak]:
    """Return the peak of every rank; ranks with equal accounts share their columns in the table."""
    peak_of: dict[tuple[int, int], Peak] = {}
    peaks: dict[int, Peak] = {}
    for rank in plan.ranks:
        static, acquired = table.static_bytes[rank], table.acquired_bytes[rank]
        key = static, id(acquired)
        if key not in peak_of:
            peak_of[key] = _peak(static, acquired, table.released_bytes[rank])
        peaks[rank] = peak_of[key]
    return peaks


def _peak(static: int, acquired: Sequence[int], released: Sequence[int]) -> Peak:
    current = peak = static
    position: int | None = None
    for index, (allocated, freed) in enumerate(zip(acquired, released, strict=True)):
        current += allocated
        if current > peak:
            peak, position = current, index
        current -= freed
    return Peak(peak, position)


def _node_mates(group: list[int]) -> str:
    return f" (with the {len(group) - 1} others of its node)" if len(group) > 1 else ""
