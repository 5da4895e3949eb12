"""Seconds to copy all that the ranks of nodes hold to other nodes."""

from collections import defaultdict
from collections.abc import Mapping

from workbench.cost.hardware import Cluster


def node_copy_s(cluster: Cluster, held_bytes: Mapping[int, float]) -> float:
    """Seconds until the slowest node has received what its ranks hold, over all its cards at once.

    A rank's bytes pass its own card, which neighbours share where a node has more ranks than cards, as
    messages between stages do. Senders' cards are assumed no slower.

    Args:
        cluster: the machines.
        held_bytes: rank -> bytes, for one rank or more.

    Raises:
        ValueError: a rank outside the cluster.

    Complexity: O(ranks x log nodes).
    """
    by_card: defaultdict[tuple[int, int], float] = defaultdict(float)
    for rank, size in held_bytes.items():
        node = cluster.node_of(rank)
        by_card[node, cluster.nodes[node].card_of(cluster.place_of(rank))] += size
    cards = ((cluster.nodes[node].card or cluster.inter, size) for (node, _), size in by_card.items())
    return max(card.latency_s + size / card.bytes_per_s for card, size in cards)
