"""The link of a collective among several ranks: inside a node, or over the nodes' cards."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


def group_link(cluster: Cluster, *, num_ranks: int, stride: int) -> Link:
    """What ranks 0, stride, 2 x stride, ... run over.

    Inside a node its own link. Across nodes every rank of a node that is in the group brings its share of
    the node's cards: the other ranks are in groups of their own, which send at the same time.

    Differs: nodes are taken to be as large as the first, and groups to start at a node's border.

    Args:
        cluster: the machines.
        num_ranks: of the group.
        stride: from one rank to the next.
    """
    if num_ranks < 1 or stride < 1:
        raise ValueError(f"group of ranks: want num_ranks and stride >= 1, got {num_ranks} and {stride}")
    node = cluster.nodes[0]
    near = node.link or cluster.intra
    if (num_ranks - 1) * stride < node.num_ranks:
        return near
    members = min(num_ranks, max(1, node.num_ranks // stride))
    card, share = node.card or cluster.inter, node.cards_per_rank
    if node.num_cores is not None:
        return _shared_memory(card, near, members)
    return _over_cards(card, near, share, members, -(-num_ranks // members))


def ring_link(cluster: Cluster, ranks: Sequence[int]) -> Link:
    """What given ranks run over, by the same rule.

    The node with the fewest of the ranks has the fewest cards in it, and sets the pace.

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
