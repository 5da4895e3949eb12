"""Refuses lowered plans whose communication can deadlock, under both models of communication."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.plan.order import issue_ticks
from workbench.plan.parameter_shards import ShardUnit, sharded_stages
from workbench.plan.ring import ring
from workbench.schedule.action import Action, Pass
from workbench.schedule.sharded import is_exchange, waits_of

MOST_LINKS = 12  # of a ring that a message spells out
SHOWN = 4  # entries of a queue or program shown on each side of the stuck one


_TALKS = (Pass.F, Pass.B, Pass.I)


class Model(StrEnum):
    """How rows are matched.

    BUFFERED: by tag, sends never wait (gloo). Only data and program order can block.
    RENDEZVOUS: in order per communicator, a row completes when both ends reached it (NCCL).
        Opposite rows of one pair in one tick are one atomic group; a broadcast needs all its ranks.
    """

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"


def check_deadlock(lowered: Lowered) -> None:
    """Return when every rank can finish under both models.

    Rows must have both their ends in the programs of their ranks, collectives all their members.
    Then "who waits for whom" must have no cycle: an action waits for the one before it on each rank
    of its stage, for its rows and, if a backward, for its forward; a row for its producer; a gradient
    group for all its ranks to reach it, each rank reducing in issue order on a lane of its own; STEP
    for everything of its rank. Under RENDEZVOUS a row also waits for those before it on the same
    communicator, and a rank must produce its rows in their order.

    Raises:
        ValueError: naming rank, action, peer and row, with the queues of both ranks or both programs.

    Complexity: O(actions x ranks of their stage + rows + members of groups), after sorting rows.
    """
    _check_programs(lowered)
    _check_rows(lowered)
    _check_groups(lowered)
    for model in Model:
        waits = _waits(lowered, model)
        cycle = ring(waits.before)
        if cycle:
            raise ValueError(_report(lowered, model, [waits.nodes[index] for index in cycle]))
    _check_send_order(lowered)


@dataclass(frozen=True, slots=True)
class _Pass:
    """An action on all ranks of its stage; STEP on all ranks."""

    action: Action


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that complete together."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """The all-reduce of one gradient group."""

    index: int


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The gather or the reduction of one round, under the name of its unit's first stage."""

    action: Action


_Node = _Pass | _Rows | _Group | _Exchange


class _Waits:
    """Who waits for whom; node order is the order of creation and breaks all ties."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.before: list[list[int]] = []
        self._index: dict[_Node, int] = {}

    def node(self, node: _Node) -> int:
        if node not in self._index:
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
            self.before.append([])
        return self._index[node]

    def add(self, node: _Node, waits_for: _Node) -> None:
        self.before[self.node(node)].append(self.node(waits_for))


def _waits(lowered: Lowered, model: Model) -> _Waits:
    waits = _Waits()
    units = sharded_stages(lowered.plan)
    for rank in lowered.plan.ranks:
        _add_program(lowered, rank, units, waits)
    slots = _slots(lowered, model)
    slot_of = {row: slot for slot in slots for row in slot.rows}
    for row in lowered.transfers:
        slot = slot_of[row.row]
        waits.add(slot, _Pass(row.producer))
        waits.add(_Pass(row.consumer), slot)
        if row.after is not None:
            waits.add(slot, slot_of[row.after])
    if model is Model.RENDEZVOUS:
        for queue in _by_communicator(lowered).values():
            for one, next_one in pairwise(queue):
                if slot_of[one.row] != slot_of[next_one.row]:
                    waits.add(slot_of[next_one.row], slot_of[one.row])
    return waits


def _add_program(lowered: Lowered, rank: int, units: Mapping[int, ShardUnit], waits: _Waits) -> None:
    program = lowered.plan.program.get(rank, ())
    awaited = waits_of(program, units)
    previous: _Node | None = None
    lane: _Node | None = None
    exchange: _Node | None = None
    for action in program:
        if is_exchange(action, units):
            exchange = _behind(waits, _exchange(action, units), previous, exchange)
        elif action.kind is Pass.REDUCE_GRAD:
            dealt = [_exchange(wait, units) for wait in awaited.get(action, ())]
            for index in _groups_on(lowered, action, rank):
                lane = _behind(waits, _Group(index), previous, lane, *dealt)
        else:
            needs = _own_input(action)
            previous = _behind(
                waits,
                _Pass(action),
                previous,
                lane if action.kind is Pass.STEP else None,
                None if needs is None else _Pass(needs),
                *(_exchange(wait, units) for wait in awaited.get(action, ())),
            )


def _behind(waits: _Waits, node: _Node, *before: _Node | None) -> _Node:
    waits.node(node)
    for earlier in before:
        if earlier is not None:
            waits.add(node, earlier)
    return node


def _exchange(action: Action, units: Mapping[int, ShardUnit]) -> _Exchange:
    return _Exchange(action._replace(stage=units[action.stage or 0].stages[0]))


def _own_input(action: Action) -> Action | None:
    """The pass of the same stage and microbatch that this one continues."""
    kind = {Pass.B: Pass.F, Pass.I: Pass.F, Pass.W: Pass.I}.get(action.kind)
    return None if kind is None else action._replace(kind=kind)


def _slots(lowered: Lowered, model: Model) -> list[_Rows]:
    """Rows that are one unit: single rows, or opposite rows of one pair in one tick."""
    if model is Model.BUFFERED:
        return [_Rows((row.row,)) for row in lowered.transfers]
    ticks = issue_ticks(lowered.plan, lowered.transfers)
    slots = [_Rows((row.row,)) for row in lowered.transfers if row.route is Route.LOCAL]
    for queue in _by_communicator(lowered).values():
        for _, members in groupby(queue, key=lambda row: (row.route, ticks[row.producer])):
            rows = list(members)
            if rows[0].route is Route.P2P and len({row.source_rank for row in rows}) == 2:
                slots.append(_Rows(tuple(row.row for row in rows)))
            else:
                slots += [_Rows((row.row,)) for row in rows]
    return slots


def _by_communicator(lowered: Lowered) -> dict[tuple[int, ...], list[Transfer]]:
    """Ranks -> rows among exactly these, in row order. LOCAL rows have no communicator."""
    queues: dict[tuple[int, ...], list[Transfer]] = {}
    for row in lowered.transfers:
        if row.route is not Route.LOCAL:
            queues.setdefault(_members(row), []).append(row)
    return queues


def _members(row: Transfer) -> tuple[int, ...]:
    return tuple(sorted({row.source_rank, *row.destination_ranks}))


def _groups_on(lowered: Lowered, action: Action, rank: int) -> Iterator[int]:
    """Groups of a REDUCE_GRAD that this rank is in, in issue order."""
    for index in lowered.reductions.get(action, ()):
        if rank in lowered.groups[index].ranks:
            yield index


def _check_programs(lowered: Lowered) -> None:
    """Every action once per program, and on every rank of its stage."""
    plan = lowered.plan
    for rank, program in plan.program.items():
        for action, times in Counter(program).items():
            if times > 1:
                raise ValueError(f"rank {rank}: action {action} stands {times} times in the program")
    done = {rank: set(program) for rank, program in plan.program.items()}
    for rank, actions in done.items():
        for action in sorted(actions, key=str):
            if action.stage is not None and action.stage not in plan.stage:
                raise ValueError(f"rank {rank}: {action} is of no stage, stages are {sorted(plan.stage)}")
            for peer in _ranks_of(lowered, action):
                if action not in done.get(peer, ()):
                    raise ValueError(
                        f"rank {rank} before {action}: waits for rank {peer}, which never runs it\n"
                        + _programs(lowered, [(rank, action), (peer, action)])
                    )
            needs = _own_input(action)
            if needs is not None and needs not in actions:
                raise ValueError(f"rank {rank} before {action}: waits for {needs}, which it never runs")


def _check_rows(lowered: Lowered) -> None:
    """Every row has both ends, on ranks that run them."""
    rows = lowered.transfers
    for place, row in enumerate(rows):
        if row.row != place:
            raise ValueError(f"row {row.row} stands at place {place}: a row's number is its place")
    for what, table, end in (
        ("waits for", lowered.inputs, "consumer"),
        ("sends", lowered.outputs, "producer"),
    ):
        for action, numbers in table.items():
            for number, times in Counter(numbers).items():
                if number >= len(rows) or getattr(rows[number], end) != action or times > 1:
                    raise ValueError(
                        f"action {action} {what} row {number}, which is not there, stands twice or has "
                        f"another {end}"
                    )
    for row in rows:
        for action in (row.producer, row.consumer):
            if action.kind not in _TALKS:
                raise ValueError(f"{describe(row)}: {action} neither sends nor receives, only F, B and I do")
        _check_row(lowered, row)


def _check_row(lowered: Lowered, row: Transfer) -> None:
    program, what = lowered.plan.program, describe(row)
    if row.row not in lowered.inputs.get(row.consumer, ()):
        raise ValueError(f"{what}: {row.consumer} never receives it" + _both_queues(lowered, row))
    for rank in row.destination_ranks:
        if row.consumer not in program.get(rank, ()):
            raise ValueError(
                f"{what}: rank {rank} receives it but never runs {row.consumer}" + _both_queues(lowered, row)
            )
    if row.route is Route.BROADCAST:
        before = lowered.transfers[row.after] if row.after is not None else None
        if before is None or row.source_rank not in before.destination_ranks or before.row >= row.row:
            raise ValueError(f"{what}: rank {row.source_rank} broadcasts what it never received")
        return
    if row.row not in lowered.outputs.get(row.producer, ()):
        raise ValueError(f"{what}: {row.producer} never sends it" + _both_queues(lowered, row))
    if row.producer not in program.get(row.source_rank, ()):
        raise ValueError(
            f"{what}: rank {row.source_rank} sends it but never runs {row.producer}"
            + _both_queues(lowered, row)
        )
    is_own = row.source_rank == row.destination_rank
    if is_own != (row.route is Route.LOCAL) or len(row.destination_ranks) != 1:
        raise ValueError(f"{what}: route {row.route} does not fit its ranks")


def _check_groups(lowered: Lowered) -> None:
    """Every rank of a group that needs a collective reaches it once."""
    reached: Counter[tuple[int, int]] = Counter()
    for rank, program in lowered.plan.program.items():
        for action in program:
            if action.kind is Pass.REDUCE_GRAD:
                reached.update((index, rank) for index in _groups_on(lowered, action, rank))
    for group in lowered.groups:
        times = {rank: reached[group.index, rank] for rank in group.ranks}
        if len(group.ranks) > 1 and set(times.values()) != {1}:
            rank = next(rank for rank in group.ranks if times[rank] != 1)
            peer = next(other for other in group.ranks if other != rank)
            name = ", ".join(
                f"{w.module}[{w.layer if w.shared is None else w.shared}]" for w in group.weights
            )
            raise ValueError(
                f"gradient group {group.index} ({name}) of ranks {list(group.ranks)}: every rank must reduce "
                f"it once, rank {rank} does {times[rank]} times, rank {peer} {times[peer]}"
            )


def _check_send_order(lowered: Lowered) -> None:
    """A rank produces the rows of one communicator in their order: its peers receive in row order."""
    place = {
        rank: {action: index for index, action in enumerate(program)}
        for rank, program in lowered.plan.program.items()
    }
    for queue in _by_communicator(lowered).values():
        last: dict[int, Transfer] = {}
        for row in queue:
            if row.route is not Route.P2P:
                continue
            rank = row.source_rank
            earlier = last.get(rank)
            if earlier is not None and place[rank][earlier.producer] > place[rank][row.producer]:
                raise ValueError(
                    f"rank {rank} sends {describe(row)} before {describe(earlier)}, but rank "
                    f"{row.destination_rank} receives in row order" + _both_queues(lowered, row)
                )
            last[rank] = row


def describe(row: Transfer) -> str:
    """A row in plan vocabulary: `row 4 (vision>llm forward, 0F0 to 2F0, rank 0 to 1)`."""
    to = ",".join(str(rank) for rank in row.destination_ranks)
    return (
        f"row {row.row} ({row.edge} {row.direction}, {row.producer} to {row.consumer}, "
        f"rank {row.source_rank} to {to})"
    )


def _report(lowered: Lowered, model: Model, cycle: Sequence[_Node]) -> str:
    """One line per link of the ring, then the queues or programs of the first two ranks in it."""
    lines = [f"deadlock ({model}): every one waits for the next, the last for the first"]
    lines += [f"  {_tell(lowered, node)}" for node in cycle[:MOST_LINKS]]
    if len(cycle) > MOST_LINKS:
        lines.append(f"  and {len(cycle) - MOST_LINKS} more")
    rows = [lowered.transfers[row] for node in cycle if isinstance(node, _Rows) for row in node.rows]
    wire = next((row for row in rows if row.route is not Route.LOCAL), None)
    if wire is not None:
        return "\n".join(lines) + _both_queues(lowered, wire)
    passes = [node.action for node in cycle if isinstance(node, _Pass)]
    stuck = [(rank, action) for action in passes for rank in _ranks_of(lowered, action)]
    seen = list(dict(stuck).items())[:2]
    return "\n".join(lines) + "\n" + _programs(lowered, seen)


def _tell(lowered: Lowered, node: _Node) -> str:
    if isinstance(node, _Pass):
        ranks = ",".join(str(rank) for rank in _ranks_of(lowered, node.action))
        return f"rank {ranks} before {node.action}"
    if isinstance(node, _Group):
        return f"gradient group {node.index} of ranks {list(lowered.groups[node.index].ranks)}"
    if isinstance(node, _Exchange):
        return f"{node.action} of all replicas"
    return " with ".join(describe(lowered.transfers[row]) for row in node.rows)


def _ranks_of(lowered: Lowered, action: Action) -> tuple[int, ...]:
    return lowered.plan.ranks if action.stage is None else lowered.plan.stage[action.stage].flat_ranks


def _both_queues(lowered: Lowered, row: Transfer) -> str:
    """What the two ranks of a row send and receive on its communicator, around the row."""
    members = _members(row)
    queue = _by_communicator(lowered).get(members, [row])
    at = queue.index(row)
    lines = [""]
    for rank in (row.source_rank, row.destination_rank):
        entries = [
            f"{'send' if r.source_rank == rank else 'recv'} {r.row} ({r.producer} to {r.consumer})"
            + (" <--" if r.row == row.row else "")
            for r in queue[max(0, at - SHOWN) : at + SHOWN + 1]
        ]
        lines.append(f"rank {rank} with {[r for r in members if r != rank]}: " + ", ".join(entries))
    stuck = [(row.source_rank, row.producer), *((rank, row.consumer) for rank in row.destination_ranks[:1])]
    return "\n".join(lines) + "\n" + _programs(lowered, stuck)


def _programs(lowered: Lowered, stuck: Iterable[tuple[int, Action]]) -> str:
    """Programs of ranks around an action, which is marked."""
    lines = []
    for rank, action in stuck:
        program = lowered.plan.program.get(rank, ())
        at = program.index(action) if action in program else len(program)
        shown = [
            f"{a} <--" if index == at else str(a)
            for index, a in enumerate(program)
            if abs(index - at) <= SHOWN
        ]
        lines.append(f"rank {rank} runs ... {' '.join(shown)}")
    return "\n".join(lines)
