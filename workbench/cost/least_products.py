"""Seconds that products take at least, in whatever calls and on however many tensor-parallel ranks."""

import math
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from workbench.arrays import Floats
from workbench.cost.interpolate import NARROW, Cell
from workbench.cost.kernel_times import KernelTimes
from workbench.cost.profile import Direction
from workbench.cost.roofline import Gemm
from workbench.cost.sustained import in_direction
from workbench.model.layer import Shard

HALVED = 96  # cells, until what no call takes less than is taken as it is
LOOKED = 4  # halvings between two looks at what a call in the middle of a cell takes
NEAR = 0.98  # of that: near enough
FEWEST = 1e-3  # tokens of a call: fewer than any has


class _Cell(NamedTuple):
    """Calls with some tensor-parallel degrees and tokens.

    Args:
        seconds: times ranks, that the stock takes at least in such calls.
        number: that tells cells of equal seconds apart.
        tp: least and most degree.
        tokens: fewest and most.
        tables: of every product and direction, the part of the table.
    """

    seconds: float
    number: int
    tp: tuple[int, int]
    tokens: tuple[float, float]
    tables: tuple[Cell | None, ...]


class LeastProducts:
    """What products take at least in one format, whose answers all layers, batches and layouts share.

    Args:
        times: of the machine's kernels.
        precision: of activations and weights.
    """

    def __init__(self, times: KernelTimes, precision: str) -> None:
        self._times, self._precision = times, precision
        self._known: dict[tuple[object, ...], float] = {}
        self._tables: dict[tuple[object, ...], Cell | None] = {}
        self._ranges: dict[tuple[bytes, tuple[float, float], Direction], Floats] = {}
        self._numbers = count()

    def seconds(
        self,
        kinds: Mapping[tuple[Gemm, Shard], int],
        tps: tuple[tuple[int, int], ...],
        directions: tuple[Direction, ...],
        stock: float,
    ) -> float:
        """Times ranks, of products of the same tokens, in calls that have as many more as they like.

        Of all calls those with the least seconds a token are looked for: cells of degrees and tokens whose
        seconds are not known to be more than another's are halved, so many times. Calls may have a power of
        two of tokens, so that stocks of nearly the same size have one answer.

        Args:
            kinds: uncut products, and how many there are of each.
            tps: ranges of tensor-parallel degrees; none: the best rate of any shape.
            stock: most tokens of a call.

        Complexity: 2 x `HALVED` cells for every product not asked for before, O(N log N) each for the
        table's N points.
        """
        if not tps:
            flop = sum(gemm.flop * num for (gemm, _), num in kinds.items())
            return len(directions) * flop / self._times.most_product_flop_per_s(self._precision)
        tokens, most = max(gemm.m for gemm, _ in kinds), 2.0 ** math.ceil(math.log2(stock))
        of_most = {(gemm._replace(m=most), shard): num for (gemm, shard), num in kinds.items()}
        key = tuple(of_most.items()), tps, directions
        if key not in self._known:
            self._known[key] = self._least_s(of_most, tps, directions, most)
        return self._known[key] * tokens / most

    def seconds_in_each(
        self,
        kinds: Mapping[tuple[Gemm, Shard], int],
        tp: int,
        directions: tuple[Direction, ...],
        tokens: Floats,
    ) -> Floats:
        """[ranges] as `seconds`, in calls on so many ranks whose tokens lie between two neighbours.

        Args:
            tokens: [ranges + 1] ascending.

        Complexity: O(ranges x N log N) for every product and direction.
        """
        total = np.zeros(len(tokens) - 1)
        for (gemm, shard), num in kinds.items():
            cut, _ = _box(gemm, shard, (tp, tp), (1.0, 1.0))
            for direction in directions:
                rates = self._rates(tokens, cut[1:], direction)
                total += num * gemm.flop / rates
        return total

    def _rates(self, tokens: Floats, columns: tuple[float, float], direction: Direction) -> Floats:
        """Looked up once for products that layers share."""
        key = np.round(tokens, 6).tobytes(), columns, direction  # of whatever item they are multiples
        if key not in self._ranges:
            most = self._times.most_products_flop_per_s(tokens, columns, direction, self._precision)
            self._ranges[key] = most
        return self._ranges[key]

    def _least_s(
        self,
        kinds: Mapping[tuple[Gemm, Shard], int],
        tps: tuple[tuple[int, int], ...],
        directions: tuple[Direction, ...],
        most: float,
    ) -> float:
        cells = [self._cell(kinds, directions, tp, (min(FEWEST, most), most), None) for tp in tps]
        heapify(cells)
        taken_s = math.inf
        for number in range(HALVED):
            (few, many), cell = cells[0].tokens, cells[0]
            if many < few * 2**NARROW or cell.seconds > NEAR * taken_s:
                break
            heappop(cells)
            middle = math.sqrt(few * many)
            if number % LOOKED == 0:
                alone = self._cell(kinds, directions, cell.tp, (middle, middle), cell)
                taken_s = min(taken_s, alone.seconds)
            for half in ((few, middle), (middle, many)):
                heappush(cells, self._cell(kinds, directions, cell.tp, half, cell))
        return cells[0].seconds

    def _cell(
        self,
        kinds: Mapping[tuple[Gemm, Shard], int],
        directions: tuple[Direction, ...],
        tp: tuple[int, int],
        tokens: tuple[float, float],
        within: _Cell | None,
    ) -> _Cell:
        tables, seconds = [], 0.0
        around = iter(within.tables if within else [None] * len(kinds) * len(directions))
        for (whole, shard), num in kinds.items():
            for direction in directions:
                key, inside = (whole, shard, direction, tp, tokens), next(around)
                if key not in self._tables:
                    low, high = (in_direction(at, direction) for at in _box(whole, shard, tp, tokens))
                    self._tables[key] = self._times.product_cell(low, high, inside)
                tables.append(self._tables[key])
                seconds += num * whole.flop / self._times.most_product_flop_per_s(self._precision, tables[-1])
        return _Cell(seconds, next(self._numbers), tp, tokens, tuple(tables))


def _box(whole: Gemm, shard: Shard, tp: tuple[int, int], tokens: tuple[float, float]) -> tuple[Gemm, Gemm]:
    """Least and most sizes of a product on so many ranks, with so many tokens."""
    (few, many), (_, n, k) = tp, whole
    columns = (n / many, n / few) if shard is Shard.COLUMN else (n, n)
    rows = (k / many, k / few) if shard is Shard.ROW else (k, k)
    least, most = (Gemm(*sizes) for sizes in zip(tokens, columns, rows, strict=True))
    return least, most
