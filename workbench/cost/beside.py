"""What a collective costs that runs beside kernels: what outlasts them, and what it takes from them."""

SLOWED = 0.189
"""Seconds that kernels lose for each second in which a collective of the device's own processors runs beside
them. Lee et al. 2025, "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning" (arXiv 2507.03114), abstract: the mean over A100, H100, MI210 and MI250; at most 0.40."""


def left_s(collective_s: float, kernels_s: float) -> float:
    """Seconds that a collective adds to kernels beside it: those behind them, and those they lose."""
    return max(0.0, collective_s - kernels_s) + lost_s(collective_s, kernels_s)


def lost_s(collective_s: float, kernels_s: float) -> float:
    """Seconds by which kernels are longer for a collective beside them."""
    return SLOWED * min(collective_s, kernels_s)
