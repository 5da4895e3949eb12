"""The link of a collective among several ranks: inside a node, or over the nodes' cards."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from workbench.cost.hardware import Cluster, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink(Link):
    """The link of a group of ranks on several nodes with network cards.

    `bytes_per_s` is what the group sends out of a node: its members' shares of the cards, limited by the
    rate inside the node. `latency_s` is a card's.

    Args:
        near: the link inside a node.
        num_nodes: nodes of the group, >= 2.
        members: ranks of the group on each node; the fewest, where nodes differ.
        rank_bytes_per_s: one rank's share of the cards; the smallest, where nodes differ.
        cards_bytes_per_s: all members' shares on a node; those of the node that sends least.
        neighbour_bytes_per_s: what a rank sends to the next one of the group on another node: over one
            card, and no faster than the group's share of all the node's cards.
    """

    near: Link
    num_nodes: int
    members: int
    rank_bytes_per_s: float
    cards_bytes_per_s: float
    neighbour_bytes_per_s: float


def busy_share(link: Link) -> float:
    """Load of a collective over the link on its devices, relative to one inside a node: by their rates."""
    if not isinstance(link, GroupLink):
        return 1.0
    return min(1.0, link.cards_bytes_per_s / link.near.bytes_per_s)


def group_link(cluster: Cluster, *, num_ranks: int, stride: int, num_groups: int = 1) -> Link:
    """The link of the group of ranks 0, stride, 2 x stride, ..., and of consecutive groups like it.

    Inside a node it is the node's link. Across nodes every member brings its share of its node's cards,
    since the other ranks are in groups that send at the same time. The node with the fewest members sets
    the pace.
    Differs: nodes are assumed as large as the first, and the first group to start at a node's border.

    Args:
        cluster: the machines.
        num_ranks: ranks of a group.
        stride: distance between consecutive ranks.
        num_groups: consecutive groups; the slowest counts.

    Complexity: O(num_ranks x num_groups), once for the same numbers.
    """
    if num_ranks < 1 or stride < 1:
        raise ValueError(f"group of ranks: want num_ranks and stride >= 1, got {num_ranks} and {stride}")
    node = cluster.nodes[0]
    near = node.link or cluster.intra
    members, num_nodes = _spread(node.num_ranks, num_ranks, stride, num_groups)
    if num_nodes == 1:
        return near
    card = node.card or cluster.inter
    if node.num_cores is not None:
        return _shared_memory(card, near, members)
    return _over_cards(card, near, [(members, node.cards_per_rank * card.bytes_per_s)], num_nodes)


@cache
def _spread(node_ranks: int, num_ranks: int, stride: int, num_groups: int) -> tuple[int, int]:
    """Fewest ranks of the slowest group on any of its nodes, and the number of its nodes.

    The slowest group is one on several nodes, if there is one; among these the one with the fewest ranks.
    """
    size = num_ranks * stride
    spreads = {(num_ranks, 1)}
    for first in range(0, num_groups * size, size):
        members = Counter(rank // node_ranks for rank in range(first, first + size, stride))
        spreads.add((min(members.values()), len(members)))
    several = [spread for spread in spreads if spread[1] > 1]
    return min(several or spreads, key=lambda spread: (spread[0], -spread[1]))


def ring_link(cluster: Cluster, ranks: Sequence[int]) -> Link:
    """The link of a group of given ranks, by the rule of `group_link`.

    Where nodes differ, the one whose members' shares of its cards are the slowest sets the pace.

    Raises:
        ValueError: a rank outside the cluster.

    Complexity: O(ranks x log nodes).
    """
    members = Counter(map(cluster.node_of, ranks))
    card = cluster.link_of(members)
    if len(members) == 1:
        return card
    near = min((cluster.link_of((node,)) for node in members), key=lambda link: link.bytes_per_s)
    nodes = [(cluster.nodes[index], count) for index, count in members.items()]
    if any(node.num_cores is not None for node, _ in nodes):
        return _shared_memory(card, near, min(members.values()))
    shares = [
        (count, node.cards_per_rank * (node.card or cluster.inter).bytes_per_s) for node, count in nodes
    ]
    return _over_cards(card, near, shares, len(members))


def slowest_ring(cluster: Cluster, groups: Sequence[Sequence[int]]) -> Link:
    """The slowest link of the groups: one between nodes if there is any, then the lowest bandwidth."""
    links = [ring_link(cluster, ranks) for ranks in groups]
    leaving = [
        link
        for link, ranks in zip(links, groups, strict=True)
        if len({cluster.node_of(rank) for rank in ranks}) > 1
    ]
    return min(leaving or links, key=lambda link: link.bytes_per_s)


def _over_cards(card: Link, near: Link, shares: Sequence[tuple[int, float]], num_nodes: int) -> GroupLink:
    """The link over the nodes' cards.

    Args:
        card: the slowest.
        shares: members on a node, and one's share of its cards in bytes per second.
    """
    rank_bytes_per_s = min(near.bytes_per_s, *(share for _, share in shares))
    cards_bytes_per_s = min(count * min(near.bytes_per_s, share) for count, share in shares)
    bytes_per_s = min(near.bytes_per_s, cards_bytes_per_s)
    members = min(count for count, _ in shares)
    return GroupLink(
        name=f"{members} x {rank_bytes_per_s / card.bytes_per_s:g} x {card.name}",
        bytes_per_s=bytes_per_s,
        latency_s=card.latency_s,
        near=near,
        num_nodes=num_nodes,
        members=members,
        rank_bytes_per_s=rank_bytes_per_s,
        cards_bytes_per_s=cards_bytes_per_s,
        neighbour_bytes_per_s=min(card.bytes_per_s, bytes_per_s),
    )


def _shared_memory(card: Link, near: Link, members: int) -> Link:
    """The link of processes on shared cores: each sends at a card's rate, together at the node's."""
    bytes_per_s = min(near.bytes_per_s, members * card.bytes_per_s)
    if bytes_per_s == card.bytes_per_s:
        return card
    return Link(name=f"{members} x {card.name}", bytes_per_s=bytes_per_s, latency_s=card.latency_s)
