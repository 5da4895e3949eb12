"""Memory of every rank over a step: its static bytes, and what each action allocates and frees."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.collector import collector_paused
from workbench.memory.accounts import Accounts
from workbench.memory.entries import Lines, gradient_lines, rank_lines
from workbench.memory.equal_ranks import equal_ranks
from workbench.memory.stage import GRADIENTS, state_of
from workbench.plan.action_columns import action_columns
from workbench.plan.alike import alike_replicas
from workbench.plan.instance_cache import cached_on_instance, set_cached
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.parameter_shards import kept_stages
from workbench.plan.plan import Plan
from workbench.plan.shard_unit import ShardUnit
from workbench.schedule.action import MEANING, MOVES, Action, Pass
from workbench.units import gib, wanted_memory_text

NUM_HOLDERS_NAMED = 3


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
    lines = rank_lines(accounts)
    account_of: dict[Hashable, tuple[int, Lines]] = {}
    of_firsts: dict[int, tuple[int, Lines]] = {}
    for rank in firsts:
        key = accounts.shape(rank), id(lines[rank])
        if key not in account_of:
            static = sum(size for _, kind, size in accounts.state(rank) if kind.part != GRADIENTS)
            account_of[key] = static, _with_moves(accounts, rank, lines[rank])
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


def _with_moves(accounts: Accounts, rank: int, lines: Lines) -> Lines:
    """Return a rank's lines with the weights that are offloaded, onloaded, gathered and freed."""
    plan = accounts.plan
    if not action_columns(plan).moves_weights:
        return lines
    moves = [pair for pair in enumerate(plan.program.get(rank, ())) if pair[1].kind in MOVES]
    stage_bytes: Counter[int] = Counter()
    for stage, kind, num_bytes in accounts.state(rank):
        stage_bytes[stage.id] += num_bytes if kind.part != GRADIENTS else 0
    acquired, released = lines.acquired.copy(), lines.released.copy()
    moved, kept = {action.stage for _, action in moves}, kept_stages(plan)
    units = {stage: unit for stage, unit in accounts.units.items() if stage in moved}
    whole = {stage: whole_bytes(plan, unit) for stage, unit in units.items()}
    sent = {stage: sent_bytes(plan, unit) for stage, unit in units.items() if stage in kept}
    for index, action in moves:
        assert action.stage is not None
        column = acquired if MEANING[action.kind].weights > 0 else released
        column[index] += whole.get(action.stage, stage_bytes[action.stage])
        if action.stage in sent and action.kind is Pass.ALL_GATHER:
            acquired[index] += sent[action.stage]
            released[_next_of(plan.program[rank], index)] += sent[action.stage]
    return Lines(acquired, released)


def _next_of(program: Sequence[Action], index: int) -> int:
    """Return the position of the next action of the same stage."""
    stage = program[index].stage
    return next(other for other in range(index + 1, len(program)) if program[other].stage == stage)


def whole_bytes(plan: Plan, unit: ShardUnit) -> int:
    """Return the bytes that a round holds from its gather to FREE: the whole weights, padded.

    Of weights that are freed after every pass also the rank's own shard as it is sent.
    """
    whole = sum(map(unit.padded, unit.gathered)) * plan.settings.precision.num_bytes
    return whole if unit.stages[0] in kept_stages(plan) else whole + sent_bytes(plan, unit)


def sent_bytes(plan: Plan, unit: ShardUnit) -> int:
    """Return the bytes of the rank's own shard as it is sent."""
    return sum(map(unit.part, unit.gathered)) * plan.settings.precision.num_bytes


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


def peak_bytes(lowered: Lowered, table: MemoryTable) -> dict[int, int]:
    """Map each rank to its peak bytes over its program, which are those of its simulated timeline too."""
    return {rank: peak.num_bytes for rank, peak in _peaks(lowered.plan, table).items()}


@cached_on_instance
def fullest_bytes(plan: Plan) -> int:
    """Return the highest peak of any rank of a plan; cached by `check_memory`."""
    lowered = lower(plan)
    return max(peak_bytes(lowered, memory_table(lowered)).values())


def check_memory(lowered: Lowered, table: MemoryTable) -> None:
    """Raise ValueError for a plan that does not fit, with rank, action, largest holders and a remedy.

    A node whose ranks share cores shares its memory too: the peaks of its ranks are added.
    """
    plan = lowered.plan
    peaks = _peaks(plan, table)
    set_cached(plan, fullest_bytes, max(peak.num_bytes for peak in peaks.values()))
    for index, group in memory_groups(plan):
        node = plan.cluster.nodes[index]
        total = sum(peaks[rank].num_bytes for rank in group)
        if total <= node.memory_bytes:
            continue
        worst = max(group, key=lambda rank: (peaks[rank].num_bytes, -rank))
        moment = _moment_text(plan, worst, peaks[worst])
        raise ValueError(
            f"rank {worst}{_node_mates(group)} does not fit: {_gib(total)} {moment}, "
            f"but node {index} ({node.device}) has {_gib(node.memory_bytes)}; largest holders: "
            f"{_holders(lowered, table, worst)}; want {wanted_memory_text(total)}, "
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


def _gib(num_bytes: int) -> str:
    return f"{gib(num_bytes):.3g} GiB"


def _moment_text(plan: Plan, rank: int, peak: "_Peak") -> str:
    return "at rest" if peak.position is None else f"during {plan.program[rank][peak.position]}"


class _Peak(NamedTuple):
    """Peak bytes, and the position in the program of the action that first reaches them; None: at rest."""

    num_bytes: int
    position: int | None


def _peaks(plan: Plan, table: MemoryTable) -> dict[int, _Peak]:
    """Return the peak of every rank; ranks with equal accounts share their columns in the table."""
    peak_of: dict[tuple[int, int], _Peak] = {}
    peaks: dict[int, _Peak] = {}
    for rank in plan.ranks:
        static, acquired = table.static_bytes[rank], table.acquired_bytes[rank]
        key = static, id(acquired)
        if key not in peak_of:
            peak_of[key] = _peak(static, acquired, table.released_bytes[rank])
        peaks[rank] = peak_of[key]
    return peaks


def _peak(static: int, acquired: Sequence[int], released: Sequence[int]) -> _Peak:
    current = peak = static
    position: int | None = None
    for index, (allocated, freed) in enumerate(zip(acquired, released, strict=True)):
        current += allocated
        if current > peak:
            peak, position = current, index
        current -= freed
    return _Peak(peak, position)


def _node_mates(group: list[int]) -> str:
    return f" (with the {len(group) - 1} others of its node)" if len(group) > 1 else ""


def _holders(lowered: Lowered, table: MemoryTable, rank: int) -> str:
    """Describe the largest holders at the rank's peak, e.g. `optimizer of llm 4.20 GiB`."""
    holders: Counter[str] = Counter()
    accounts = Accounts(lowered, (rank,))
    for _, kind, num_bytes in accounts.state(rank):
        holders[str(kind)] += num_bytes
    gradients = gradient_lines(accounts, rank)
    position = _peaks(lowered.plan, table)[rank].position
    program = lowered.plan.program.get(rank, ())
    num_started = position + 1 if position is not None else 0
    for index in range(num_started, len(program)):
        for kind, num_bytes in gradients.get(index, {}).items():
            holders[str(kind)] -= num_bytes
    for index, action in enumerate(program[:num_started]):
        if action.kind in MOVES:
            _move_holders(accounts, rank, action, holders)
            continue
        name = _activation_holder(action)
        holders[name] += table.acquired_bytes[rank][index] - sum(gradients.get(index, {}).values())
        if index != position:
            holders[name] -= table.released_bytes[rank][index]
    largest = sorted(holders.items(), key=lambda item: (-item[1], item[0]))[:NUM_HOLDERS_NAMED]
    return ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in largest)


def _move_holders(accounts: Accounts, rank: int, action: Action, holders: Counter[str]) -> None:
    plan, sign = accounts.plan, MEANING[action.kind].weights
    assert action.stage is not None
    if action.stage in accounts.units:
        name = f"gathered weights of {plan.stage[action.stage].module}"
        holders[name] += sign * whole_bytes(plan, accounts.units[action.stage])
        return
    for stage, kind, num_bytes in state_of(plan, rank):
        if stage.id == action.stage and kind.part != GRADIENTS:
            holders[str(kind)] += sign * num_bytes


def _activation_holder(action: Action) -> str:
    return "the step" if action.stage is None else f"activations of stage {action.stage}"
