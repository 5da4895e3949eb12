"""Limits on a device's kernels besides its tables: power, launches and narrow formats."""

import math
from dataclasses import dataclass

FITTED = "fitted to"  # how the source of such a share begins


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimit:
    """The power under which rates of a device hold, and what it leaves of them in training.

    Args:
        rated_w: of the board.
        source: of it.
        sustained_products: of the rates of products in short loops, what training sustains.
        sustained_source: of that.
        clock_spread: standard deviation of the clock from device to device, over its mean.
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
    """What stands between kernels.

    Args:
        kernel_gap_s: from a kernel's end to the next one's start, where the host is ahead.
        graph_gap_s: the same inside a recorded graph.
        host_kernel_s: of the host, for each operator it launches, forward or backward.
        host_collective_s: of the host, for each collective inside a layer.
        source: of these.
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
    """Products with operands of a narrow format.

    Args:
        product_format: "fp8", "mxfp8" or "nvfp4".
        rate: FLOP/s over that of products in the tables' precision.
        measured: whether on this device.
        source: of it.
    """

    product_format: str
    rate: float
    measured: bool
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"products in {self.product_format}: want rate > 0, got {self.rate}")
