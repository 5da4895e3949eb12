"""What a plan knows about machines: nodes, ranks, links. SI units only."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A point-to-point channel: a message occupies it for bytes / bandwidth, then travels latency."""

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
    """A machine with `num_ranks` devices of one kind.

    `num_cores` is None where each rank has a device of its own. On a CPU machine it is the
    number of cores that all ranks of the node share: when more of them compute than there
    are cores, each runs at cores / ranks of its speed.
    """

    device: str
    num_ranks: int
    memory_bytes: int
    num_cores: int | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.memory_bytes < 1:
            raise ValueError(f"node of {self.device}: want >= 1 rank and > 0 bytes, got {self}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of consecutively numbered ranks; `intra` joins ranks of a node, `inter` nodes.

    No `slots`: where every node's ranks end is cached on the instance.
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


def uniform(name: str, node: Node, *, num_nodes: int, intra: Link, inter: Link) -> Cluster:
    """A cluster of equal nodes."""
    return Cluster(name=name, nodes=(node,) * num_nodes, intra=intra, inter=inter)
