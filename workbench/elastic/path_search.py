"""The compiled heart of the exact mapping: cheapest pipelines whose slowest stage lies in a range."""

import numpy as np
from numpy.typing import NDArray

from workbench.compiled import compiled

Ints = NDArray[np.int64]

NEVER = np.int64(1) << 60
WIDTH_BITS = 8  # a parent is (layer << 9) | (width << 1) | whether the stage was the slowest


@compiled
def cheapest(  # noqa: C901, PLR0912  (one pass over shared arrays)
    prefix: Ints, widths: Ints, reach: Ints, node_gpus: int, num_gpus: int, low: int, high: int
) -> tuple[Ints, Ints, NDArray[np.int32], NDArray[np.int32]]:
    """Least costs of reaching (GPUs used, layers placed) before and after the slowest stage.

    A stage before the slowest costs w + 4 low, the slowest 2 w + 2 low, one behind it 2 w + 3 low, where
    w <= high for all and w >= low for the slowest; with low == high stages behind are below it. For
    low == high the cost of (n nodes, all layers) is the objective of the best template of that
    bottleneck, and in general it is a bound from below for all bottlenecks in low..high.

    Args:
        prefix: [W][L + 1] units of the first layers. widths: [W] GPUs.
        reach: [W][L] furthest end of a stage, from memory.
        node_gpus, num_gpus: of a node, and of the largest pipeline.

    Returns:
        [G + 1][L + 1] costs before and after the slowest stage, then their parents.

    Complexity: O(G x L x W x layers of a stage).
    """
    num_layers = prefix.shape[1] - 1
    before = np.full((num_gpus + 1, num_layers + 1), NEVER)
    after = np.full((num_gpus + 1, num_layers + 1), NEVER)
    parent_before = np.full((num_gpus + 1, num_layers + 1), -1, np.int32)
    parent_after = np.full((num_gpus + 1, num_layers + 1), -1, np.int32)
    before[0, 0] = 0
    below = high if low < high else high - 1
    for used in range(num_gpus):
        room = node_gpus - used % node_gpus
        for first in range(num_layers):
            cost0, cost1 = before[used, first], after[used, first]
            if cost0 == NEVER and cost1 == NEVER:
                continue
            for place in range(widths.size):
                if widths[place] > room:
                    break
                to, start = used + widths[place], prefix[place, first]
                if to > num_gpus:
                    break
                for end in range(first + 1, reach[place, first] + 1):
                    units = prefix[place, end] - start
                    if units > high:
                        break
                    code = (first << (WIDTH_BITS + 1)) | (place << 1)
                    if cost0 < NEVER:
                        if cost0 + units + 4 * low < before[to, end]:
                            before[to, end] = cost0 + units + 4 * low
                            parent_before[to, end] = code
                        if units >= low and cost0 + 2 * units + 2 * low < after[to, end]:
                            after[to, end] = cost0 + 2 * units + 2 * low
                            parent_after[to, end] = code | 1
                    if units <= below and cost1 + 2 * units + 3 * low < after[to, end]:
                        after[to, end] = cost1 + 2 * units + 3 * low
                        parent_after[to, end] = code
    return before, after, parent_before, parent_after
