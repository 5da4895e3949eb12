"""Finds nodes that wait for each other in a ring."""

from collections.abc import Sequence


def ring(before: Sequence[Sequence[int]]) -> list[int]:
    """Nodes that wait for each other in a ring, each for the next; empty when all can run.

    Complexity: O(nodes + waits).
    """
    after: list[list[int]] = [[] for _ in before]
    waiting = [len(nodes) for nodes in before]
    for node, nodes in enumerate(before):
        for earlier in nodes:
            after[earlier].append(node)
    ready = [node for node, count in enumerate(waiting) if count == 0]
    for node in ready:  # grows while we walk it
        for later in after[node]:
            waiting[later] -= 1
            if waiting[later] == 0:
                ready.append(later)
    stuck = next((node for node, count in enumerate(waiting) if count), None)
    path: dict[int, int] = {}
    while stuck is not None and stuck not in path:
        path[stuck] = len(path)
        stuck = next(node for node in before[stuck] if waiting[node])
    return [] if stuck is None else list(path)[path[stuck] :]
