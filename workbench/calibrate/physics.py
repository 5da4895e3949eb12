"""Least seconds of kernels by a data sheet alone: what the rates of two devices are compared by."""

import numpy as np
from numpy.typing import NDArray

from workbench.calibrate.device_sheet import DeviceSheet
from workbench.cost.device_limits import PowerLimit
from workbench.cost.power import clock_share

# The fastest kernels of cuBLAS work on tiles of 256 x 128 or 128 x 256 (NVIDIA, "Matrix Multiplication
# Background User's Guide", section on tile quantization).
TILE = (128, 256)
ELEMENT_BYTES = 2


def power_share(sheet: DeviceSheet) -> float:
    """Of the rate of compute-bound kernels, what the board's power limit leaves."""
    if sheet.full_power_w is None:
        return 1.0
    full = PowerLimit(rated_w=sheet.full_power_w, source=f"data sheet of {sheet.device}")
    return clock_share(sheet.power_w, full)


def compute_rates(sheet: DeviceSheet, of_like: DeviceSheet) -> tuple[float, float]:
    """FLOP/s of products on either device: the fastest measured where both sheets have it, else the peaks."""
    rate, rate_of_like = sheet.reached_bfloat16_flop_per_s, of_like.reached_bfloat16_flop_per_s
    if rate is None or rate_of_like is None:
        rate, rate_of_like = sheet.bfloat16_flop_per_s, of_like.bfloat16_flop_per_s
    return rate * power_share(sheet), rate_of_like * power_share(of_like)


def product_seconds(sheet: DeviceSheet, at: NDArray[np.float64], flop_per_s: float) -> NDArray[np.float64]:
    """Seconds of products y[m, n] = x[m, k] w[k, n] by roofline and waves of tiles.

    Computing and reading hide each other but near the corner of the roofline, where neither is done early:
    the root of the sum of their squares. Tiles fill the processors wave after wave; of what a last, half
    empty wave would lose, kernels that split tiles get half back (the root). Fewer tiles than processors
    share their inner dimension. Memory is read once.

    Args:
        sheet: of the device.
        at: [N, 3] of m, n and k.
        flop_per_s: of all processors together.
    """
    m, n, k = at.T
    tiles = np.ceil(m / TILE[0]) * np.ceil(n / TILE[1])
    waves = np.ceil(tiles / sheet.processors) * sheet.processors / tiles
    lost = np.where(tiles < sheet.processors, 1.0, waves)
    computed_s = 2.0 * m * n * k * np.sqrt(lost) / flop_per_s
    moved_s = ELEMENT_BYTES * (m * k + k * n + m * n) / sheet.memory_bytes_per_s
    return np.asarray(np.hypot(computed_s, moved_s))


def memory_seconds(
    seconds: NDArray[np.float64],
    num_bytes: NDArray[np.float64],
    best_bytes_per_s: float,
    sheet: DeviceSheet,
    of_like: DeviceSheet,
) -> NDArray[np.float64]:
    """Seconds of memory-bound kernels, out of those on another device.

    Bytes at its best rate take the ratio of bandwidths; the rest is launch and stays.
    """
    moved_s = np.minimum(seconds, num_bytes / best_bytes_per_s)
    return np.asarray(seconds - moved_s + moved_s * of_like.memory_bytes_per_s / sheet.memory_bytes_per_s)
