"""Nodes, ranks and links of a cluster, as plans know them. SI units only.

Every bandwidth is that of one port in one direction: a rank's own port inside a node, one network card
between nodes. A node's total is its cards times that; readers of files with other meanings (both
directions in a data sheet, a whole node in a table) convert on input.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from workbench.data.sample import WHERE_SET


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A point-to-point channel. A message occupies it for bytes / bandwidth and arrives after the latency.

    Args:
        name: name of the link.
        bytes_per_s: bandwidth of one port in one direction.
        latency_s: time from the end of sending to arrival.
    """

    name: str
    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(
                f"link {self.name!r}: want bandwidth > 0 and latency >= 0, "
                f"got {self.bytes_per_s} B/s and {self.latency_s} s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices of one kind with a fast link between them: a server, or a whole NVLink domain of 72.

    Args:
        device: kind of the devices.
        num_ranks: number of devices.
        memory_bytes: memory of one device; if ranks share CPU cores, of all ranks together.
        num_cores: CPU cores that all ranks of the node share; None if each rank has its own device. If more
            ranks compute than there are cores, each runs at cores / ranks of its speed.
        link: link between the ranks of the node; None: the cluster's `intra`.
        card: one network card of the node; None: the cluster's `inter`.
        num_cards: number of network cards; ranks share them evenly, neighbours first.
    """

    device: str
    num_ranks: int
    memory_bytes: int
    num_cores: int | None = None
    link: Link | None = field(default=None, metadata={WHERE_SET: True})
    card: Link | None = field(default=None, metadata={WHERE_SET: True})
    num_cards: int = field(default=1, metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        if min(self.num_ranks, self.memory_bytes, self.num_cards) < 1:
            raise ValueError(f"node of {self.device}: want >= 1 rank and card and > 0 bytes, got {self}")

    @property
    def cards_per_rank(self) -> float:
        """A rank's share of the cards while all send; ranks on shared cores send through memory."""
        return 1.0 if self.num_cores is not None else self.num_cards / self.num_ranks

    def card_of(self, local_index: int) -> int:
        """The index of the card through which the node's rank of that local index sends."""
        return local_index * min(self.num_cards, self.num_ranks) // self.num_ranks


@dataclass(frozen=True, kw_only=True)  # no slots: ends of nodes are cached on the instance
class Cluster:
    """Nodes with consecutively numbered ranks. Nodes may differ in device, memory and links.

    Args:
        name: name of the cluster.
        nodes: nodes in the order of their ranks.
        intra: link between ranks of a node: the port of one rank.
        inter: link between nodes: one network card; `Node.num_cards` is their number.
    """

    name: str
    nodes: tuple[Node, ...]
    intra: Link
    inter: Link

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(node.num_ranks for node in self.nodes))

    @property
    def num_ranks(self) -> int:
        return self._ends[-1] if self._ends else 0

    def node_of(self, rank: int) -> int:
        """Index of the rank's node, O(log nodes); ValueError for a rank outside the cluster."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank {rank} is not there: cluster {self.name!r} has ranks 0..{self.num_ranks - 1}"
            )
        return bisect_right(self._ends, rank)

    def place_of(self, rank: int) -> int:
        """The rank's local index on its node."""
        node = self.node_of(rank)
        return rank - self._ends[node] + self.nodes[node].num_ranks

    @property
    def rank_bytes_per_s(self) -> float:
        """Rate of one rank to another node while all ranks of its node send; with one node, inside it."""
        if len(self.nodes) == 1:
            return self.intra.bytes_per_s
        return min(self.intra.bytes_per_s, self.inter.bytes_per_s * self.nodes[0].cards_per_rank)

    def device_of(self, ranks: Sequence[int]) -> str:
        """The kind of device of some ranks; ValueError where they are of several."""
        kinds = sorted({self.nodes[node].device for node in {self.node_of(rank) for rank in ranks}})
        if len(kinds) > 1:
            raise ValueError(f"ranks {list(ranks)} work as one but are of several kinds: {', '.join(kinds)}")
        return kinds[0]

    def link_of(self, nodes: Iterable[int]) -> Link:
        """The link between ranks on these nodes: the node's own, or the slowest card among several nodes."""
        indices = sorted(set(nodes))
        if len(indices) == 1:
            return self.nodes[indices[0]].link or self.intra
        cards = [self.nodes[index].card or self.inter for index in indices]
        return min(cards, key=lambda card: card.bytes_per_s)

    def joining(self, ranks: Iterable[int]) -> Link:
        """The link between these ranks, see `link_of`."""
        return self.link_of(map(self.node_of, ranks))

    def slowest(self, groups: Sequence[Sequence[int]]) -> Link:
        """The slowest link of the groups: one between nodes if there is any, then the lowest bandwidth."""
        nodes = [{self.node_of(rank) for rank in ranks} for ranks in groups]
        leaving = [group_nodes for group_nodes in nodes if len(group_nodes) > 1]
        return min(map(self.link_of, leaving or nodes), key=lambda link: link.bytes_per_s)


def uniform(name: str, node: Node, *, num_nodes: int, intra: Link, inter: Link) -> Cluster:
    """A cluster of equal nodes."""
    return Cluster(name=name, nodes=(node,) * num_nodes, intra=intra, inter=inter)
