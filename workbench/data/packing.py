"""Samples packed into the rows of a step by best fit, in the order of the samples."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

Rows = tuple[tuple[int, ...], ...]  # of each row, the numbers of its samples, ascending


def packed_steps(lengths: Iterable[int], most: int, num_rows: int) -> Iterator[Rows]:
    """Yield the rows of one step after the other, until the samples end; rows of the last may be empty.

    A sample goes to the fullest row of the step that has room for it, of several to the first. The first
    sample for which none has room begins the next step, so that a step has consecutive samples, and its rows
    are packed like those of any other.

    Best fit: the samples of R rows have no packing into fewer than R / 1.7 (Dosa and Sgall 2014, "Optimal
    analysis of best fit bin packing", ICALP, theorem 1).

    Args:
        lengths: tokens of each sample.
        most: tokens of a row.
        num_rows: rows of a step, >= 1.

    Raises:
        ValueError: a sample without tokens, or with more than a row.

    Complexity: O(samples x log(num_rows)) comparisons.

    Example:
        >>> list(packed_steps([3, 2, 1, 2, 4], most=4, num_rows=2))
        [((0, 2), (1, 3)), ((4,), ())]
    """
    rows, rooms = _empty(most, num_rows)
    for number, length in enumerate(lengths):
        if not 1 <= length <= most:
            raise ValueError(f"packing: want samples of 1 to {most} tokens, sample {number} has {length}")
        if rooms[-1][0] < length:
            yield tuple(map(tuple, rows))
            rows, rooms = _empty(most, num_rows)
        room, row = rooms.pop(bisect_left(rooms, (length, 0)))
        rows[row].append(number)
        insort(rooms, (room - length, row))
    if rows[0]:
        yield tuple(map(tuple, rows))


def _empty(most: int, num_rows: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Rows without samples; and of each its tokens of room, in ascending order, with its number."""
    return [[] for _ in range(num_rows)], [(most, row) for row in range(num_rows)]
