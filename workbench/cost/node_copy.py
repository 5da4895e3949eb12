"""What it takes until nodes have handed over all that their ranks hold."""

from collections import defaultdict
from collections.abc import Mapping

from workbench.cost.hardware import Cluster


def node_copy_s(cluster: Cluster, held_bytes: Mapping[int, float]) -> float:
    """Seconds until the node that needs longest has got what its ranks hold, over all its cards at once.

    What a rank holds passes its own card, which neighbours share where a node has more ranks than cards, as
    messages between stages do. Who sends has cards that are no slower.

    Args:
        cluster: the machines.
        held_bytes: by rank, of one or more.

    Raises:
        ValueError: a rank that is not there.

    Complexity: O(ranks x log nodes).
    """
    by_card: defaultdict[tuple[int, int], float] = defaultdict(float)
    for rank, size in held_bytes.items():
        node = cluster.node_of(rank)
        by_card[node, cluster.nodes[node].card_of(cluster.place_of(rank))] += size
    cards = ((cluster.nodes[node].card or cluster.inter, size) for (node, _), size in by_card.items())
    return max(card.latency_s + size / card.bytes_per_s for card, size in cards)
