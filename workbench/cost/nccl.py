"""NCCL's collectives among ranks of several nodes: rings and trees, protocol by protocol.

Latencies and shares of bandwidth are those by which the library itself chooses between them: NVIDIA/nccl
src/graph/tuning.cc at b6475625 (baseLat, hwLat for NVLink and network, llMaxBws). Trees: Sanders, Speck,
Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; rings and pairwise
exchange: Thakur, Rabenseifner, Gropp 2005.

Differs: no correction of trees at medium sizes (treeCorrectionFactor), no number of channels.
"""

from math import ceil, log2
from typing import NamedTuple

from workbench.cost.group_link import GroupLink
from workbench.units import GB

MICRO = 1e-6
LINE_SHARE = 0.9
"""Of cards' line rate that large messages reach on a few nodes: the middle of 0.75 (8 x 100 Gb/s RoCE, 2
nodes: nccl issue 495), 0.86 (4 x 200 Gb/s, 2 nodes: nccl-tests issue 175), 0.95 (4 x 400 Gb/s, 5 nodes: nccl
issue 1368) and 0.96 (4 x 200 Gb/s, 3 nodes: nccl-tests issue 119)."""
DOUBLING_LOSS = 0.06
"""Time added for each doubling of the nodes, by collisions of flows in the levels of a fat tree. De Sensi et
al. 2024, "Exploring GPU-to-GPU Communication" (arXiv 2408.14090): beside other jobs, all-reduces on 1,024
GPUs (256 nodes) lose up to half of their rate on one network and next to nothing on another, which is 0.125
and 0 a doubling. The middle is a choice, not a measurement."""
LL_BYTES_PER_S = 20.4 * GB
PLATEAU = 1.4  # latency of large ring all-reduces, there "plateau effect of ring"


class Protocol(NamedTuple):
    """A protocol: seconds of a call, of a hop inside a node and between nodes, and its share of payload."""

    base_s: float
    near_s: float
    far_s: float
    share: float
    most_bytes_per_s: float = float("inf")


RING = (
    Protocol(6.6 * MICRO, 0.6 * MICRO, 2.7 * MICRO, 1 / 4, LL_BYTES_PER_S),
    Protocol(14.0 * MICRO, 1.9 * MICRO, 4.0 * MICRO, 0.92),
    Protocol(8.4 * MICRO, 3.4 * MICRO, 14.0 * MICRO, 1.0),
)
TREE = (
    Protocol(6.8 * MICRO, 0.6 * MICRO, 5.0 * MICRO, 0.92 / 3.8, LL_BYTES_PER_S),
    Protocol(14.0 * MICRO, 1.25 * MICRO, 8.5 * MICRO, 0.92 * 120 / 128),
    Protocol(0.0, 28.0 * MICRO, 28.0 * MICRO, 0.92),
)
SIMPLE = RING[-1]


class Group(NamedTuple):
    """Ranks on several nodes.

    Args:
        num_ranks: ranks of the group.
        link: the link that joins them.
        near_bytes_per_s: rate of a ring inside a node.
    """

    num_ranks: int
    link: GroupLink
    near_bytes_per_s: float

    @property
    def per_node(self) -> float:
        return self.num_ranks / self.link.num_nodes

    @property
    def far_bytes_per_s(self) -> float:
        """Rate at which the group sends out of a node."""
        return self.link.cards_bytes_per_s * network_share(self.link.num_nodes)

    @property
    def bus_bytes_per_s(self) -> float:
        """Rate of a ring through all nodes."""
        return min(self.near_bytes_per_s, self.far_bytes_per_s)

    def far_s(self, protocol: Protocol) -> float:
        """Seconds of a hop between nodes: the library's, or the link's latency where that is longer."""
        return max(protocol.far_s, self.link.latency_s)


def network_share(num_nodes: int) -> float:
    """The share of the cards' line rate that a collective among `num_nodes` nodes reaches."""
    return LINE_SHARE / (1.0 + DOUBLING_LOSS * log2(max(1, num_nodes / 2)))


def all_reduce_s(num_bytes: float, group: Group) -> float:
    """The faster of ring and tree, as the library chooses."""
    return min(_ring_all_reduce_s(num_bytes, group), _tree_s(num_bytes, group))


def all_gather_s(num_bytes: float, group: Group) -> float:
    """A ring: n-1 steps, of which one per node boundary is over cards; a reduce-scatter takes as long."""
    far = group.link.num_nodes - 1
    near = group.num_ranks - 1 - far
    moved = num_bytes * (group.num_ranks - 1) / group.num_ranks
    return min(_pass_s(each, moved, group.bus_bytes_per_s, near, far, group) for each in RING)


def broadcast_s(num_bytes: float, group: Group) -> float:
    """A pipelined ring: bandwidth once, latency a hop.

    Where channels cross nodes alike, the library counts one hop for all when it chooses the protocol.
    """
    far = group.link.num_nodes - 1
    near = group.num_ranks - 1 - far
    protocol = min(
        RING, key=lambda candidate: _pass_s(candidate, num_bytes, group.bus_bytes_per_s, 0, 1, group)
    )
    return _pass_s(protocol, num_bytes, group.bus_bytes_per_s, near, far, group)


def all_to_all_s(num_bytes: float, group: Group) -> float:
    """Pairwise exchange of 1/n of a rank's bytes: traffic inside a node overlaps with traffic out of it.

    Messages to ranks of one node follow each other without waiting.
    """
    piece = num_bytes / group.num_ranks
    near_s = piece * (group.per_node - 1) / group.link.near.bytes_per_s
    far_rate = group.link.rank_bytes_per_s * network_share(group.link.num_nodes)
    far_s = piece * (group.num_ranks - group.per_node) / far_rate
    hops_s = (group.per_node - 1) * SIMPLE.near_s + (group.link.num_nodes - 1) * group.far_s(SIMPLE)
    return SIMPLE.base_s + hops_s + max(near_s, far_s)


def _ring_all_reduce_s(num_bytes: float, group: Group) -> float:
    far = 2 * group.link.num_nodes
    near = 2 * (group.num_ranks - 1) - far
    moved = 2 * num_bytes * (group.num_ranks - 1) / group.num_ranks
    return min(
        _pass_s(each, moved, group.bus_bytes_per_s, near, far, group, PLATEAU if each is SIMPLE else 1.0)
        for each in RING
    )


def _tree_s(num_bytes: float, group: Group) -> float:
    """Two trees of half the bytes each, up and down; inside a node a chain.

    Between two nodes every byte crosses once each way, both ways at once.
    """
    far_bytes_per_s = group.far_bytes_per_s * (2 if group.link.num_nodes == 2 else 1)
    bus = min(group.near_bytes_per_s, far_bytes_per_s)
    near, far = 2 * ceil(group.per_node - 1), 2 * ceil(log2(group.link.num_nodes))
    return min(_pass_s(each, 2 * num_bytes, bus, near, far, group) for each in TREE)


def _pass_s(
    protocol: Protocol,
    moved: float,
    bus_bytes_per_s: float,
    near: float,
    far: float,
    group: Group,
    longer: float = 1.0,
) -> float:
    latency_s = protocol.base_s + max(0.0, near) * protocol.near_s + far * group.far_s(protocol)
    rate = min(bus_bytes_per_s * protocol.share, protocol.most_bytes_per_s)
    return longer * latency_s + moved / rate
