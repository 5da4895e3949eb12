"""Topological order of names, with ties broken by listing order."""

from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush


def producers_first(names: Sequence[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Every name after those that it reads, otherwise as listed.

    Args:
        names: distinct names.
        edges: (producer, reader) pairs of names.

    Raises:
        graphlib.CycleError: its `args[1]` is a cycle in the order of its edges, first name again at the end.

    Complexity: O((names + edges) log names).
    """
    sorter = TopologicalSorter(dict.fromkeys(names, ()))
    for source, target in edges:
        sorter.add(target, source)
    sorter.prepare()
    index_of = {name: index for index, name in enumerate(names)}
    ready = [index_of[name] for name in sorter.get_ready()]
    heapify(ready)
    order: list[str] = []
    while ready:
        order.append(names[heappop(ready)])
        sorter.done(order[-1])
        for name in sorter.get_ready():
            heappush(ready, index_of[name])
    return order
