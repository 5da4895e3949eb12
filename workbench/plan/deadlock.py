"""Checks that the communication of a lowered plan cannot deadlock, under two models of communication."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain, groupby, pairwise

import numpy as np

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lowered import ROUTES, Lowered, Route, Transfer
from workbench.plan.lru_cache import LruCache
from workbench.plan.row_proofs import TALKS, are_rows_sound, goes_forward, row_ticks
from workbench.plan.task_graph import Task
from workbench.schedule.action import STEP, Action, TaskKind
from workbench.schedule.precedence import find_cycle

MOST_LINKS = 12  # of a cycle that a message lists
SHOWN = 4  # entries of a queue or program shown on each side of the stuck one

_SOUND_PASSES: LruCache[None] = LruCache(1024)  # orders of passes without a deadlock
_SOUND_REDUCTIONS: LruCache[None] = LruCache(1024)
Positions = Mapping[int, Mapping[Action, int]]  # rank -> position of every action in its program
_NO_PROGRAM: list[Mapping[Action, int]] = [{}]  # of the ranks of a stage that does not exist
Slot = list[Transfer]  # rows that complete together


class Model(StrEnum):
    """How sends and receives are matched.

    BUFFERED: by tag, sends never wait (gloo). Only data and program order can block.
    RENDEZVOUS: in order per communicator, a row completes when both ends reached it (NCCL).
        Opposite rows between two ranks in one tick are one atomic group; a broadcast needs all its ranks.
    """

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"


def check_deadlock(lowered: Lowered) -> None:
    """Raise ValueError unless every rank can finish under both models.

    Rows must have both their ends in the programs of their ranks, collectives all their members. Then the
    task graph must have no cycle. Under RENDEZVOUS a row also waits for those before it on the same
    communicator, and a rank must produce its rows in their order.

    Raises:
        ValueError: naming rank, action, peer and row, with the queues of both ranks or both programs.

    Complexity: O(actions x ranks of their stage + rows + members of groups), after sorting rows.
    """
    _SOUND_PASSES.get_or(lowered.order_of_passes, lambda: _check_passes(lowered))
    _SOUND_REDUCTIONS.get_or(lowered.order, lambda: _check_reductions(lowered))


def _check_reductions(lowered: Lowered) -> None:
    """Check that gradient reductions can finish, given that the order of passes is sound."""
    _check_groups(lowered)
    graph = lowered.tasks
    is_sum = np.zeros(graph.num_nodes, dtype=np.bool_)
    is_sum[: graph.num_tasks] = [task.kind is TaskKind.ALL_REDUCE for task in graph.tasks]
    is_between = is_sum[graph.before] & is_sum[graph.after]
    before, after = graph.before[is_between], graph.after[is_between]
    group = np.array([-1 if task.group is None else task.group for task in graph.tasks])
    if ((group[before] >= 0) & (group[before] < group[after])).all():
        return  # every rank reduces in ascending order of groups
    followers: list[list[int]] = [[] for _ in graph.tasks]
    for earlier, later in zip(before.tolist(), after.tolist(), strict=True):
        followers[earlier].append(later)
    if find_cycle(followers):
        _check_cycles(lowered, _queues_of_slots(lowered, _by_communicator(lowered).values()))


def _check_passes(lowered: Lowered) -> None:
    """Check everything but cycles of gradient reductions alone."""
    positions = _positions(lowered)
    _check_programs(lowered, positions)
    if not are_rows_sound(lowered):
        _check_rows(lowered, positions)
    _check_groups(lowered)
    if not goes_forward(lowered):
        by_communicator = _by_communicator(lowered)
        _check_cycles(lowered, _queues_of_slots(lowered, by_communicator.values()))
        _check_send_order(lowered, positions, by_communicator.values())


def _check_cycles(lowered: Lowered, queues: list[list[Slot]]) -> None:
    if find_cycle(_followers(lowered, queues)):  # a cycle under BUFFERED is one under RENDEZVOUS, too
        model = Model.BUFFERED if find_cycle(_followers(lowered, [])) else Model.RENDEZVOUS
        queues = queues if model is Model.RENDEZVOUS else []
        raise ValueError(_report(lowered, model, find_cycle(_followers(lowered, queues)), queues))


def _followers(lowered: Lowered, queues: Sequence[Sequence[Slot]]) -> list[list[int]]:
    """Return the nodes that wait for each node of the task graph; a slot is the node of its first row.

    Slots of a queue complete one after another.
    """
    graph = lowered.tasks
    node_of = list(range(graph.num_nodes))
    for slot in chain.from_iterable(queues):
        for row in slot[1:]:
            node_of[graph.num_tasks + row.row] = graph.num_tasks + slot[0].row
    offsets, after = (array.tolist() for array in graph.adjacency)
    later = [node_of[node] for node in after]
    followers: list[list[int]] = [[] for _ in node_of]
    for node, (first, last) in zip(node_of, pairwise(offsets), strict=True):
        followers[node] += later[first:last]
    for queue in queues:
        for previous, following in pairwise(queue):
            followers[graph.num_tasks + previous[0].row].append(graph.num_tasks + following[0].row)
    return followers


def _positions(lowered: Lowered) -> Positions:
    """Return the position of every action in its program; ranks with one program share one table."""
    tables: dict[int, dict[Action, int]] = {}
    for actions in lowered.plan.program.values():
        if id(actions) not in tables:
            tables[id(actions)] = {action: index for index, action in enumerate(actions)}
    return {rank: tables[id(actions)] for rank, actions in lowered.plan.program.items()}


def _queues_of_slots(lowered: Lowered, by_communicator: Iterable[list[Transfer]]) -> list[list[Slot]]:
    """Split queues into slots: single rows, or the opposite rows of one tick between two ranks."""
    ticks, numbers = row_ticks(lowered), lowered.plan.program_actions
    queues: list[list[Slot]] = []
    for queue in by_communicator:
        slots: list[Slot] = []
        for _, members in groupby(queue, key=lambda row: (row.route, ticks[numbers.get(row.producer, -1)])):
            rows = list(members)
            is_pair = rows[0].route is Route.P2P and len({row.source_rank for row in rows}) == 2
            slots += [rows] if is_pair else [[row] for row in rows]
        queues.append(slots)
    return queues


def _by_communicator(lowered: Lowered) -> dict[tuple[int, ...], list[Transfer]]:
    """Map each set of ranks to the rows among exactly these, in row order; LOCAL rows have none."""
    queues: dict[tuple[int, ...], list[Transfer]] = {}
    queue_of: dict[tuple[int, tuple[int, ...]], list[Transfer]] = {}
    for index in np.flatnonzero(lowered.rows.route != ROUTES[Route.LOCAL]).tolist():
        row = lowered.transfers[index]
        ends = row.source_rank, row.destination_ranks
        if ends not in queue_of:
            queue_of[ends] = queues.setdefault(_members(row), [])
        queue_of[ends].append(row)
    return queues


def _members(row: Transfer) -> tuple[int, ...]:
    return tuple(sorted({row.source_rank, *row.destination_ranks}))


def _check_programs(lowered: Lowered, positions: Positions) -> None:
    """Check that every action occurs once, on every rank of its stage, after the pass that it continues."""
    plan = lowered.plan
    for rank in _distinct_programs(positions):
        program = plan.program[rank]
        for action, times in Counter(program).items():
            if times > 1:
                raise ValueError(f"rank {rank}: action {action} stands {times} times in the program")
        if STEP in program[:-1]:
            raise ValueError(f"rank {rank}: STEP must be the last action, {program[-1]} is")
    tables = {id(table): table for table in (positions.get(rank, {}) for rank in plan.ranks)}
    distinct = list(tables.values())
    for rank in _distinct_programs(positions):
        program_positions = positions[rank]
        for action in sorted(_suspects(lowered, positions, program_positions, distinct), key=str):
            if action.stage is not None and action.stage not in plan.stage:
                raise ValueError(f"rank {rank}: {action} is of no stage, stages are {sorted(plan.stage)}")
            for peer in plan.ranks_of(action):
                peer_positions = positions.get(peer, {})
                if peer_positions is not program_positions and action not in peer_positions:
                    raise ValueError(
                        f"rank {rank} before {action}: waits for rank {peer}, which never runs it\n"
                        + _show_programs(lowered, [(rank, action), (peer, action)])
                    )
            _check_continues(rank, action, program_positions)


def _suspects(
    lowered: Lowered, positions: Positions, own: Mapping[Action, int], distinct: list[Mapping[Action, int]]
) -> Iterable[Action]:
    """Yield a program's actions that precede what they continue, or are missing on a rank of their stage.

    Args:
        lowered: the lowered plan.
        positions: of actions in all programs.
        own: positions in the program.
        distinct: the positions in all programs, equal ones once.
    """
    plan = lowered.plan
    peers: dict[int | None, list[Mapping[Action, int]]] = {None: distinct}
    peers |= {
        stage: [
            other for rank in plan.stage[stage].flat_ranks if (other := positions.get(rank, {})) is not own
        ]
        for stage in {action.stage for action in own}
        if stage in plan.stage
    }
    for action, index in own.items():
        continued, others = action.continues, peers.get(action.stage, _NO_PROGRAM)
        if (continued is not None and own.get(continued, len(own)) > index) or (
            others and not all(action in other for other in others)
        ):
            yield action


def _distinct_programs(positions: Positions) -> list[int]:
    """Return the first rank of every distinct program; ranks with one program break the same rules."""
    first_rank: dict[int, int] = {}
    for rank, own in positions.items():
        first_rank.setdefault(id(own), rank)
    return list(first_rank.values())


def _check_continues(rank: int, action: Action, positions: Mapping[Action, int]) -> None:
    continued = action.continues
    if continued is not None and positions.get(continued, len(positions)) > positions[action]:
        when = "only after it" if continued in positions else "never"
        raise ValueError(f"rank {rank} before {action}: waits for {continued}, which it runs {when}")


def _check_rows(lowered: Lowered, positions: Positions) -> None:
    """Check that every row has both its ends, on ranks that run them."""
    rows = lowered.transfers
    for number, row in enumerate(rows):
        if row.row != number:
            raise ValueError(f"row {row.row} stands at place {number}: a row's number is its place")
    for verb, table, end in (
        ("waits for", lowered.inputs, "consumer"),
        ("sends", lowered.outputs, "producer"),
    ):
        for action, numbers in table.items():
            has_repeats = len(set(numbers)) < len(numbers)
            for number in numbers:
                times = numbers.count(number) if has_repeats else 1
                if number >= len(rows) or getattr(rows[number], end) != action or times > 1:
                    raise ValueError(
                        f"action {action} {verb} row {number}, which is not there, stands twice or has "
                        f"another {end}"
                    )
    for row in rows:
        for action in (row.producer, row.consumer):
            if action.kind not in TALKS:
                raise ValueError(f"{describe(row)}: {action} neither sends nor receives, only F, B and I do")
        _check_row(lowered, row, positions)


def _check_row(lowered: Lowered, row: Transfer, positions: Positions) -> None:
    if row.row not in lowered.inputs.get(row.consumer, ()):
        raise ValueError(f"{describe(row)}: {row.consumer} never receives it" + _show_queues(lowered, row))
    for rank in row.destination_ranks:
        if row.consumer not in positions.get(rank, {}) and row.route is not Route.RELAY:
            raise ValueError(
                f"{describe(row)}: rank {rank} receives it but never runs {row.consumer}"
                + _show_queues(lowered, row)
            )
    if row.route is Route.BROADCAST or row.after is not None:
        previous = lowered.transfers[row.after] if row.after is not None else None
        if previous is None or row.source_rank not in previous.destination_ranks or previous.row >= row.row:
            verb = "broadcasts" if row.route is Route.BROADCAST else "hands on"
            raise ValueError(f"{describe(row)}: rank {row.source_rank} {verb} what it never received")
        return
    if row.row not in lowered.outputs.get(row.producer, ()):
        raise ValueError(f"{describe(row)}: {row.producer} never sends it" + _show_queues(lowered, row))
    if row.producer not in positions.get(row.source_rank, {}):
        raise ValueError(
            f"{describe(row)}: rank {row.source_rank} sends it but never runs {row.producer}"
            + _show_queues(lowered, row)
        )
    is_same_rank = row.source_rank == row.destination_rank
    if is_same_rank != (row.route is Route.LOCAL) or len(row.destination_ranks) != 1:
        raise ValueError(f"{describe(row)}: route {row.route} does not fit its ranks")


@cached_on_instance
def _check_groups(lowered: Lowered) -> None:
    """Check that every rank of a group that needs a collective reaches it once."""
    reached: dict[int, list[int]] = {group.index: [] for group in lowered.groups}
    for program in lowered.plan.programs:
        for action in filter(lowered.reductions.__contains__, program.actions):
            for index in lowered.reductions[action]:
                members = lowered.groups[index].members
                reached[index] += [rank for rank in program.ranks if rank in members]
    present_of: dict[int, list[int]] = {}  # by identity of ranks: most groups share theirs
    for group in lowered.groups:
        if len(group.ranks) == 1:
            continue
        if id(group.ranks) not in present_of:  # not in replicas folded away
            present_of[id(group.ranks)] = sorted(filter(lowered.plan.stages_on.__contains__, group.ranks))
        if sorted(reached[group.index]) == present_of[id(group.ranks)]:
            continue
        times = {rank: reached[group.index].count(rank) for rank in present_of[id(group.ranks)]}
        if set(times.values()) - {1}:
            rank = next(rank for rank in group.ranks if times[rank] != 1)
            peer = next(other for other in group.ranks if other != rank)
            name = ", ".join(
                f"{w.module}[{w.layer if w.shared is None else w.shared}]" for w in group.weights
            )
            raise ValueError(
                f"gradient group {group.index} ({name}) of ranks {list(group.ranks)}: every rank must reduce "
                f"it once, rank {rank} does {times[rank]} times, rank {peer} {times[peer]}"
            )


def _check_send_order(
    lowered: Lowered, positions: Positions, by_communicator: Iterable[list[Transfer]]
) -> None:
    """Check that a rank produces the rows of a communicator in the order in which peers receive them."""
    for queue in by_communicator:
        last: dict[int, Transfer] = {}
        for row in queue:
            if row.route is not Route.P2P or row.after is not None:
                continue
            rank = row.source_rank
            earlier = last.get(rank)
            if earlier is not None and positions[rank][earlier.producer] > positions[rank][row.producer]:
                raise ValueError(
                    f"rank {rank} sends {describe(row)} before {describe(earlier)}, but rank "
                    f"{row.destination_rank} receives in row order" + _show_queues(lowered, row)
                )
            last[rank] = row


def describe(row: Transfer) -> str:
    """Describe a row in plan vocabulary: `row 4 (vision>llm forward, 0F0 to 2F0, rank 0 to 1)`."""
    to = ",".join(str(rank) for rank in row.destination_ranks)
    return (
        f"row {row.row} ({row.edge} {row.direction}, {row.producer} to {row.consumer}, "
        f"rank {row.source_rank} to {to})"
    )


def _report(lowered: Lowered, model: Model, cycle: Sequence[int], queues: Iterable[Sequence[Slot]]) -> str:
    """Return a line per link of the cycle, then the queues or programs of the first two ranks in it."""
    num_tasks, tasks = lowered.tasks.num_tasks, lowered.tasks.tasks
    slot_of = {row_slot[0].row: row_slot for queue in queues for row_slot in queue}
    rows = [
        slot_of.get(node - num_tasks, [lowered.transfers[node - num_tasks]]) if node >= num_tasks else []
        for node in cycle
    ]
    lines = [f"deadlock ({model}): every one waits for the next, the last for the first"]
    for node, slot in list(zip(cycle, rows, strict=True))[:MOST_LINKS]:
        text = " with ".join(map(describe, slot)) if slot else _describe_task(tasks[node])
        lines.append(f"  {text}")
    if len(cycle) > MOST_LINKS:
        lines.append(f"  and {len(cycle) - MOST_LINKS} more")
    wire = next((row for row_slot in rows for row in row_slot if row.route is not Route.LOCAL), None)
    if wire is not None:
        return "\n".join(lines) + _show_queues(lowered, wire)
    passes = [tasks[node] for node in cycle if node < num_tasks and tasks[node].kind is TaskKind.PASS]
    stuck = {rank: task.action for task in reversed(passes) for rank in reversed(task.ranks)}
    return "\n".join(lines) + "\n" + _show_programs(lowered, list(reversed(stuck.items()))[:2])


def _describe_task(task: Task) -> str:
    if task.kind is TaskKind.ALL_REDUCE:
        return f"gradient group {task.group} of ranks {list(task.ranks)}"
    if task.kind is TaskKind.FSDP:
        return f"{task.action} of all replicas"
    return f"rank {','.join(map(str, task.ranks))} before {task.action}"


def _show_queues(lowered: Lowered, row: Transfer) -> str:
    """Return what the two ranks of a row send and receive on its communicator, around the row."""
    members = _members(row)
    queue = _by_communicator(lowered).get(members, [row])
    position = queue.index(row)
    lines = [""]
    for rank in (row.source_rank, row.destination_rank):
        entries = [
            f"{'send' if r.source_rank == rank else 'recv'} {r.row} ({r.producer} to {r.consumer})"
            + (" <--" if r.row == row.row else "")
            for r in queue[max(0, position - SHOWN) : position + SHOWN + 1]
        ]
        lines.append(f"rank {rank} with {[r for r in members if r != rank]}: " + ", ".join(entries))
    stuck = [(row.source_rank, row.producer), *((rank, row.consumer) for rank in row.destination_ranks[:1])]
    return "\n".join(lines) + "\n" + _show_programs(lowered, stuck)


def _show_programs(lowered: Lowered, stuck: Iterable[tuple[int, Action]]) -> str:
    """Return the programs of ranks around an action, which is marked."""
    lines = []
    for rank, action in stuck:
        program = lowered.plan.program.get(rank, ())
        position = program.index(action) if action in program else len(program)
        shown = [
            f"{a} <--" if index == position else str(a)
            for index, a in enumerate(program)
            if abs(index - position) <= SHOWN
        ]
        lines.append(f"rank {rank} runs ... {' '.join(shown)}")
    return "\n".join(lines)
