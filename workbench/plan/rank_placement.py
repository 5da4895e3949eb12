"""Where ranks are placed relative to one another: on which nodes and cards, whatever their numbers."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from workbench.cost.hardware import Cluster, Node
from workbench.plan.lru_cache import Identity, LruCache


class Place(NamedTuple):
    """Of a rank: its node, the card through which it sends, and the first node that equals its own."""

    node: int
    card: int
    kind: int


RankPlacement = tuple[Place, ...]
_PLACES: LruCache[RankPlacement] = LruCache(64)
_RELATIVE: LruCache[RankPlacement] = LruCache(2_000_000, len)


def relative_placement(cluster: Cluster, ranks: tuple[int, ...]) -> RankPlacement:
    """By rank, node and card counted among those of the ranks; links follow from it.

    Complexity: O(ranks), once for the same ranks.
    """
    return _RELATIVE.get_or((Identity(cluster), ranks), lambda: _relative_placement(places(cluster), ranks))


def _relative_placement(of: RankPlacement, ranks: Iterable[int]) -> RankPlacement:
    nodes: dict[int, int] = {}
    cards: dict[tuple[int, int], int] = {}
    return tuple(
        [
            Place(nodes.setdefault(node, len(nodes)), cards.setdefault((node, card), len(cards)), kind)
            for node, card, kind in map(of.__getitem__, ranks)
        ]
    )


def node_kinds(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """By rank, on what kind of node."""
    of = places(cluster)
    return tuple(of[rank].kind for rank in ranks)


def places(cluster: Cluster) -> RankPlacement:
    """Of every rank. O(ranks), once for a cluster."""
    return _PLACES.get_or(Identity(cluster), lambda: _places(cluster.nodes))


def _places(nodes: Sequence[Node]) -> RankPlacement:
    first: dict[Node, int] = {}
    return tuple(
        Place(number, node.card_of(at), first.setdefault(node, number))
        for number, node in enumerate(nodes)
        for at in range(node.num_ranks)
    )


def by_port(cluster: Cluster, parts: Iterable[Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Who sends by one card, by place; those inside a node send by none. None where they share cores."""
    of = places(cluster)
    senders: dict[tuple[int, int], list[int]] = {}
    for place, ranks in enumerate(parts):
        cards = {of[rank][:2] for rank in ranks}
        if any(cluster.nodes[node].num_cores is not None for node, _ in cards):
            return None
        if len({node for node, _ in cards}) > 1:
            for card in cards:
                senders.setdefault(card, []).append(place)
    return list({tuple(places): None for places in senders.values() if len(places) > 1})
