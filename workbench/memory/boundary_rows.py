"""Memory that ranks hold for the rows they send and receive, in columns: a plan may have 10^5 rows."""

from typing import NamedTuple

import numpy as np

from workbench.arrays import Flags, Ints, ints, spans, starts
from workbench.memory.accounts import Accounts
from workbench.memory.holdings import Holding, Part
from workbench.memory.program_positions import ProgramPositions
from workbench.plan.action_columns import NOWHERE
from workbench.plan.frame import frame_of
from workbench.plan.lowered import ROUTES, Route, Slice
from workbench.plan.lru_cache import Identity, LruCache

MOST_CELLS = 1_000_000  # in all cached plans together


class RowLines(NamedTuple):
    """What follows from rows alone, by cell: a position in a rank's program, the programs end to end.

    Args:
        first: rank -> its first cell.
        acquired, released: bytes allocated when the action starts, freed when it ends.
        held: of a forward's inputs that are tensors of their own.
        passed_on: of its inputs that a producer on the rank holds for it.
        output_end: cell up to which consumers or sends keep a forward's output; its own where none does.
        is_joined: whether a backward joins what it receives in a tensor of its own.
    """

    first: dict[int, int]
    acquired: Ints
    released: Ints
    held: Ints
    passed_on: Ints
    output_end: Ints
    is_joined: Flags


_ROW_LINES: LruCache[RowLines] = LruCache(MOST_CELLS, lambda lines: len(lines.acquired) + 1)


def row_lines(accounts: Accounts) -> RowLines:
    """Return the lines of the ranks whose accounts are needed.

    Complexity: O((rows + actions) x log), of rows that begin or end on them.
    """
    lowered = accounts.lowered
    key = frame_of(lowered.plan), Identity(lowered.transfers), accounts.ranks
    return _ROW_LINES.get_or(key, lambda: _RowAccount(accounts).lines)


def row_holdings(accounts: Accounts) -> tuple[RowLines, tuple[Holding, ...]]:
    """Return the lines, not cached, and the messages that they add up."""
    account = _RowAccount(accounts)
    return account.lines, tuple(account.holdings)


class _Rows:
    """Rows in columns; `row` is by end, of which a row has one per destination."""

    def __init__(self, accounts: Accounts, positions: ProgramPositions) -> None:
        rows, selected = accounts.lowered.rows, _rows_on(accounts)
        self.num_edges = len(rows.edges)
        self.edge, route = rows.edge[selected], rows.route[selected]
        self.is_local, self.is_p2p, self.is_broadcast, self.is_relay = (
            route == ROUTES[kind] for kind in (Route.LOCAL, Route.P2P, Route.BROADCAST, Route.RELAY)
        )
        self.num_bytes, self.source = rows.num_bytes[selected], rows.source[selected]
        numbers = rows.numbers(positions.number)
        self.producer, self.consumer = numbers[rows.producer[selected]], numbers[rows.consumer[selected]]
        content = rows.content[selected]
        is_view, is_whole = (
            np.array([test(slices) for slices in rows.contents], np.bool_) for test in (_is_view, _is_whole)
        )
        self.is_view, self.is_whole = is_view[content], is_whole[content]
        # Whether its sender first receives it, and so sends it when its program reaches the consumer.
        after = rows.after[selected]
        self.is_passed_on = (after >= 0) & (rows.route[after] != ROUTES[Route.LOCAL])
        num_ends = rows.num_destinations[selected]
        self.first_end = starts(num_ends)
        self.destination = rows.destination[spans(starts(rows.num_destinations)[selected], num_ends)]
        self.row = np.repeat(np.arange(len(selected)), num_ends)


def _rows_on(accounts: Accounts) -> Ints:
    """Return the rows that begin or end on a rank whose account is needed."""
    rows, ranks = accounts.lowered.rows, frozenset(accounts.ranks)
    if ranks.issuperset(accounts.plan.ranks):
        return np.arange(len(rows))
    is_on = [source in ranks or not ranks.isdisjoint(others) for source, others in rows.ends]
    return np.flatnonzero(np.array(is_on, np.bool_)[rows.end])


class _RowAccount:
    """Computes the lines of rows, all ranks at once."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts, self._positions = accounts, ProgramPositions(accounts.plan, accounts.ranks)
        num_cells, positions = len(self._positions.start), self._positions
        acquired, released, held, passed_on = np.zeros((4, num_cells), np.int64)
        ends, is_joined = np.arange(num_cells), np.zeros(num_cells, np.bool_)
        self.lines = RowLines(positions.first, acquired, released, held, passed_on, ends, is_joined)
        self.holdings: list[Holding] = []
        self._rows = rows = _Rows(accounts, positions)
        if not len(rows.source):
            return
        self._is_read_in_place = np.zeros(len(rows.source), np.bool_)
        self._sent_at = positions.at(rows.producer, rows.source)
        self._taken_at = positions.at(rows.consumer[rows.row], rows.destination)
        self._add_arrivals()
        self._add_outputs()

    def _hold(self, first: Ints, last: Ints, num_bytes: Ints) -> None:
        """Add bytes allocated at the start of one action and freed at the end of the same or a later one."""
        is_held = first <= last
        first, last, num_bytes = first[is_held], last[is_held], num_bytes[is_held]
        np.add.at(self.lines.acquired, first, num_bytes)
        np.add.at(self.lines.released, last, num_bytes)
        self.holdings.append(Holding(Part.MESSAGES, np.full_like(first, NOWHERE), first, last, num_bytes))

    def _add_arrivals(self) -> None:
        rows, positions = self._rows, self._positions
        first = positions.first_on[rows.destination]
        relayed = np.flatnonzero(rows.is_relay[rows.row] & (first != NOWHERE))  # all may be in flight at once
        rank = rows.destination[relayed]
        self._hold(first[relayed], positions.last_on[rank], rows.num_bytes[rows.row[relayed]])
        ends = np.flatnonzero((first != NOWHERE) & (self._taken_at != NOWHERE))
        cell = first[ends] + self._taken_at[ends]
        self._add_receive_buffers(ends, cell)
        self._add_inputs(rows.row[ends], cell)

    def _add_receive_buffers(self, ends: Ints, cell: Ints) -> None:
        """Add buffers, which wait for their rows from when they are posted until their consumer starts.

        While an action runs, the rows of the next pass that receives any are posted, and before each of them
        whatever the same sender sends earlier (except for broadcasts).
        """
        rows, positions = self._rows, self._positions
        consumer = rows.consumer[rows.row[ends]]
        is_received = ~rows.is_local[rows.row[ends]] & positions.is_compute[consumer]
        ends, cell = ends[is_received], cell[is_received]
        row = rows.row[ends]
        cells = np.arange(len(positions.start))
        is_receiving = np.zeros(len(cells), np.bool_)
        is_receiving[cell] = True
        receiving = np.maximum.accumulate(np.where(is_receiving, cells, positions.start))
        # The previous receiving action.
        posting = np.maximum(positions.start, np.concatenate(([0], receiving[:-1])))
        is_broadcast = rows.is_broadcast[row]
        posted = posting[cell]
        ordered = np.flatnonzero(~is_broadcast)
        pair = rows.destination[ends[ordered]] * positions.num_ranks + rows.source[row[ordered]]
        ordered = ordered[np.argsort(pair, kind="stable")]  # by row
        pair.sort()
        posted[ordered] = posting[_earliest_from(pair, cell[ordered])]
        is_buffer = is_broadcast | rows.is_p2p[row]
        self._hold(posted[is_buffer], cell[is_buffer] - 1, rows.num_bytes[row[is_buffer]])

    def _add_inputs(self, row: Ints, cell: Ints) -> None:
        """Add the inputs of forwards and backwards, given rows and the cells of their consumers."""
        rows, positions = self._rows, self._positions
        num_bytes, is_local, consumer = rows.num_bytes[row], rows.is_local[row], rows.consumer[row]
        tensor = cell * rows.num_edges + rows.edge[row]
        is_whole = rows.is_whole[row] & (np.bincount(tensor)[tensor] == 1)
        is_passed_on = is_local & is_whole & rows.is_view[row]
        is_forward, is_backward = positions.is_forward[consumer], positions.is_backward[consumer]
        for column, is_added in (
            (self.lines.passed_on, is_forward & is_passed_on),
            (self.lines.held, is_forward & ~is_passed_on),
        ):
            np.add.at(column, cell[is_added], num_bytes[is_added])
        # Forwards: rows exist beside the tensor that they are joined into.
        is_away = ~is_local & (is_backward | (is_forward & ~is_whole))
        self._hold(cell[is_away], cell[is_away], num_bytes[is_away])
        self.lines.is_joined[cell[is_backward]] = True
        is_only = is_backward & is_whole & (np.bincount(cell)[cell] == 1)
        self.lines.is_joined[cell[is_only]] = False
        self._is_read_in_place[row[is_forward & is_passed_on]] = True

    def _add_outputs(self) -> None:
        """Add outputs, held until consumers and sends are done; what is no view is a tensor of its own."""
        rows, positions = self._rows, self._positions
        row = np.flatnonzero((positions.first_on[rows.source] != NOWHERE) & (self._sent_at != NOWHERE))
        first = positions.first_on[rows.source[row]]
        producer, is_local = rows.producer[row], rows.is_local[row]
        cell, is_backward = first + self._sent_at[row], positions.is_backward[producer]
        consumer = first + self._taken_at[rows.first_end[row]]  # of a local row
        last = np.where(is_local, consumer, first + self._sent_ends()[row])
        last = np.minimum(last, positions.last_on[rows.source[row]])
        is_own = is_backward | (positions.is_forward[producer] & ~rows.is_view[row])
        self._hold(cell[is_own] + is_backward[is_own], last[is_own], rows.num_bytes[row[is_own]])
        read = np.flatnonzero(self._is_read_in_place[row])
        kept = self._backward_at(row[read])
        last[read] = np.where(kept == NOWHERE, last[read], first[read] + kept)
        is_kept = positions.is_forward[producer] & (is_local | rows.is_view[row])
        np.maximum.at(self.lines.output_end, cell[is_kept], last[is_kept])

    def _backward_at(self, row: Ints) -> Ints:
        """Return the position of the backward of each row's consumer on the sender's rank; NOWHERE: none."""
        number_of, backwards = self._positions.number, self._accounts.backwards
        actions = list(number_of)
        consumers, of_row = np.unique(self._rows.consumer[row], return_inverse=True)
        actions_read = map(actions.__getitem__, consumers.tolist())
        backward = [backwards.get((action.stage, action.microbatch)) for action in actions_read]
        numbers = ints(NOWHERE if action is None else number_of[action] for action in backward)
        return self._positions.at(numbers[of_row], self._rows.source[row])

    def _sent_ends(self) -> Ints:
        """Return, by row, the last position before one that proves it received, else one past the program.

        A consumer that has started has received the row; any row that comes back from that rank,
        produced then or later, proves that to the sender.
        """
        rows, positions, taken_at = self._rows, self._positions, self._taken_at
        source, bound = rows.source[rows.row], positions.longest + 1
        relayed_at = positions.at(rows.consumer, rows.source)
        sent_at = np.where(rows.is_passed_on, relayed_at, self._sent_at)[rows.row]
        is_sent = (rows.destination != source) & (sent_at != NOWHERE) & (taken_at != NOWHERE)
        sent = (source * positions.num_ranks + rows.destination)[is_sent] * bound + sent_at[is_sent]
        order = np.argsort(sent)
        sent = sent[order]
        answered_at = _earliest_from(sent // bound, taken_at[is_sent][order])
        pair = rows.destination * positions.num_ranks + source
        first = np.searchsorted(sent, pair * bound + taken_at)
        is_answered = (taken_at != NOWHERE) & (first < len(sent))
        is_answered[is_answered] = sent[first[is_answered]] // bound == pair[is_answered]
        ends = np.full(len(pair), bound, np.int64)
        ends[is_answered] = answered_at[first[is_answered]] - 1
        ends[rows.destination == source] = NOWHERE
        last_needed = self._sent_at.copy()
        np.maximum.at(last_needed, rows.row, ends)
        return last_needed


def _earliest_from(group: Ints, value: Ints) -> Ints:
    """Return, by entry, the least value of its group from there on; groups ascend, values are >= 0."""
    bound = 1 + np.max(value, initial=0)
    least: Ints = np.minimum.accumulate((group * bound + value)[::-1])[::-1]
    return least - group * bound


def _is_view(slices: tuple[Slice, ...]) -> bool:
    """Whether the row's tokens are contiguous in its producer's tensor, so that nothing is copied."""
    return len(slices) == 1 or _are_contiguous([piece.source_start for piece in slices], slices)


def _is_whole(slices: tuple[Slice, ...]) -> bool:
    """Whether a row alone delivers all of a tensor, in order."""
    if slices[0].destination_start != 0 or len(slices) == 1:
        return slices[0].destination_start == 0
    return _are_contiguous([piece.destination_start for piece in slices], slices)


def _are_contiguous(starts: list[int], slices: tuple[Slice, ...]) -> bool:
    ends = [start + piece.num_tokens for start, piece in zip(starts, slices, strict=True)]
    return ends[:-1] == starts[1:]
