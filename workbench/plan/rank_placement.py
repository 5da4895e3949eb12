"""Where ranks are relative to one another: on which nodes and network cards, whatever their numbers."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from workbench.cost.hardware import Cluster, Node
from workbench.plan.lru_cache import Identity, LruCache


class RankLocation(NamedTuple):
    """A rank's node, the card through which it sends, and the first node that equals its own."""

    node: int
    card: int
    kind: int


# Slower: `RankLocation(*parts)`, a call in Python for each rank.
_location_of = cast(
    Callable[[tuple[int, int, int]], RankLocation], partial(cast(Any, tuple.__new__), RankLocation)
)
RankPlacement = tuple[RankLocation, ...]
_LOCATIONS: LruCache[RankPlacement] = LruCache(64)
_RELATIVE: LruCache[RankPlacement] = LruCache(2_000_000, len)


def relative_placement(cluster: Cluster, ranks: tuple[int, ...]) -> RankPlacement:
    """Return node and card of each rank, numbered among those of the ranks; links follow from it.

    Complexity: O(ranks), once for the same ranks.
    """
    return _RELATIVE.get_or(
        (Identity(cluster), ranks), lambda: _relative_placement(rank_locations(cluster), ranks)
    )


def _relative_placement(locations: RankPlacement, ranks: Iterable[int]) -> RankPlacement:
    nodes: dict[int, int] = {}
    cards: dict[tuple[int, int], int] = {}
    return tuple(
        [
            _location_of(
                (nodes.setdefault(node, len(nodes)), cards.setdefault((node, card), len(cards)), kind)
            )
            for node, card, kind in map(locations.__getitem__, ranks)
        ]
    )


def node_kinds(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the kind of node of each rank."""
    locations = rank_locations(cluster)
    return tuple(locations[rank].kind for rank in ranks)


def rank_locations(cluster: Cluster) -> RankPlacement:
    """Return the location of every rank of the cluster. O(ranks), once per cluster."""
    return _LOCATIONS.get_or(Identity(cluster), lambda: _locations_of(cluster.nodes))


def _locations_of(nodes: Sequence[Node]) -> RankPlacement:
    first: dict[Node, int] = {}
    return tuple(
        RankLocation(number, node.card_of(index), first.setdefault(node, number))
        for number, node in enumerate(nodes)
        for index in range(node.num_ranks)
    )


def by_port(cluster: Cluster, parts: Iterable[Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Return groups of parts that send through a common card; None where nodes have CPU cores to share.

    A part within one node sends through no card.
    """
    locations = rank_locations(cluster)
    senders: dict[tuple[int, int], list[int]] = {}
    for index, ranks in enumerate(parts):
        cards = {locations[rank][:2] for rank in ranks}
        if any(cluster.nodes[node].num_cores is not None for node, _ in cards):
            return None
        if len({node for node, _ in cards}) > 1:
            for card in cards:
                senders.setdefault(card, []).append(index)
    return list({tuple(indices): None for indices in senders.values() if len(indices) > 1})
