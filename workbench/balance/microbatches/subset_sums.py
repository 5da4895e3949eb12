"""All sums of subsets of some whole numbers, and the subset with the sum nearest to a target."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SubsetSums:
    """The table of the subset-sum dynamic programme.

    Source: Entrain (dissertation, section 4.5.2): a table over samples and sums is filled, and the sum
    nearest to the wanted transfer is read off.
    Differs: a row of the table is one long integer, a bit per sum, so adding a sample is a shift and
    an or; and one table serves all partners of a microbatch, since sums do not depend on the target.

    Args:
        units: [N] whole numbers >= 0.

    Complexity: O(N total / 64) time and space; `nearest` is O(log total) a target, `subset` O(N).
    """

    def __init__(self, units: Sequence[int]) -> None:
        self._units = tuple(units)
        self._rows = [1]
        for unit in self._units:
            self._rows.append(self._rows[-1] | (self._rows[-1] << unit))
        last = self._rows[-1]
        table = np.frombuffer(last.to_bytes(last.bit_length() // 8 + 1, "little"), np.uint8)
        self._sums = np.flatnonzero(np.unpackbits(table, bitorder="little"))

    def nearest(self, target: NDArray[np.float64]) -> NDArray[np.int64]:
        """[M] the reachable sum nearest to each target; the smaller of two equally near."""
        above = np.searchsorted(self._sums, target)
        low = self._sums[np.maximum(above - 1, 0)]
        high = self._sums[np.minimum(above, len(self._sums) - 1)]
        return np.where(np.abs(high - target) < np.abs(target - low), high, low)

    def subset(self, total: int) -> tuple[int, ...]:
        """Return ascending indices in `units` of a subset with that sum; ValueError when none has it."""
        if total < 0 or not (self._rows[-1] >> total) & 1:
            raise ValueError(f"no subset has the sum {total}; want a sum from `nearest`")
        chosen = []
        for index in reversed(range(len(self._units))):
            if not (self._rows[index] >> total) & 1:
                chosen.append(index)
                total -= self._units[index]
        return tuple(reversed(chosen))
