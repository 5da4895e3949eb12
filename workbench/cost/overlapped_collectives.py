"""What a collective costs that runs beside kernels: what outlasts them, and what it takes from them."""

from collections.abc import Callable

from workbench.cost.hardware import Cluster

SLOWED = 0.189
"""Seconds that kernels lose for each second in which a collective of the device's own processors runs beside
them. Lee et al. 2025, "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning" (arXiv 2507.03114), abstract: the mean over A100, H100, MI210 and MI250; at most 0.40. Measured
inside one node: a slower network asks less of the device, see `group_link.busy_share`."""


def left_s(collective_s: float, kernels_s: float) -> float:
    """Seconds that a collective adds to kernels beside it: those behind them, and those they lose."""
    return max(0.0, collective_s - kernels_s) + lost_s(collective_s, kernels_s)


def lost_s(collective_s: float, kernels_s: float) -> float:
    """Seconds by which kernels are longer for a collective beside them."""
    return SLOWED * min(collective_s, kernels_s)


def loss_on(cluster: Cluster) -> Callable[[float, float], float]:
    """`lost_s` on devices; nothing where ranks share cores, for what shares them is timed as it runs."""
    return _nothing_lost_s if any(node.num_cores is not None for node in cluster.nodes) else lost_s


def _nothing_lost_s(collective_s: float, kernels_s: float) -> float:
    return 0.0
