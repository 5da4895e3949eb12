"""Times of collectives: measured ones on a machine's own links, and formulas for everything else."""

from enum import StrEnum
from functools import partial
from math import log2

from workbench.cost import nccl
from workbench.cost.group_link import GroupLink
from workbench.cost.hardware import Link
from workbench.cost.interpolate import Surface
from workbench.cost.profile import Profile, Table


class Collective(StrEnum):
    """Kinds of collectives; their bytes are those of the whole tensor that is reduced, gathered or sent.

    Bytes of an all-to-all are what one rank sends or receives, including its own part; the maximum over
    ranks. The last two are collectives of sharded parameters, including a rank's copies and sums around
    them; where these were not measured, the bare collective stands in.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    PARAMETERS_GATHER = "parameters_gather"
    PARAMETERS_SCATTER = "parameters_scatter"

    @property
    def bare(self) -> "Collective":
        """The collective without a rank's copies and sums around it."""
        return _BARE.get(self, self)


_BARE = {
    Collective.PARAMETERS_GATHER: Collective.ALL_GATHER,
    Collective.PARAMETERS_SCATTER: Collective.REDUCE_SCATTER,
}


class Collectives:
    """Seconds of collectives on one machine.

    Over a link of the profile, at a measured number of ranks, times are read from its table; a message
    smaller than the smallest measured one takes the time of the smallest. With more ranks than were
    measured, each rank keeps its rate of sending. Over a link of another rate, which no network card is, they
    are those over the profile's link nearest in bandwidth, in proportion, see `_over_other_s`.
    Between nodes with network cards NCCL's rings and trees are assumed; everything else follows the ring
    formulas.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._surfaces = {
            (measured.collective, measured.scope, num_ranks): Surface(points)
            for measured in profile.collectives
            for num_ranks, points in by_ranks(measured.table).items()
        }
        self._stand_ins: dict[tuple[Collective, Link], Link | None] = {}

    def seconds(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Seconds on every rank of a ring of `num_ranks` over `link`."""
        surface = self._measured(kind, num_ranks, link)
        if num_ranks > 1 and num_bytes > 0 and surface is not None:
            return _read_s(surface, num_bytes)
        own = self._stand_in(kind, link)
        if own is not None and num_ranks > 1 and num_bytes > 0:
            return self._over_other_s(kind, num_bytes, num_ranks, link, own)
        if kind.bare is not kind:
            return self.seconds(kind.bare, num_bytes, num_ranks, link)
        if isinstance(link, GroupLink) and num_ranks > 1:
            near_bytes_per_s = self._bus_bytes_per_s(link.near, num_ranks // link.num_nodes)
            return _AMONG_NODES[kind](num_bytes, nccl.Group(num_ranks, link, near_bytes_per_s))
        most = self._most_ranks(kind, link)
        if most is not None and num_ranks > most and num_bytes > 0:
            return self._beyond_s(kind, num_bytes, num_ranks, link, most)
        return _RING[kind](num_bytes, num_ranks, link)

    def _over_other_s(
        self, kind: Collective, num_bytes: float, num_ranks: int, link: Link, own: Link
    ) -> float:
        """Seconds by those over one of the profile's links; the smallest message only waits.

        A shorter latency shortens that in proportion, but for what its bytes take at the highest rate. A
        longer one adds to every hop of a ring, as not all of the waiting is the link's. The rest is in
        proportion to bandwidth.
        """
        slower = own.bytes_per_s / link.bytes_per_s
        whole_s = self.seconds(kind, num_bytes, num_ranks, own)
        waiting_s = min(whole_s, self.seconds(kind, min(1.0, num_bytes), num_ranks, own))
        moving_s = (whole_s - waiting_s) * slower
        if link.latency_s < own.latency_s:
            share, surface = link.latency_s / own.latency_s, self._measured(kind, num_ranks, own)
            if surface is not None:
                at_best_s = min(num_bytes, *surface.low) / surface.read(*surface.high).rate
                moving_s += (1 - share) * min(at_best_s, waiting_s) * slower
            return waiting_s * share + moving_s
        hops_s = _RING[kind.bare](0.0, num_ranks, link) - _RING[kind.bare](0.0, num_ranks, own)
        return waiting_s + hops_s + moving_s

    def basis(self, kind: Collective, num_ranks: int, link: Link) -> str:
        """What a price that was not measured rests on; empty where it was measured."""
        if self.is_measured(kind, num_ranks, link):
            return ""
        if self._stand_in(kind.bare, link) is None:
            return "ring formula"
        return "scaled table"

    def is_measured(self, kind: Collective, num_ranks: int, link: Link) -> bool:
        """Whether the collective or its bare form was measured, or nothing is sent at all."""
        kinds = {kind, kind.bare}
        return num_ranks == 1 or any(
            self._measured(candidate, num_ranks, link) is not None for candidate in kinds
        )

    def _measured(self, kind: Collective, num_ranks: int, link: Link) -> Surface | None:
        for scope in self._scopes(link):
            if (surface := self._surfaces.get((kind.value, scope, float(num_ranks)))) is not None:
                return surface
        return None

    def _scopes(self, link: Link) -> list[str]:
        """Scopes of the profile's links that equal this one."""
        return [own.scope for own in self._profile.links if _are_alike(own.link, link)]

    def _stand_in(self, kind: Collective, link: Link) -> Link | None:
        """The link nearest in bandwidth over which it was measured; None for cards and the profile's own."""
        key = kind, link
        if key not in self._stand_ins:
            scopes = {scope for name, scope, _ in self._surfaces if name == kind.value}
            measured = [own.link for own in self._profile.links if own.scope in scopes]
            nearest = min(measured, key=partial(_octaves, link), default=None)
            is_own = any(_are_alike(own, link) for own in measured)
            self._stand_ins[key] = None if is_own or isinstance(link, GroupLink) else nearest
        return self._stand_ins[key]

    def _most_ranks(self, kind: Collective, link: Link) -> int | None:
        """The largest measured number of ranks over the link; None where nothing was measured."""
        scopes = self._scopes(link)
        measured = [num for name, scope, num in self._surfaces if name == kind.value and scope in scopes]
        return int(max(measured)) if measured else None

    def _beyond_s(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link, most: int) -> float:
        """Seconds with more ranks than measured: each keeps its rate on a switched link, with more hops."""
        surface = self._measured(kind, most, link)
        assert surface is not None
        free = Link(name=link.name, bytes_per_s=link.bytes_per_s, latency_s=0.0)
        longer = _RING[kind](num_bytes, num_ranks, free) / _RING[kind](num_bytes, most, free)
        hops_s = _RING[kind](0.0, num_ranks, link) - _RING[kind](0.0, most, link)
        return _read_s(surface, num_bytes) * longer + hops_s

    def _bus_bytes_per_s(self, near: Link, num_ranks: int) -> float:
        """Ring bandwidth of each rank in a node: of the largest measured all-gather, or the link's."""
        own = self._stand_in(Collective.ALL_GATHER, near) or near
        surface = self._measured(Collective.ALL_GATHER, num_ranks, own)
        if num_ranks < 2 or surface is None:
            return near.bytes_per_s
        rate = surface.read(*surface.high).rate * (num_ranks - 1) / num_ranks
        return rate * near.bytes_per_s / own.bytes_per_s


def _are_alike(one: Link, other: Link) -> bool:
    """Whether two links are of one rate and latency, whatever their names."""
    return (one.bytes_per_s, one.latency_s) == (other.bytes_per_s, other.latency_s)


def _octaves(one: Link, other: Link) -> float:
    """How far the bandwidths of two links are from each other."""
    return abs(log2(one.bytes_per_s / other.bytes_per_s))


def _read_s(surface: Surface, num_bytes: float) -> float:
    padded = max(num_bytes, surface.low[0])
    return padded / surface.read(padded).rate


def by_ranks(table: Table) -> dict[float, list[tuple[float, ...]]]:
    """Number of ranks -> points (bytes, rate), each number with a table of its own."""
    points_of: dict[float, list[tuple[float, ...]]] = {}
    for num_ranks, *point in table.points:
        points_of.setdefault(num_ranks, []).append(tuple(point))
    return points_of


def all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Ring all-reduce of `num_bytes` on every rank: reduce-scatter, then all-gather.

    Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication
    Operations in MPICH", section 4: 2(n-1) steps of 1/n of the bytes.
    """
    return reduce_scatter_s(num_bytes, num_ranks, link) + all_gather_s(num_bytes, num_ranks, link)


def all_gather_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Ring all-gather into `num_bytes` on every rank: n-1 steps of 1/n of the bytes."""
    steps = _steps(num_ranks)
    return steps * (num_bytes / num_ranks / link.bytes_per_s + link.latency_s)


def reduce_scatter_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Ring reduce-scatter of `num_bytes` on every rank; mirror image of the all-gather."""
    return all_gather_s(num_bytes, num_ranks, link)


def broadcast_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Pipelined ring broadcast: bandwidth once, latency per hop."""
    return 0.0 if num_ranks == 1 else num_bytes / link.bytes_per_s + _steps(num_ranks) * link.latency_s


def all_to_all_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Pairwise exchange: n-1 steps, in each of which every rank sends 1/n of its bytes to another.

    Source: Thakur, Rabenseifner, Gropp 2005, section 3, long messages.
    """
    return all_gather_s(num_bytes, num_ranks, link)


def _steps(num_ranks: int) -> int:
    if num_ranks < 1:
        raise ValueError(f"a collective wants at least one rank, got {num_ranks}")
    return num_ranks - 1


_RING = {
    Collective.ALL_REDUCE: all_reduce_s,
    Collective.ALL_GATHER: all_gather_s,
    Collective.REDUCE_SCATTER: reduce_scatter_s,
    Collective.BROADCAST: broadcast_s,
    Collective.ALL_TO_ALL: all_to_all_s,
}
_AMONG_NODES = {
    Collective.ALL_REDUCE: nccl.all_reduce_s,
    Collective.ALL_GATHER: nccl.all_gather_s,
    Collective.REDUCE_SCATTER: nccl.all_gather_s,
    Collective.BROADCAST: nccl.broadcast_s,
    Collective.ALL_TO_ALL: nccl.all_to_all_s,
}
