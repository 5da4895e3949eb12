"""Lower bounds on the seconds of matrix products, however they are split into calls."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from workbench.arrays import Floats
from workbench.cost.kernel_times import KernelTimes
from workbench.cost.profile import Direction
from workbench.cost.roofline import Gemm
from workbench.float_sum import float_sum
from workbench.model.layer import Shard

RANGES = 16  # ranges of tokens in an octave, whose calls are bounded together
FEWEST = 1e-3  # tokens, fewer than any call has


class LeastProducts:
    """Lower bounds on products in one precision, cached for all layers, batches and layouts.

    Args:
        times: of the machine's kernels.
        precision: of activations and weights.
    """

    def __init__(self, times: KernelTimes, precision: str) -> None:
        self._times, self._precision = times, precision
        self._known: dict[tuple[object, ...], float] = {}
        self._ranges: dict[tuple[bytes, tuple[float, float], Direction], Floats] = {}

    def seconds(
        self,
        kinds: Mapping[tuple[Gemm, Shard], int],
        degrees: Sequence[int],
        directions: tuple[Direction, ...],
        stock: float,
    ) -> float:
        """A lower bound on ranks times seconds of products over the same tokens, in calls of any size.

        The minimum over all degrees and ranges of tokens. The largest call is rounded up to a power of two of
        tokens, so that stocks of nearly the same size share one answer.

        Args:
            kinds: uncut products and their numbers.
            degrees: of tensor parallelism; empty: the best rate of any shape counts.
            stock: most tokens of a call.

        Complexity: that of `seconds_in_each` for every degree.
        """
        if not degrees:
            flop = float_sum(gemm.flop * num for (gemm, _), num in kinds.items())
            return len(directions) * flop / self._times.most_product_flop_per_s(self._precision)
        tokens = max(gemm.m for gemm, _ in kinds)
        per_token = {(gemm._replace(m=gemm.m / tokens), shard): num for (gemm, shard), num in kinds.items()}
        most = max(2.0 ** math.ceil(math.log2(stock)), 2 * FEWEST)
        key = tuple(per_token.items()), tuple(degrees), directions, most
        if key not in self._known:
            edges = ranges(FEWEST, most)
            seconds_of_degrees = (self.seconds_in_each(per_token, tp, directions, edges) for tp in degrees)
            self._known[key] = min(float(seconds.min()) for seconds in seconds_of_degrees)
        return self._known[key] * tokens

    def seconds_in_each(
        self,
        kinds: Mapping[tuple[Gemm, Shard], int],
        tp: int,
        directions: tuple[Direction, ...],
        tokens: Floats,
    ) -> Floats:
        """[ranges] as `seconds`, for calls on `tp` ranks whose tokens lie between neighbouring values.

        Args:
            tokens: [ranges + 1] ascending.

        Complexity: O(ranges x N log N) for every product and direction, of a table of N points.
        """
        total = np.zeros(len(tokens) - 1)
        for (gemm, shard), num in kinds.items():
            columns = (
                gemm.n / tp if shard is Shard.COLUMN else gemm.n,
                gemm.k / tp if shard is Shard.ROW else gemm.k,
            )
            for direction in directions:
                total += num * gemm.flop / self._rates(tokens, columns, direction)
        return total

    def _rates(self, tokens: Floats, columns: tuple[float, float], direction: Direction) -> Floats:
        """[ranges] upper bounds on FLOP/s, computed once for products that layers share."""
        key = np.round(tokens, 6).tobytes(), columns, direction  # equal for all items
        if key not in self._ranges:
            most = self._times.most_products_flop_per_s(tokens, columns, direction, self._precision)
            self._ranges[key] = most
        return self._ranges[key]


def ranges(fewest: float, most: float) -> Floats:
    """[ranges + 1] geometric steps from `fewest` to `most`; a single one if `fewest` is larger."""
    octaves = math.log2(most / fewest)
    if octaves < 0:
        return np.array([fewest])
    return np.geomspace(fewest, most, 1 + max(1, math.ceil(RANGES * octaves)))
