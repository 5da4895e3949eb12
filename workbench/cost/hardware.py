"""What a plan knows about machines: nodes, ranks, links. SI units only."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from workbench.data.sample import WHERE_SET


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A point-to-point channel: a message occupies it for bytes / bandwidth, then travels latency.

    Args:
        name: of the link.
        bytes_per_s: bandwidth.
        latency_s: from the end of sending to arrival.
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
    """A machine with devices of one kind.

    Args:
        device: kind of its devices.
        num_ranks: devices.
        memory_bytes: of one device; where ranks share cores, of all of them together.
        num_cores: None where each rank has a device of its own. On a CPU machine the cores that all ranks of
            the node share: when more of them compute than there are cores, each runs at cores / ranks of
            its speed.
        link: joins its ranks; None: the cluster's `intra`.
        card: leaves the node; None: the cluster's `inter`.
    """

    device: str
    num_ranks: int
    memory_bytes: int
    num_cores: int | None = None
    link: Link | None = field(default=None, metadata={WHERE_SET: True})
    card: Link | None = field(default=None, metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.memory_bytes < 1:
            raise ValueError(f"node of {self.device}: want >= 1 rank and > 0 bytes, got {self}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of consecutively numbered ranks, which may differ in kind, in memory and in links of their own.

    No `slots`: where every node's ranks end is cached on the instance.

    Args:
        name: of the cluster.
        nodes: in the order of their ranks.
        intra: joins ranks of a node.
        inter: joins nodes.
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
        """Index of the rank's node, O(log nodes); ValueError for a rank that is not there."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank {rank} is not there: cluster {self.name!r} has ranks 0..{self.num_ranks - 1}"
            )
        return bisect_right(self._ends, rank)

    def device_of(self, ranks: Sequence[int]) -> str:
        """The kind of device that some ranks are; ValueError where they are of several."""
        kinds = sorted({self.nodes[node].device for node in {self.node_of(rank) for rank in ranks}})
        if len(kinds) > 1:
            raise ValueError(f"ranks {list(ranks)} work as one but are of several kinds: {', '.join(kinds)}")
        return kinds[0]

    def link_of(self, nodes: Iterable[int]) -> Link:
        """What joins ranks on these nodes: their node's own link, or the slowest card among several nodes."""
        indices = sorted(set(nodes))
        if len(indices) == 1:
            return self.nodes[indices[0]].link or self.intra
        cards = [self.nodes[index].card or self.inter for index in indices]
        return min(cards, key=lambda card: card.bytes_per_s)

    def joining(self, ranks: Iterable[int]) -> Link:
        """What joins these ranks, see `link_of`."""
        return self.link_of(map(self.node_of, ranks))

    def slowest(self, groups: Sequence[Sequence[int]]) -> Link:
        """Among what joins each group: between nodes if any group leaves one, then by bandwidth."""
        nodes = [{self.node_of(rank) for rank in ranks} for ranks in groups]
        leaving = [each for each in nodes if len(each) > 1]
        return min(map(self.link_of, leaving or nodes), key=lambda link: link.bytes_per_s)


def uniform(name: str, node: Node, *, num_nodes: int, intra: Link, inter: Link) -> Cluster:
    """A cluster of equal nodes."""
    return Cluster(name=name, nodes=(node,) * num_nodes, intra=intra, inter=inter)
