"""Walks over what must come before what: an order, a ring, the longest path."""

from collections.abc import Sequence
from itertools import chain

Followers = Sequence[Sequence[int]]  # of every node; one that follows twice stands twice


def in_order(followers: Followers) -> list[int]:
    """Nodes, each behind all that it follows; those on a ring, and behind one, are left out.

    First come those that follow nobody, by number; then whoever could come first. Kahn's algorithm,
    O(nodes + edges).
    """
    waiting = [0] * len(followers)
    for node in chain.from_iterable(followers):
        waiting[node] += 1
    ready = [node for node, count in enumerate(waiting) if count == 0]
    for node in ready:  # grows while we walk it
        for later in followers[node]:
            waiting[later] -= 1
            if waiting[later] == 0:
                ready.append(later)
    return ready


def ring(followers: Followers) -> list[int]:
    """Nodes that wait for each other in a ring, each for the next; empty when there is none.

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
    """Node -> when it starts, if each starts as soon as all that it follows have ended.

    Args:
        duration: of every node.
        delay: of every edge, from the end of its node to the start of the follower; None: no edge has one.

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
            for later, behind in zip(followers[node], delay[node], strict=True):
                start[later] = max(start[later], end + behind)
    return {node: start[node] for node in order}
