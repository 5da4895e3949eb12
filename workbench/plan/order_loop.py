"""The compiled walk in order: how many nodes come before each."""

import numpy as np

from workbench.arrays import Ints
from workbench.compiled import compiled


@compiled
def ticks(missing: Ints, offsets: Ints, followers: Ints) -> Ints:
    """[N] nodes on the longest path that ends in each, itself included; 0: on a ring, or behind one.

    Kahn's algorithm, O(nodes + edges).

    Args:
        missing: [N] edges that end in every node; used up.
        offsets, followers: [N + 1], [E] who follows whom, as of `task_graph.adjacency`.
    """
    latest = np.zeros(len(missing), np.int64)
    found = np.zeros(len(missing), np.int64)
    ready = [node for node in range(len(missing)) if missing[node] == 0]
    while ready:
        node = ready.pop()
        found[node] = latest[node] + 1
        for place in range(offsets[node], offsets[node + 1]):
            follower = followers[place]
            latest[follower] = max(latest[follower], found[node])
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return found
