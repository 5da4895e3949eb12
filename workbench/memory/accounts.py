"""What the accounts of ranks share: bytes of stages, places of actions, rows between two ranks."""

from collections import Counter, defaultdict
from collections.abc import Collection
from functools import cached_property
from itertools import accumulate

from workbench.memory.stage import Sizes, StateKind, state_of
from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.plan.parameter_shards import sharded_stages
from workbench.plan.plan import Stage
from workbench.plan.routing import routing_of
from workbench.plan.tied import equal_stages, tied_on
from workbench.schedule.action import Action, Pass

BACKWARDS = (Pass.B, Pass.I)  # what a forward keeps is given back at their end


class Accounts:
    """What the accounts of several ranks of a lowered plan look up.

    Args:
        lowered: the plan.
        ranks: whose accounts are wanted; None: any rank's.
    """

    def __init__(self, lowered: Lowered, ranks: Collection[int] | None = None) -> None:
        self.lowered, self.plan = lowered, lowered.plan
        self._ranks = frozenset(lowered.plan.ranks if ranks is None else ranks)
        self.units = sharded_stages(self.plan)
        self.sizes = Sizes(self.plan, routing_of(self.plan))
        self._state: dict[tuple[object, ...], tuple[tuple[Stage, StateKind, int], ...]] = {}

    def shape(self, rank: int) -> tuple[object, ...]:
        """What ranks have in common whose accounts are equal.

        That is their stages and program, the gradients that they reduce, and their rows with the programs of
        those they talk to; who these are is told by the order in which they come.
        """
        peers: defaultdict[int, int] = defaultdict()
        peers.default_factory = peers.__len__
        number, carried = peers.__getitem__, self._carried
        number(rank)
        rows = tuple(
            [
                (carried[row.row], number(row.source_rank), *map(number, row.destination_ranks))
                for row in self._rows_on.get(rank, ())
            ]
        )
        programs = tuple(id(self.place.get(peer)) for peer in peers)
        reduced = tuple(self._reduced.get(rank, ()))
        return self._state_key(rank), programs, reduced, rows

    @cached_property
    def _reduced(self) -> dict[int, list[int]]:
        """Rank -> elements of the gradient groups that it is in."""
        found: dict[int, list[int]] = {}
        for group in self.lowered.groups:
            for rank in self._ranks.intersection(group.ranks):
                found.setdefault(rank, []).append(group.num_elements)
        return found

    def _state_key(self, rank: int) -> tuple[object, ...]:
        """Ranks with the same stages hold the same."""
        return tuple(stage.id for stage in self.plan.stages_on.get(rank, ())), tied_on(self.plan, rank)

    def state(self, rank: int) -> tuple[tuple[Stage, StateKind, int], ...]:
        """(stage, part, bytes) of all that a rank's parameters hold."""
        key = self._state_key(rank)
        if key not in self._state:
            stages, (_, tied) = self.plan.stages_on.get(rank, ()), key
            if tied or any(equal_stages(self.plan, stage)[0] != stage.id for stage in stages):
                self._state[key] = self._shared_state(rank)
            else:
                each = ((stage, self.sizes.state(stage).items()) for stage in stages)
                self._state[key] = tuple((stage, kind, n) for stage, items in each for kind, n in items)
        return self._state[key]

    def _shared_state(self, rank: int) -> tuple[tuple[Stage, StateKind, int], ...]:
        """Where stages of the rank have weights in common, which count once."""
        sizes: Counter[tuple[int, StateKind]] = Counter()
        for stage, kind, num_bytes in state_of(self.plan, rank):
            sizes[stage.id, kind] += num_bytes
        return tuple((self.plan.stage[stage], kind, n) for (stage, kind), n in sizes.items())

    @cached_property
    def place(self) -> dict[int, dict[Action, int]]:
        """Rank -> position of every action in its program."""
        found: dict[int, dict[Action, int]] = {}
        for program in self.plan.programs:
            place = {action: position for position, action in enumerate(program.actions)}
            found.update((rank, place) for rank in program.ranks)
        return found

    @cached_property
    def _rows(self) -> list[Transfer]:
        """Those that begin or end on a rank whose account is wanted."""
        rows, ranks = self.lowered.transfers, self._ranks
        return [r for r in rows if r.source_rank in ranks or not ranks.isdisjoint(r.destination_ranks)]

    @cached_property
    def _rows_on(self) -> dict[int, list[Transfer]]:
        """Rank -> rows that begin or end there, in their order."""
        found: defaultdict[int, list[Transfer]] = defaultdict(list)
        for row in self._rows:
            for rank in {row.source_rank, *row.destination_ranks}:
                found[rank].append(row)
        return found

    @cached_property
    def _carried(self) -> dict[int, int]:
        """Row -> a number for what it carries from which pass to which, and by which route."""
        numbers: defaultdict[tuple[object, ...], int] = defaultdict()
        numbers.default_factory = numbers.__len__
        passed_on = self.is_passed_on
        return {
            row.row: numbers[
                row.edge,
                row.route,
                row.producer,
                row.consumer,
                row.slices,
                row.num_bytes,
                row.after is not None and passed_on(row),
            ]
            for row in self._rows
        }

    def is_passed_on(self, row: Transfer) -> bool:
        """Whether its sender has received it, and so sends it when it comes to the consumer itself."""
        return row.after is not None and self.lowered.transfers[row.after].route is not Route.LOCAL

    @cached_property
    def backwards(self) -> dict[tuple[int | None, int | None], Action]:
        """(stage, microbatch) -> its backward, the first pass of a split one."""
        actions = self.plan.program_actions
        return {(a.stage, a.microbatch): a for a in actions if a.kind in BACKWARDS}

    @cached_property
    def answers(self) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        """(producer's rank, consumer's rank) -> places of the producers of rows between them,
        ascending, and for each the earliest place of a consumer of its row or of a later one."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row in self._rows:
            sent_at = row.consumer if self.is_passed_on(row) else row.producer
            for rank in row.destination_ranks:
                ends = self.place[row.source_rank], self.place[rank]
                if rank != row.source_rank and sent_at in ends[0] and row.consumer in ends[1]:
                    pair = ends[0][sent_at], ends[1][row.consumer]
                    found.setdefault((row.source_rank, rank), []).append(pair)
        return {pair: _earliest_after(sorted(rows)) for pair, rows in found.items()}

    @cached_property
    def handed_on_bytes(self) -> dict[int, int]:
        """Rank -> bytes that it receives only to hand them on; all of them may wait at once."""
        found: Counter[int] = Counter()
        for row in self._rows:
            if row.route is Route.RELAY:
                found[row.destination_rank] += row.num_bytes
        return found

    @cached_property
    def arriving(self) -> dict[int, list[Transfer]]:
        """Rank -> rows that one sender sends it alone, in their order."""
        found: dict[int, list[Transfer]] = {}
        for row in self._rows:
            if row.route is Route.P2P:
                found.setdefault(row.destination_rank, []).append(row)
        return found


def _earliest_after(rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    earliest = list(accumulate((consumer for _, consumer in reversed(rows)), min))
    return [producer for producer, _ in rows], earliest[::-1]
