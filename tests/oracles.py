"""Brute force: slow, obviously right, and sharing no code with what it judges."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, combinations, pairwise, permutations, product

from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.schedule.action import STEP, Action, Pass
from workbench.schedule.graph_aware import ScheduleNode

Programs = Mapping[tuple[int, ...], Sequence[Action]]


# Partition


def all_partitions(num_layers, num_stages):
    """Every way to cut a chain into non-empty runs."""
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(pairwise((0, *cuts, num_layers)))


# Schedules


def passes_read(
    nodes: Sequence[ScheduleNode], backward: Pass = Pass.B, whole: Collection[Action] = ()
) -> dict[Action, list[Action]]:
    """Pass -> passes whose results it needs: forwards of what it reads, backwards of its readers.

    With `backward` I every microbatch that has a backward and weights has a W too, which needs the I; but
    for those that are named as `whole`.
    """
    by_stage = {node.stage: node for node in nodes}

    def back(stage: int, own: int) -> Action:
        in_one = Action(stage, Pass.B, own)
        return in_one if in_one in whole else in_one._replace(kind=backward)

    needs: dict[Action, list[Action]] = {}
    for node in nodes:
        for own in range(node.num_microbatches):
            needs.setdefault(Action(node.stage, Pass.F, own), [])
            if node.backward[own]:
                needs |= _own_inputs(back(node.stage, own), node)
    for node in nodes:
        for consumer in node.consumers:
            reader = by_stage[consumer.stage]
            for index, read in enumerate(consumer.needs):
                for own in read:
                    needs[Action(reader.stage, Pass.F, index)].append(Action(node.stage, Pass.F, own))
                    if node.backward[own] and reader.backward[index]:
                        needs[back(node.stage, own)].append(back(reader.stage, index))
    return needs


def _own_inputs(backward: Action, node: ScheduleNode) -> dict[Action, list[Action]]:
    found = {backward: [backward._replace(kind=Pass.F)]}
    if backward.kind is Pass.I and (node.weights is None or node.weights[backward.microbatch or 0]):
        found[backward._replace(kind=Pass.W)] = [backward]
    return found


def shortest(
    needs: Mapping[Action, Sequence[Action]],
    stages: Sequence[int],
    duration: Callable[[Action], float],
    limit: int,
) -> float:
    """The best makespan of stages that each have a rank, of all orders within a limit.

    At most `limit` microbatches are held by a stage, each from its F to its W. Tries all: for few passes.
    """
    choices = []
    for stage in stages:
        mine = sorted(action for action in needs if action.stage == stage)
        orders = [order for order in permutations(mine) if _follows(order, needs) and _held(order) <= limit]
        choices.append([((stage,), order) for order in orders])
    best = math.inf
    for programs in product(*choices):
        with suppress(AssertionError):  # stages that wait for each other
            best = min(best, max(end for _, end in timed(dict(programs), needs, duration).values()))
    return best


def _follows(order: Sequence[Action], needs: Mapping[Action, Sequence[Action]]) -> bool:
    """Own inputs first, and forwards by index, which is no loss where microbatches are alike."""
    position = {action: index for index, action in enumerate(order)}
    forwards = [action.microbatch for action in order if action.kind is Pass.F]
    inputs = all(
        position[need] < position[action] for action in order for need in needs[action] if need in position
    )
    return inputs and forwards == sorted(forwards)


def _held(order: Sequence[Action]) -> int:
    steps = accumulate({Pass.F: 1, Pass.I: 0, Pass.W: -1}[action.kind] for action in order)
    return max(steps)


def timed(
    programs: Programs, needs: Mapping[Action, Sequence[Action]], duration: Callable[[Action], int]
) -> dict[Action, tuple[int, int]]:
    """(start, end) of every pass: as soon as the one before it and all that it needs have ended.

    A pass that stands in several programs runs when it is next in each. Looks at every program again and
    again until nothing moves; raises when some never ran.
    """
    rows_of: dict[Action, list[tuple[int, ...]]] = {}
    for row, actions in programs.items():
        for action in actions:
            rows_of.setdefault(action, []).append(row)
    times: dict[Action, tuple[int, int]] = {}
    done = dict.fromkeys(programs, 0)
    free = dict.fromkeys(programs, 0)
    moved = True
    while moved:
        moved = False
        for row, actions in programs.items():
            if done[row] == len(actions):
                continue
            action = actions[done[row]]
            rows = rows_of[action]
            if any(programs[other][done[other] : done[other] + 1] != (action,) for other in rows):
                continue
            if all(need in times for need in needs[action]):
                start = max([*(free[other] for other in rows), *(times[need][1] for need in needs[action])])
                times[action] = (start, start + duration(action))
                for other in rows:
                    free[other] = times[action][1]
                    done[other] += 1
                moved = True
    stuck = {row: str(programs[row][at]) for row, at in done.items() if at < len(programs[row])}
    if stuck:
        raise AssertionError(f"never ran: {stuck}")
    return times


# Communication


class Execution:
    """Runs a lowered plan for real, step by step, with every rank's own program and queues.

    Each round starts, on the state of its beginning, every pass that can start; all of them end
    together. Ranks post receives just before the pass that needs them, together with all that
    come earlier on that communicator, and sends at the end of the pass that makes them.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.programs = {rank: list(lowered.plan.program.get(rank, ())) for rank in lowered.plan.ranks}
        self.place = dict.fromkeys(self.programs, 0)
        self.ran: list[tuple[int, Action]] = []
        self.ticks: dict[Action, int] = {}
        self.sent: set[int] = set()
        self.twice = False
        self.arrived: set[int] = set()
        self.consumed: set[tuple[int, int]] = set()
        self.lanes: dict[int, list[int]] = {rank: [] for rank in self.programs}

    def run(self) -> bool:
        """Whether everything ran and nothing was left over."""
        tick = 0
        while True:
            self.collectives()
            self.deliver()
            ready = [action for action in self.next_actions() if self.can_start(action)]
            if not ready:
                break
            tick += 1
            for action in ready:
                self.finish(action, tick)
        return self.is_clean()

    def is_clean(self) -> bool:
        finished = all(at == len(self.programs[rank]) for rank, at in self.place.items())
        expected = {(row.row, rank) for row in self.lowered.transfers for rank in row.destination_ranks}
        nothing_out = self.consumed == expected and not any(self.lanes.values()) and not self.twice
        return finished and nothing_out

    def at(self, rank: int) -> Action | None:
        program, index = self.programs[rank], self.place[rank]
        return program[index] if index < len(program) else None

    def next_actions(self) -> list[Action]:
        found = dict.fromkeys(self.at(rank) for rank in self.programs)
        return [action for action in found if action is not None and action.kind is not Pass.REDUCE_GRAD]

    def ranks_of(self, action: Action) -> tuple[int, ...]:
        plan = self.lowered.plan
        return tuple(self.programs) if action.stage is None else plan.stage[action.stage].flat_ranks

    def can_start(self, action: Action) -> bool:
        ranks = self.ranks_of(action)
        if any(self.at(rank) != action for rank in ranks):
            return False
        if action == STEP:
            return not any(self.lanes.values())
        first = {Pass.B: Pass.F, Pass.I: Pass.F, Pass.W: Pass.I}.get(action.kind)
        if first and any((rank, action._replace(kind=first)) not in self.ran for rank in ranks):
            return False
        for number in self.lowered.inputs.get(action, ()):
            if number >= len(self.lowered.transfers):
                return False
            for rank in self.lowered.transfers[number].destination_ranks:
                fresh = number in self.arrived and (number, rank) not in self.consumed
                if rank not in ranks or not fresh:
                    return False
        return True

    def finish(self, action: Action, tick: int) -> None:
        ranks = self.ranks_of(action)
        for number in self.lowered.inputs.get(action, ()):
            self.consumed.update((number, rank) for rank in self.lowered.transfers[number].destination_ranks)
        for rank in ranks:
            self.ran.append((rank, action))
            self.place[rank] += 1
        self.ticks[action] = tick
        for number in self.lowered.outputs.get(action, ()):
            rows = self.lowered.transfers
            if number < len(rows) and rows[number].route is not Route.BROADCAST:
                self.twice |= number in self.sent
                if rows[number].source_rank in ranks:
                    self.send(rows[number])

    def send(self, row: Transfer) -> None:
        self.sent.add(row.row)

    def deliver(self) -> None:
        """Buffered: whatever was sent is there; a broadcast follows its row."""
        self.arrived |= self.sent
        for row in self.lowered.transfers:
            if row.route is Route.BROADCAST and row.after in self.arrived:
                before = self.lowered.transfers[row.after]
                if row.source_rank in before.destination_ranks:
                    self.arrived.add(row.row)

    def collectives(self) -> None:
        """Issue reductions that are next; finish those at the head of all their members' lanes."""
        groups, moved = self.lowered.groups, True
        while moved:
            moved = False
            for rank in self.programs:
                action = self.at(rank)
                if action is not None and action.kind is Pass.REDUCE_GRAD:
                    issued = self.lowered.reductions.get(action, ())
                    self.lanes[rank] += [index for index in issued if rank in groups[index].ranks]
                    self.place[rank] += 1
                    moved = True
            heads = {lane[0] for lane in self.lanes.values() if lane}
            for index in sorted(heads):
                members = groups[index].ranks
                if all(self.lanes[rank][:1] == [index] for rank in members):
                    for rank in members:
                        self.lanes[rank].pop(0)
                    moved = True


class RendezvousExecution(Execution):
    """Rows complete in order per communicator, when both ends have posted them."""

    def __init__(self, lowered: Lowered, ticks: Mapping[Action, int]) -> None:
        super().__init__(lowered)
        self.queues: dict[tuple[int, ...], list[Transfer]] = {}
        for row in lowered.transfers:
            if row.route is not Route.LOCAL:
                self.queues.setdefault(self.members(row), []).append(row)
        self.unit: dict[int, tuple[int, ...]] = {}  # row -> rows that are atomic with it
        for queue in self.queues.values():
            for row in queue:
                together = _run_around(queue, row, ticks)
                opposite = len({other.source_rank for other in together}) == 2
                is_atomic = row.route is Route.P2P and opposite
                self.unit[row.row] = tuple(o.row for o in together) if is_atomic else (row.row,)
        self.posted: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self.ever_posted: set[tuple[int, int]] = set()

    @staticmethod
    def members(row: Transfer) -> tuple[int, ...]:
        return tuple(sorted({row.source_rank, *row.destination_ranks}))

    def post_for(self, rank: int, row: Transfer) -> None:
        """Post a row that this rank receives, and what it receives earlier on that communicator."""
        if row.route is Route.LOCAL or rank not in self.members(row):
            return
        for other in self.queues[self.members(row)]:
            if other.row > row.row:
                break
            if other.route is Route.BROADCAST:
                if other.after is not None:
                    self.post_for(rank, self.lowered.transfers[other.after])
                self.post(rank, other)
            elif rank in other.destination_ranks:
                self.post(rank, other)

    def post(self, rank: int, row: Transfer) -> None:
        if (rank, row.row) not in self.ever_posted:
            self.ever_posted.add((rank, row.row))
            self.posted.setdefault((rank, self.members(row)), []).append(row.row)

    def send(self, row: Transfer) -> None:
        super().send(row)
        if row.route is Route.LOCAL:
            return
        last = max(self.unit[row.row])
        for other in self.queues[self.members(row)]:
            earlier = other.row < row.row or other.row in self.unit[row.row]
            if other.row <= last and earlier and row.source_rank in other.destination_ranks:
                self.post(row.source_rank, other)
        self.post(row.source_rank, row)

    def deliver(self) -> None:
        rows = self.lowered.transfers
        for rank in self.programs:
            for number in self.lowered.inputs.get(self.at(rank), ()):
                if number < len(rows):
                    self.post_for(rank, rows[number])
        self.arrived |= {row.row for row in rows if row.route is Route.LOCAL and row.row in self.sent}
        moved = True
        while moved:
            moved = False
            for members in self.queues:
                heads = [self.posted.get((rank, members), []) for rank in members]
                unit = self.unit[heads[0][0]] if heads[0] else ()
                if not unit or any(sorted(queue[: len(unit)]) != sorted(unit) for queue in heads):
                    continue
                before = [rows[number].after for number in unit]
                if all(number is None or number in self.arrived for number in before):
                    self.arrived.update(unit)
                    for queue in heads:
                        del queue[: len(unit)]
                    moved = True

    def is_clean(self) -> bool:
        return super().is_clean() and not any(self.posted.values())


def _run_around(queue: Sequence[Transfer], row: Transfer, ticks: Mapping[Action, int]) -> list[Transfer]:
    """Neighbours of a row in its queue made in the same tick, by the same route."""

    def same(other: Transfer) -> bool:
        return (other.route, ticks.get(other.producer)) == (row.route, ticks.get(row.producer))

    at = queue.index(row)
    first, last = at, at
    while first > 0 and same(queue[first - 1]):
        first -= 1
    while last + 1 < len(queue) and same(queue[last + 1]):
        last += 1
    return list(queue[first : last + 1])


def can_run(lowered: Lowered) -> bool:
    """Whether a lowered plan ends cleanly when it is executed, buffered and as rendezvous."""
    buffered = Execution(lowered)
    return buffered.run() and RendezvousExecution(lowered, buffered.ticks).run()
