"""Latency-bandwidth times of collectives over rings of equal links."""

from workbench.cost.hardware import Link


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


def _steps(num_ranks: int) -> int:
    if num_ranks < 1:
        raise ValueError(f"a collective wants at least one rank, got {num_ranks}")
    return num_ranks - 1
