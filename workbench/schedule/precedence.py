"""Walks over precedence graphs: topological order, cycle, longest path."""

from collections.abc import Sequence
from itertools import chain

Followers = Sequence[Sequence[int]]  # of every node; repeated for repeated edges


def in_order(followers: Followers) -> list[int]:
    """Return nodes in topological order, without those on or behind a cycle.

    Nodes without predecessors come first, by number; the others in the order in which they become ready.
    Kahn's algorithm, O(nodes + edges).
    """
    num_waiting = [0] * len(followers)
    for node in chain.from_iterable(followers):
        num_waiting[node] += 1
    ready = [node for node, count in enumerate(num_waiting) if count == 0]
    for node in ready:  # grows during the loop
        for later in followers[node]:
            num_waiting[later] -= 1
            if num_waiting[later] == 0:
                ready.append(later)
    return ready


def find_cycle(followers: Followers) -> list[int]:
    """Return the nodes of a cycle, each waiting for the next; empty when there is none.

    Complexity: O(nodes + edges).
    """
    stuck = set(range(len(followers))).difference(in_order(followers))
    waits_for = {later: node for node in sorted(stuck, reverse=True) for later in followers[node]}
    path: dict[int, int] = {}
    node = min(stuck, default=None)
    while node is not None and node not in path:
        path[node] = len(path)
        node = waits_for[node]
    return [] if node is None else list(path)[path[node] :]


def longest_path(
    followers: Followers, duration: Sequence[float], delay: Sequence[Sequence[float]] | None = None
) -> dict[int, float]:
    """Return the start of every node, if each starts as soon as all its predecessors have ended.

    Args:
        duration: of every node.
        delay: of every edge, from the end of its node to the start of the follower; None: no delays.

    Returns:
        In the order of `in_order`; nodes that can never start are absent.

    Complexity: O(nodes + edges).
    """
    start = [0.0] * len(followers)
    order = in_order(followers)
    for node in order:
        end = start[node] + duration[node]
        if delay is None:
            for later in followers[node]:
                if end > start[later]:  # noqa: PLR1730  (a call for every edge)
                    start[later] = end
        else:
            for later, delay_s in zip(followers[node], delay[node], strict=True):
                start[later] = max(start[later], end + delay_s)
    return {node: start[node] for node in order}
