"""The compiled walk: every block of queries down the tree of keys, in runs of tiles of one kind.

A node of the tree that all pieces of the queries see in full, or none sees at all, or that one sees in full
and another not at all, is decided with everything below it. Only what is left over is compared piece by
piece, and only a window against a diagonal in one and the same pair of pieces token by token.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.compiled import compiled

NONE, PARTIAL, ALL, OPEN = 0, 1, 2, 3
FANOUT = 4
NUM_REMEMBERED = 8

RUN = np.dtype([("first", np.int32), ("end", np.int32), ("kind", np.uint8)], align=True)
Records = npt.NDArray[Any]
Places = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Queries = tuple[Records, Offsets, Places, Places]  # the fields of QueryBlocks
Keys = tuple[Records, Offsets, Places, Records, Offsets]  # the fields of KeyBlocks


@compiled
def runs_of(queries: Queries, keys: Keys) -> tuple[Offsets, Records]:
    """int64[row blocks + 1] and RUN[n]: [first, end) key blocks of one kind, per row, ascending."""
    offsets, lowest = queries[1], _root(keys).position_min
    num_rows = len(offsets) - 1
    runs = np.empty(64 * num_rows + 16, RUN)  # pages that are not written cost nothing
    row_offsets = np.zeros(num_rows + 1, np.int64)
    remembered = np.full(NUM_REMEMBERED, -1, np.int64)
    count = 0
    for row in range(num_rows):
        twin = -1
        if offsets[row + 1] == offsets[row] + 1:
            twin = _twin(queries[0], offsets[row], remembered, lowest)
        if twin < 0:
            runs, count = _walk_row(queries, keys, row, runs, count)
        else:  # walking would find the runs of the remembered row again
            like = np.searchsorted(offsets, twin)
            start, end = row_offsets[like], row_offsets[like + 1]
            while count + end - start > len(runs):
                runs = _grown(runs)
            runs[count : count + end - start] = runs[start:end]
            count += end - start
        row_offsets[row + 1] = count
    return row_offsets, runs[:count]


@compiled
def _walk_row(queries: Queries, keys: Keys, row: int, runs: Records, count: int) -> tuple[Records, int]:
    """Append the runs of one block of queries; the runs, moved where they had to grow, and their number."""
    pieces, offsets, levels = queries[0], queries[1], keys[4]
    row_start, num_columns, top = count, levels[1], len(levels) - 2
    column, level, width = 0, top, FANOUT**top
    while column < num_columns:
        node = keys[3][levels[level] + column // width]
        kind = _row_of_node(pieces, offsets[row], offsets[row + 1], node)
        if kind == OPEN and level > 0:
            level, width = level - 1, width // FANOUT
            continue
        if kind == OPEN:
            kind = _tile(queries, keys, row, column)
        end = min(column + width, num_columns)
        if kind != NONE:
            if count == len(runs):
                runs = _grown(runs)
            count = _append(runs, row_start, count, (column, end, kind))
        column = end
        while level < top and column % (width * FANOUT) == 0:
            level, width = level + 1, width * FANOUT
    return runs, count


@compiled
def areas_of(queries: Queries, keys: Keys) -> Offsets:
    """int64[row blocks]: attended pairs."""
    pieces, offsets, lowest = queries[0], queries[1], _root(keys).position_min
    num_rows = len(offsets) - 1
    areas = np.zeros(num_rows, np.int64)
    pairs = np.zeros(len(pieces), np.int64)
    remembered = np.full(NUM_REMEMBERED, -1, np.int64)
    for row in range(num_rows):
        for index in range(offsets[row], offsets[row + 1]):
            twin = _twin(pieces, index, remembered, lowest)
            if twin < 0:
                pairs[index] = _pairs_of_piece(queries, keys, index)
            else:  # every query of both sees the same keys
                each = pairs[twin] // (pieces[twin].end - pieces[twin].start)
                pairs[index] = each * (pieces[index].end - pieces[index].start)
            areas[row] += pairs[index]
    return areas


@compiled
def _pairs_of_piece(queries: Queries, keys: Keys, index: int) -> int:
    """Attended pairs of one piece of queries and all keys."""
    piece, levels, pairs = queries[0][index], keys[4], 0
    num_columns, top = levels[1], len(levels) - 2
    column, level, width = 0, top, FANOUT**top
    while column < num_columns:
        node = keys[3][levels[level] + column // width]
        seen = _sight(piece, node)
        if seen == OPEN and level > 0:
            level, width = level - 1, width // FANOUT
            continue
        if seen == ALL:
            pairs += (piece.end - piece.start) * (node.end - node.start)
        elif seen == OPEN:
            pairs += _pairs_in_block(queries, keys, index, column)
        column = min(column + width, num_columns)
        while level < top and column % (width * FANOUT) == 0:
            level, width = level + 1, width * FANOUT
    return pairs


@compiled
def _root(keys: Keys) -> Any:
    return keys[3][len(keys[3]) - 1]


@compiled
def _twin(pieces: Records, index: int, remembered: Offsets, lowest: int) -> int:
    """A remembered piece that sees exactly what this one sees, or -1, and this one is remembered.

    Only if positions do not matter: neither a diagonal nor a window above the lowest key.
    """
    piece = pieces[index]
    if piece.causal != 0 or piece.first_max > lowest:
        return -1
    for other in remembered:
        if other >= 0 and pieces[other].word == piece.word and pieces[other].segment == piece.segment:
            return int(other)
    remembered[1:] = remembered[:-1].copy()
    remembered[0] = index
    return -1


@compiled
def expanded(row_offsets: Offsets, runs: Records, columns: Places, kinds: npt.NDArray[np.uint8]) -> Offsets:
    """Fill one column and kind per tile; int64[row blocks + 1], the tiles of each row."""
    tile_offsets = np.zeros(len(row_offsets), np.int64)
    count = 0
    for row in range(len(row_offsets) - 1):
        for index in range(row_offsets[row], row_offsets[row + 1]):
            run = runs[index]
            for column in range(run.first, run.end):
                columns[count] = column
                kinds[count] = run.kind
                count += 1
        tile_offsets[row + 1] = count
    return tile_offsets


@compiled
def transpose(
    row_offsets: Offsets, columns: Places, kinds: npt.NDArray[np.uint8], num_columns: int
) -> tuple[Offsets, Places, npt.NDArray[np.uint8]]:
    """The same tiles by column: a counting sort, rows ascending in every column."""
    offsets = np.zeros(num_columns + 1, np.int64)
    for column in columns:
        offsets[column + 1] += 1
    for column in range(num_columns):
        offsets[column + 1] += offsets[column]
    into = offsets[:-1].copy()
    rows, row_kinds = np.empty(len(columns), np.int32), np.empty(len(columns), np.uint8)
    for row in range(len(row_offsets) - 1):
        for index in range(row_offsets[row], row_offsets[row + 1]):
            at = into[columns[index]]
            rows[at], row_kinds[at] = row, kinds[index]
            into[columns[index]] = at + 1
    return offsets, rows, row_kinds


@compiled
def _sight(query: Any, node: Any) -> int:
    """How much of a node a piece of queries sees: NONE, ALL, or OPEN where the summary cannot say.

    For a node that is a piece itself OPEN means that some pair is not attended.
    """
    if query.segment < 0 or query.segment < node.segment_min or query.segment > node.segment_max:
        return NONE
    if query.word & node.own_any == 0 or (query.causal != 0 and node.position_min > query.position_max):
        return NONE
    if node.position_max < query.first_min and query.always & node.own_any == 0:
        return NONE
    one_segment = node.segment_min == node.segment_max
    under_diagonal = query.causal == 0 or node.position_max <= query.position_min
    if not (one_segment and under_diagonal and _covers(query.word, node)):
        return OPEN
    return ALL if node.position_min >= query.first_max or _covers(query.always, node) else OPEN


@compiled
def _covers(word: np.uint64, node: Any) -> bool:
    """Whether every key of the node is surely in one of these groups."""
    inside: bool = word & node.own_all != 0 or (node.unowned == 0 and node.own_any & ~word == 0)
    return inside


@compiled
def _row_of_node(pieces: Records, start: int, end: int, node: Any) -> int:
    """The kind of every tile of a block of queries in a node, or OPEN."""
    found_all = found_none = found_open = False
    for index in range(start, end):
        seen = _sight(pieces[index], node)
        if seen == ALL:
            found_all = True
        elif seen == NONE:
            found_none = True
        else:
            found_open = True
        if found_all and found_none:
            return PARTIAL
    if found_open:
        return OPEN
    return ALL if found_all else NONE


@compiled
def _tile(queries: Queries, keys: Keys, row: int, column: int) -> int:
    """The kind of one tile, piece against piece."""
    lacks = attends = False
    for index in range(queries[1][row], queries[1][row + 1]):
        query = queries[0][index]
        for at in range(keys[1][column], keys[1][column + 1]):
            node = keys[0][at]
            seen = _sight(query, node)
            lacks = lacks or seen != ALL
            attends = attends or seen == ALL or (seen == OPEN and _attends(queries, keys, index, at))
            if lacks and attends:
                return PARTIAL
    return ALL if attends else NONE


@compiled
def _attends(queries: Queries, keys: Keys, index: int, at: int) -> bool:
    """Whether some pair of two pieces is attended, their places alone being in question.

    Without a window the lowest key and the last query are; without a diagonal the highest key and the
    query that reaches furthest down are. Both at once need a key between `first` and `position`.
    """
    query, node = queries[0][index], keys[0][at]
    if query.causal == 0 or query.first_max <= node.position_min or query.always & node.own_any != 0:
        return True
    for token in range(query.start, query.end):
        low = _below(keys[2], node.start, node.end, queries[3][token])
        if low < node.end and keys[2][low] <= queries[2][token]:
            return True
    return False


@compiled
def _pairs_in_block(queries: Queries, keys: Keys, index: int, column: int) -> int:
    """Attended pairs of one piece of queries and one block of keys."""
    query = queries[0][index]
    pairs = 0
    for at in range(keys[1][column], keys[1][column + 1]):
        node = keys[0][at]
        seen = _sight(query, node)
        if seen == ALL:
            pairs += (query.end - query.start) * (node.end - node.start)
        elif seen == OPEN:
            kept = query.always & node.own_any != 0
            for token in range(query.start, query.end):
                low, high = node.start, node.end
                if not kept:
                    low = _below(keys[2], low, high, queries[3][token])
                if query.causal != 0:
                    high = _below(keys[2], node.start, node.end, queries[2][token] + 1)
                pairs += max(0, high - low)
    return pairs


@compiled
def _below(position: Places, start: int, end: int, bound: int) -> int:
    """The first of [start, end) whose position is not below `bound`, or end."""
    while start < end:
        middle = (start + end) // 2
        if position[middle] < bound:
            start = middle + 1
        else:
            end = middle
    return start


@compiled
def _grown(runs: Records) -> Records:
    more = np.empty(2 * len(runs), RUN)
    more[: len(runs)] = runs
    return more


@compiled
def _append(runs: Records, row_start: int, count: int, run: tuple[int, int, int]) -> int:
    """Number of runs after adding one, or after lengthening the row's last one."""
    if count > row_start and runs[count - 1].end == run[0] and runs[count - 1].kind == run[2]:
        runs[count - 1].end = run[1]
        return count
    runs[count].first, runs[count].end, runs[count].kind = run
    return count + 1
