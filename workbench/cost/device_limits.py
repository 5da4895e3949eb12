"""Limits on a device's kernels besides its tables: power, launches and narrow formats."""

import math
from dataclasses import dataclass

FITTED = "fitted to"  # how the source of such a share begins


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimit:
    """Power limit of a device, and the share of its rates that training sustains under it.

    Args:
        rated_w: power limit of the board, in watts.
        source: where the limit comes from.
        sustained_products: share of the short-loop rates of matrix products that training sustains.
        sustained_source: where this share comes from.
        clock_spread: standard deviation of the clock between devices, relative to its mean.
    """

    rated_w: float
    source: str
    sustained_products: float = 1.0
    sustained_source: str = ""
    clock_spread: float = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether the share was fitted to training runs."""
        return self.sustained_source.startswith(FITTED)

    def __post_init__(self) -> None:
        if not 0 < self.rated_w < math.inf:
            raise ValueError(f"power limit: want rated_w > 0, got {self.rated_w}")
        if not (0 < self.sustained_products <= 1 and 0 <= self.clock_spread < 0.1):
            raise ValueError(f"power limit: want a share of 0 to 1 and a spread below 0.1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """Times between kernels.

    Args:
        kernel_gap_s: gap between two kernels on the device while the host runs ahead.
        graph_gap_s: the same inside a CUDA graph.
        host_kernel_s: host time per launched operator, forward or backward.
        host_collective_s: host time per collective inside a layer.
        source: where the times come from.
    """

    kernel_gap_s: float = 0.0
    graph_gap_s: float = 0.0
    host_kernel_s: float = 0.0
    host_collective_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        gaps, hosts = (self.kernel_gap_s, self.graph_gap_s), (self.host_kernel_s, self.host_collective_s)
        if not all(0 <= seconds < math.inf for seconds in (*gaps, *hosts)):
            raise ValueError(f"launch times: want seconds >= 0, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowRate:
    """Rate of matrix products in a narrow format.

    Args:
        product_format: "fp8", "mxfp8" or "nvfp4".
        rate: FLOP/s relative to products in the precision of the tables.
        measured: whether it was measured on this device.
        source: where the rate comes from.
    """

    product_format: str
    rate: float
    measured: bool
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"products in {self.product_format}: want rate > 0, got {self.rate}")
