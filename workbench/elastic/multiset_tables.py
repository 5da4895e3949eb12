"""The compiled heart of instantiation: how much work multisets of templates do within a time."""

import numpy as np
from numpy.typing import NDArray

from workbench.compiled import compiled

Ints = NDArray[np.int64]


@compiled
def most_work(sizes: Ints, counts: Ints, most: int, num_nodes: int) -> tuple[Ints, Ints]:
    """Microbatches that r pipelines on exactly n nodes can do, and the size taken last.

    Args:
        sizes: [p] nodes of the templates. counts: [p] microbatches each does, 0 where it does none.
        most: pipelines at most.

    Returns:
        [most + 1][num_nodes + 1] work, -1 where the nodes cannot be used in full; the last size.

    Complexity: O(most x num_nodes x p).
    """
    done = np.full((most + 1, num_nodes + 1), -1, np.int64)
    taken = np.zeros((most + 1, num_nodes + 1), np.int64)
    done[0, 0] = 0
    for replicas in range(1, most + 1):
        for nodes in range(num_nodes + 1):
            for place in range(sizes.size):
                left = nodes - sizes[place]
                if left < 0 or counts[place] == 0 or done[replicas - 1, left] < 0:
                    continue
                work = done[replicas - 1, left] + counts[place]
                if work > done[replicas, nodes]:
                    done[replicas, nodes] = work
                    taken[replicas, nodes] = sizes[place]
    return done, taken
