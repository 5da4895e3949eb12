"""Generations of fused attention kernels, and the rates of older ones relative to a device's table."""

from enum import StrEnum


class FlashKernel(StrEnum):
    """The NEWEST kernel for the device, as measured in its table, or an older generation."""

    NEWEST = "newest"
    FLASH2 = "flash2"
    FLASH1 = "flash1"


# Rate over the next generation's. 1: Dao 2023, "FlashAttention-2", section 4.1, is 1.7 to 3 times as fast,
# least at long sequences. 2: Shah et al. 2024, figure 5, causal heads of 128 on H100: 319 of 579 TFLOP/s at
# 4,096 tokens, 335 of 616 at 16,384.
OF_THE_NEXT = {1: 1 / 1.7, 2: 0.55}
_GENERATION = {FlashKernel.FLASH1: 1, FlashKernel.FLASH2: 2}
_WITH_WINDOWS = 2  # Dao's flash-attention, 2.3: blocks outside a sliding window are not computed


def flash_share(kernel: FlashKernel, newest: int | None) -> float:
    """Rate of a kernel over a device's table, measured with generation `newest`; 1 where that is unknown."""
    share = 1.0
    for generation in range(_GENERATION.get(kernel, newest or 0), newest or 0):
        share *= OF_THE_NEXT.get(generation, 1.0)
    return share


def ends_at_windows(kernel: FlashKernel, newest: int | None) -> bool:
    """Whether the kernel skips what a sliding window hides; False where the table's generation is unknown.

    PyTorch's own attention, which the runtime and its measurements use, treats a window as a dense mask.
    """
    return newest is not None and _GENERATION.get(kernel, newest) >= _WITH_WINDOWS
