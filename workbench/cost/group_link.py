"""The link of a collective among several ranks: inside a node, or over the nodes' cards."""

from collections import Counter
from collections.abc import Sequence

from workbench.cost.hardware import Cluster, Link


def group_link(cluster: Cluster, *, num_ranks: int, stride: int) -> Link:
    """What a ring of ranks 0, stride, 2 x stride, ... runs over.

    Inside a node its own link. Across nodes every rank of a node that is in the group brings its
    network card: a node's k members exchange with the next node over k cards at once, never faster
    than the node's own link.

    Differs: nodes are taken to be as large as the first, and groups to start at a node's border.

    Args:
        cluster: the machines.
        num_ranks: of the group.
        stride: from one rank to the next.
    """
    if num_ranks < 1 or stride < 1:
        raise ValueError(f"group of ranks: want num_ranks and stride >= 1, got {num_ranks} and {stride}")
    per_node = cluster.nodes[0].num_ranks
    if (num_ranks - 1) * stride < per_node:
        return cluster.intra
    members = min(num_ranks, max(1, per_node // stride))
    return _over_cards(cluster.inter, cluster.intra.bytes_per_s, members)


def ring_link(cluster: Cluster, ranks: Sequence[int]) -> Link:
    """What a ring of given ranks runs over, node after node, by the same rule.

    The node with the fewest of the ranks has the fewest cards in it, and sets the pace.

    Raises:
        ValueError: a rank that is not there.

    Complexity: O(ranks x log nodes).
    """
    members = Counter(map(cluster.node_of, ranks))
    card = cluster.link_of(members)
    if len(members) == 1:
        return card
    own_bytes_per_s = min(cluster.link_of((node,)).bytes_per_s for node in members)
    return _over_cards(card, own_bytes_per_s, min(members.values()))


def _over_cards(card: Link, own_bytes_per_s: float, members: int) -> Link:
    """So many cards of a node at once, never faster than the node's own link."""
    bytes_per_s = min(own_bytes_per_s, members * card.bytes_per_s)
    if bytes_per_s <= card.bytes_per_s:
        return card
    return Link(name=f"{members} x {card.name}", bytes_per_s=bytes_per_s, latency_s=card.latency_s)
