"""The link of a collective among several ranks: inside a node, or over the nodes' cards."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from workbench.cost.hardware import Cluster, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink(Link):
    """What ranks on several nodes with cards run over.

    `bytes_per_s` is what the group sends out of a node: its members' shares of the cards, never more than
    passes inside the node. `latency_s` is a card's.

    Args:
        near: joins the ranks of a node.
        num_nodes: of the group, >= 2.
        members: on each node; the fewest, where nodes differ.
        rank_bytes_per_s: share of the cards of one rank.
    """

    near: Link
    num_nodes: int
    members: int
    rank_bytes_per_s: float

    @property
    def cards_bytes_per_s(self) -> float:
        """Of all the cards that the group has on a node."""
        return self.members * self.rank_bytes_per_s


def busy_share(link: Link) -> float:
    """Of what a collective inside a node asks of its devices, what one over the link does: by its rate."""
    if not isinstance(link, GroupLink):
        return 1.0
    return min(1.0, link.cards_bytes_per_s / link.near.bytes_per_s)


def group_link(cluster: Cluster, *, num_ranks: int, stride: int, num_groups: int = 1) -> Link:
    """What ranks 0, stride, 2 x stride, ... run over, and as many behind them for every further group.

    Inside a node its own link. Across nodes every rank of a node that is in the group brings its share of
    the node's cards: the other ranks are in groups of their own, which send at the same time. The node with
    the fewest of a group's ranks sets the pace.

    Differs: nodes are taken to be as large as the first, and the first group to start at a node's border.

    Args:
        cluster: the machines.
        num_ranks: of a group.
        stride: from one rank to the next.
        num_groups: one behind the other; the slowest counts.

    Complexity: O(num_ranks x num_groups) for other numbers than before.
    """
    if num_ranks < 1 or stride < 1:
        raise ValueError(f"group of ranks: want num_ranks and stride >= 1, got {num_ranks} and {stride}")
    node = cluster.nodes[0]
    near = node.link or cluster.intra
    members, num_nodes = _spread(node.num_ranks, num_ranks, stride, num_groups)
    if num_nodes == 1:
        return near
    card, share = node.card or cluster.inter, node.cards_per_rank
    if node.num_cores is not None:
        return _shared_memory(card, near, members)
    return _over_cards(card, near, share, members, num_nodes)


@cache
def _spread(node_ranks: int, num_ranks: int, stride: int, num_groups: int) -> tuple[int, int]:
    """Ranks on the node that has the fewest of a group, and the group's nodes, of the slowest group.

    That is one of several nodes, if there is one; of these the one with the fewest such ranks.
    """
    size = num_ranks * stride
    spreads = {(num_ranks, 1)}
    for first in range(0, num_groups * size, size):
        members = Counter(rank // node_ranks for rank in range(first, first + size, stride))
        spreads.add((min(members.values()), len(members)))
    several = [spread for spread in spreads if spread[1] > 1]
    return min(several or spreads, key=lambda spread: (spread[0], -spread[1]))


def ring_link(cluster: Cluster, ranks: Sequence[int]) -> Link:
    """What given ranks run over, by the same rule.

    Raises:
        ValueError: a rank that is not there.

    Complexity: O(ranks x log nodes).
    """
    members = Counter(map(cluster.node_of, ranks))
    card = cluster.link_of(members)
    if len(members) == 1:
        return card
    near = min((cluster.link_of((node,)) for node in members), key=lambda link: link.bytes_per_s)
    nodes = [cluster.nodes[node] for node in members]
    if any(node.num_cores is not None for node in nodes):
        return _shared_memory(card, near, min(members.values()))
    share = min(node.cards_per_rank for node in nodes)
    return _over_cards(card, near, share, min(members.values()), len(members))


def slowest_ring(cluster: Cluster, groups: Sequence[Sequence[int]]) -> Link:
    """Among what joins each group: between nodes if any group leaves one, then by bandwidth."""
    links = [ring_link(cluster, ranks) for ranks in groups]
    leaving = [
        link
        for link, ranks in zip(links, groups, strict=True)
        if len({cluster.node_of(rank) for rank in ranks}) > 1
    ]
    return min(leaving or links, key=lambda link: link.bytes_per_s)


def _over_cards(card: Link, near: Link, share: float, members: int, num_nodes: int) -> GroupLink:
    rank_bytes_per_s = min(near.bytes_per_s, share * card.bytes_per_s)
    return GroupLink(
        name=f"{members} x {share:g} x {card.name}",
        bytes_per_s=min(near.bytes_per_s, members * rank_bytes_per_s),
        latency_s=card.latency_s,
        near=near,
        num_nodes=num_nodes,
        members=members,
        rank_bytes_per_s=rank_bytes_per_s,
    )


def _shared_memory(card: Link, near: Link, members: int) -> Link:
    """Nodes of processes on shared cores: each member sends as fast as a card, all as fast as the node."""
    bytes_per_s = min(near.bytes_per_s, members * card.bytes_per_s)
    if bytes_per_s == card.bytes_per_s:
        return card
    return Link(name=f"{members} x {card.name}", bytes_per_s=bytes_per_s, latency_s=card.latency_s)
