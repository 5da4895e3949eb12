"""Times of collectives: ring formulas, and what was measured on a machine's own links."""

from enum import StrEnum

from workbench.cost.hardware import Link
from workbench.cost.interpolate import Surface
from workbench.cost.profile import Profile, Table


class Collective(StrEnum):
    """Bytes of a collective are those of the whole tensor: the reduced, gathered or sent one.

    Of an all-to-all: what one rank sends or gets, its own part included; the most, where they differ.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"


class Collectives:
    """Seconds of collectives as one machine does them.

    Over a link of the profile, at a number of ranks that was measured there, times are read
    from its table; a message smaller than the smallest measured one takes the time of the
    smallest. Everything else follows the ring formulas.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._surfaces = {
            (measured.collective, measured.scope, num_ranks): Surface(points)
            for measured in profile.collectives
            for num_ranks, points in by_ranks(measured.table).items()
        }

    def seconds(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Seconds on every rank of a ring of `num_ranks` over `link`."""
        surface = self._measured(kind, num_ranks, link)
        if surface is None or num_bytes == 0:
            return _RING[kind](num_bytes, num_ranks, link)
        padded = max(num_bytes, surface.low[0])
        return padded / surface.read(padded).rate

    def is_measured(self, kind: Collective, num_ranks: int, link: Link) -> bool:
        """Whether rows stand behind it, or nothing is sent at all."""
        return num_ranks == 1 or self._measured(kind, num_ranks, link) is not None

    def _measured(self, kind: Collective, num_ranks: int, link: Link) -> Surface | None:
        for machine_link in self._profile.links:
            own = (machine_link.bytes_per_s, machine_link.latency_s) == (link.bytes_per_s, link.latency_s)
            key = (kind.value, machine_link.scope, float(num_ranks))
            if own and key in self._surfaces:
                return self._surfaces[key]
        return None


def by_ranks(table: Table) -> dict[float, list[tuple[float, ...]]]:
    """Number of ranks -> points (bytes, rate): times at one number say nothing exact about another."""
    found: dict[float, list[tuple[float, ...]]] = {}
    for num_ranks, *point in table.points:
        found.setdefault(num_ranks, []).append(tuple(point))
    return found


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
