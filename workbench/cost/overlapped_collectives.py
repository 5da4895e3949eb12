"""The cost of a collective that overlaps with kernels: its exposed part, and their slowdown."""

from collections.abc import Callable

from workbench.cost.hardware import Cluster

SLOWED = 0.189
"""Seconds that kernels lose for each second in which a collective of the device's own processors runs beside
them. Lee et al. 2025, "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning" (arXiv 2507.03114), abstract: the mean over A100, H100, MI210 and MI250; at most 0.40. Measured
inside one node: a slower network asks less of the device, see `group_link.busy_share`."""


def left_s(collective_s: float, kernels_s: float) -> float:
    """Seconds that a collective adds to overlapping kernels: its exposed part and their slowdown."""
    return max(0.0, collective_s - kernels_s) + lost_s(collective_s, kernels_s)


def lost_s(collective_s: float, kernels_s: float) -> float:
    """Seconds by which a collective slows down the kernels that it overlaps with."""
    return SLOWED * min(collective_s, kernels_s)


def loss_on(cluster: Cluster) -> Callable[[float, float], float]:
    """`lost_s` on devices; 0 where ranks share cores, whose contention is simulated."""
    return _nothing_lost_s if any(node.num_cores is not None for node in cluster.nodes) else lost_s


def _nothing_lost_s(collective_s: float, kernels_s: float) -> float:
    return 0.0
