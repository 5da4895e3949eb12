"""What ranks hold of the rows that they send and receive, in columns: a plan may have 10^5 of them."""

from typing import NamedTuple

import numpy as np

from workbench.arrays import Flags, Ints, ints, spans, starts
from workbench.memory.accounts import Accounts
from workbench.memory.places import Places
from workbench.plan.action_columns import NOWHERE
from workbench.plan.frame import frame_of
from workbench.plan.lowered import ROUTES, Route, Slice
from workbench.plan.lru_cache import Identity, LruCache

MOST_CELLS = 1_000_000  # of all plans whose rows are remembered


class RowLines(NamedTuple):
    """What follows from rows alone, by cell: a place in a rank's program, those of all ranks end to end.

    Args:
        first: rank -> its first cell.
        acquired, released: bytes taken when the action starts, given back when it ends.
        held: of a forward's inputs that are tensors of their own.
        passed_on: of its inputs that a producer on the rank holds for it.
        output_end: cell up to which consumers or sends keep a forward's output; its own where none does.
        is_joined: whether a backward joins what it receives to a tensor of its own.
    """

    first: dict[int, int]
    acquired: Ints
    released: Ints
    held: Ints
    passed_on: Ints
    output_end: Ints
    is_joined: Flags


_KNOWN: LruCache[RowLines] = LruCache(MOST_CELLS, lambda lines: len(lines.acquired) + 1)


def row_lines(accounts: Accounts) -> RowLines:
    """Of the ranks whose accounts are wanted.

    Complexity: O((rows + actions) x log), of rows that begin or end on them.
    """
    lowered = accounts.lowered
    key = frame_of(lowered.plan), Identity(lowered.transfers), accounts.ranks
    return _KNOWN.get_or(key, lambda: _RowAccount(accounts).lines)


class _Rows:
    """Rows by column; `row` is by end, of which a row has as many as destinations."""

    def __init__(self, accounts: Accounts, places: Places) -> None:
        of, picked = accounts.lowered.rows, _rows_on(accounts)
        self.num_edges = len(of.edges)
        self.edge, route = of.edge[picked], of.route[picked]
        self.is_local, self.is_p2p, self.is_broadcast, self.is_relay = (
            route == ROUTES[each] for each in (Route.LOCAL, Route.P2P, Route.BROADCAST, Route.RELAY)
        )
        self.num_bytes, self.source = of.num_bytes[picked], of.source[picked]
        numbers = of.numbers(places.number)
        self.producer, self.consumer = numbers[of.producer[picked]], numbers[of.consumer[picked]]
        content = of.content[picked]
        is_view, is_whole = (
            np.array([test(slices) for slices in of.contents], np.bool_) for test in (_is_view, _is_whole)
        )
        self.is_view, self.is_whole = is_view[content], is_whole[content]
        # Whether its sender has received it, and so sends it when it comes to the consumer itself.
        after = of.after[picked]
        self.is_passed_on = (after >= 0) & (of.route[after] != ROUTES[Route.LOCAL])
        num_ends = of.num_destinations[picked]
        self.first_end = starts(num_ends)
        self.destination = of.destination[spans(starts(of.num_destinations)[picked], num_ends)]
        self.row = np.repeat(np.arange(len(picked)), num_ends)


def _rows_on(accounts: Accounts) -> Ints:
    """Those that begin or end on a rank whose account is wanted."""
    rows, ranks = accounts.lowered.rows, frozenset(accounts.ranks)
    if ranks.issuperset(accounts.plan.ranks):
        return np.arange(len(rows))
    is_on = [source in ranks or not ranks.isdisjoint(others) for source, others in rows.ends]
    return np.flatnonzero(np.array(is_on, np.bool_)[rows.end])


class _RowAccount:
    """The lines of rows, all ranks at once."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts, self._places = accounts, Places(accounts.plan, accounts.ranks)
        num_cells, places = len(self._places.start), self._places
        acquired, released, held, passed_on = np.zeros((4, num_cells), np.int64)
        ends, is_joined = np.arange(num_cells), np.zeros(num_cells, np.bool_)
        self.lines = RowLines(places.first, acquired, released, held, passed_on, ends, is_joined)
        self._rows = rows = _Rows(accounts, places)
        if not len(rows.source):
            return
        self._is_read_in_place = np.zeros(len(rows.source), np.bool_)
        self._sent_at = places.at(rows.producer, rows.source)
        self._taken_at = places.at(rows.consumer[rows.row], rows.destination)
        self._add_arrivals()
        self._add_outputs()

    def _hold(self, first: Ints, last: Ints, num_bytes: Ints) -> None:
        """Taken at the start of one action, given back at the end of the same or a later one."""
        is_held = first <= last
        np.add.at(self.lines.acquired, first[is_held], num_bytes[is_held])
        np.add.at(self.lines.released, last[is_held], num_bytes[is_held])

    def _add_arrivals(self) -> None:
        rows, places = self._rows, self._places
        first = places.first_on[rows.destination]
        handed_on = np.flatnonzero(rows.is_relay[rows.row] & (first != NOWHERE))  # all may wait at once
        rank = rows.destination[handed_on]
        self._hold(first[handed_on], places.last_on[rank], rows.num_bytes[rows.row[handed_on]])
        ends = np.flatnonzero((first != NOWHERE) & (self._taken_at != NOWHERE))
        cell = first[ends] + self._taken_at[ends]
        self._add_receive_buffers(ends, cell)
        self._add_inputs(rows.row[ends], cell)

    def _add_receive_buffers(self, ends: Ints, cell: Ints) -> None:
        """Buffers wait for their rows from when they are posted until their consumer starts.

        Posted are, while an action runs, the rows of the next pass that receives any, and
        before each of them whatever the same sender sends earlier (but for broadcasts).
        """
        rows, places = self._rows, self._places
        consumer = rows.consumer[rows.row[ends]]
        is_received = ~rows.is_local[rows.row[ends]] & places.is_compute[consumer]
        ends, cell = ends[is_received], cell[is_received]
        row = rows.row[ends]
        cells = np.arange(len(places.start))
        is_receiving = np.zeros(len(cells), np.bool_)
        is_receiving[cell] = True
        receiving = np.maximum.accumulate(np.where(is_receiving, cells, places.start))
        posting = np.maximum(places.start, np.concatenate(([0], receiving[:-1])))  # the receiving one before
        is_broadcast = rows.is_broadcast[row]
        posted = posting[cell]
        one_by_one = np.flatnonzero(~is_broadcast)
        pair = rows.destination[ends[one_by_one]] * places.num_ranks + rows.source[row[one_by_one]]
        one_by_one = one_by_one[np.argsort(pair, kind="stable")]  # by row
        pair.sort()
        posted[one_by_one] = posting[_earliest_from(pair, cell[one_by_one])]
        is_buffer = is_broadcast | rows.is_p2p[row]
        self._hold(posted[is_buffer], cell[is_buffer] - 1, rows.num_bytes[row[is_buffer]])

    def _add_inputs(self, row: Ints, cell: Ints) -> None:
        """What comes to forwards and backwards: rows, and the cells of their consumers."""
        rows, places = self._rows, self._places
        num_bytes, is_local, consumer = rows.num_bytes[row], rows.is_local[row], rows.consumer[row]
        tensor = cell * rows.num_edges + rows.edge[row]
        is_whole = rows.is_whole[row] & (np.bincount(tensor)[tensor] == 1)
        is_passed_on = is_local & is_whole & rows.is_view[row]
        is_forward, is_backward = places.is_forward[consumer], places.is_backward[consumer]
        for column, is_added in (
            (self.lines.passed_on, is_forward & is_passed_on),
            (self.lines.held, is_forward & ~is_passed_on),
        ):
            np.add.at(column, cell[is_added], num_bytes[is_added])
        # Forwards: rows live beside the tensor that they are joined to.
        is_away = ~is_local & (is_backward | (is_forward & ~is_whole))
        self._hold(cell[is_away], cell[is_away], num_bytes[is_away])
        self.lines.is_joined[cell[is_backward]] = True
        is_only = is_backward & is_whole & (np.bincount(cell)[cell] == 1)
        self.lines.is_joined[cell[is_only]] = False
        self._is_read_in_place[row[is_forward & is_passed_on]] = True

    def _add_outputs(self) -> None:
        """Until consumers or sends are through with them; what is no view is a tensor of its own."""
        rows, places = self._rows, self._places
        row = np.flatnonzero((places.first_on[rows.source] != NOWHERE) & (self._sent_at != NOWHERE))
        first, producer, is_local = places.first_on[rows.source[row]], rows.producer[row], rows.is_local[row]
        cell, is_backward = first + self._sent_at[row], places.is_backward[producer]
        consumer = first + self._taken_at[rows.first_end[row]]  # of a local row
        last = np.where(is_local, consumer, first + self._sent_ends()[row])
        last = np.minimum(last, places.last_on[rows.source[row]])
        is_own = is_backward | (places.is_forward[producer] & ~rows.is_view[row])
        self._hold(cell[is_own] + is_backward[is_own], last[is_own], rows.num_bytes[row[is_own]])
        read = np.flatnonzero(self._is_read_in_place[row])
        kept = self._backward_at(row[read])
        last[read] = np.where(kept == NOWHERE, last[read], first[read] + kept)
        is_kept = places.is_forward[producer] & (is_local | rows.is_view[row])
        np.maximum.at(self.lines.output_end, cell[is_kept], last[is_kept])

    def _backward_at(self, row: Ints) -> Ints:
        """Place of the backward of each row's consumer on the sender's rank; NOWHERE where there is none."""
        number, of = self._places.number, self._accounts.backwards
        actions = list(number)
        consumers, of_row = np.unique(self._rows.consumer[row], return_inverse=True)
        each = map(actions.__getitem__, consumers.tolist())
        backward = [of.get((action.stage, action.microbatch)) for action in each]
        numbers = ints(NOWHERE if action is None else number[action] for action in backward)
        return self._places.at(numbers[of_row], self._rows.source[row])

    def _sent_ends(self) -> Ints:
        """By row, the last place before one that proves the row received, else one behind the program.

        A consumer that has started had taken the row; any row that comes back from that rank,
        made then or later, tells the sender so.
        """
        rows, places, taken_at = self._rows, self._places, self._taken_at
        source, bound = rows.source[rows.row], places.longest + 1
        sent_at = np.where(rows.is_passed_on, places.at(rows.consumer, rows.source), self._sent_at)[rows.row]
        is_sent = (rows.destination != source) & (sent_at != NOWHERE) & (taken_at != NOWHERE)
        sent = (source * places.num_ranks + rows.destination)[is_sent] * bound + sent_at[is_sent]
        order = np.argsort(sent)
        sent = sent[order]
        answered_at = _earliest_from(sent // bound, taken_at[is_sent][order])
        pair = rows.destination * places.num_ranks + source
        first = np.searchsorted(sent, pair * bound + taken_at)
        is_answered = (taken_at != NOWHERE) & (first < len(sent))
        is_answered[is_answered] = sent[first[is_answered]] // bound == pair[is_answered]
        ends = np.full(len(pair), bound, np.int64)
        ends[is_answered] = answered_at[first[is_answered]] - 1
        ends[rows.destination == source] = NOWHERE
        found = self._sent_at.copy()
        np.maximum.at(found, rows.row, ends)
        return found


def _earliest_from(group: Ints, value: Ints) -> Ints:
    """By entry, the least value of its group from there on; groups are ascending, values not negative."""
    bound = 1 + np.max(value, initial=0)
    least: Ints = np.minimum.accumulate((group * bound + value)[::-1])[::-1]
    return least - group * bound


def _is_view(slices: tuple[Slice, ...]) -> bool:
    """Whether the row's tokens lie side by side in its producer's tensor, so that nothing is copied."""
    return len(slices) == 1 or _side_by_side([piece.source_start for piece in slices], slices)


def _is_whole(slices: tuple[Slice, ...]) -> bool:
    """Whether a row alone brings all of a tensor, in order."""
    if slices[0].destination_start != 0 or len(slices) == 1:
        return slices[0].destination_start == 0
    return _side_by_side([piece.destination_start for piece in slices], slices)


def _side_by_side(starts: list[int], slices: tuple[Slice, ...]) -> bool:
    ends = [start + piece.num_tokens for start, piece in zip(starts, slices, strict=True)]
    return ends[:-1] == starts[1:]
