"""Formats of the products of linear layers: bytes of their operands, and the cost of casts."""

from dataclasses import dataclass
from enum import StrEnum

from workbench.cost.profile import Profile

WIDE_BYTES = 2  # bytes of an element before its cast, and of a product's result


class ProductFormat(StrEnum):
    """SAME: as weights. FP8: one scale a tensor. MXFP8: one for 32 elements. NVFP4: one for 16."""

    SAME = "same"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class Narrow:
    """A narrow format.

    Args:
        element_bytes: bytes of an element in memory, including its share of a scale.
        cast_bytes: bytes read and written to cast an element along its rows and along its columns, for the
            products of both passes.
        cast_rate: rate of the cast over that of other memory-bound kernels.
        rate_of_peaks: mean share of the ratio of peaks that products reach, where not measured.
    """

    element_bytes: float
    cast_bytes: float
    cast_rate: float
    rate_of_peaks: float


# A tensor's greatest value is sought in a pass of its own (FP8 with current scaling, NVFP4); blocks of MXFP8
# find theirs while they are cast. Transformer Engine's GEMM profiling tutorial (docs at 3329417; B300,
# 15,872 tokens of width 4,096) times products with casts and without: MXFP8 operands, 2 bytes read and 1
# written, take 0.30 ms for 656 million elements, 85 % of 8 TB/s; those of NVFP4 0.67 ms where their bytes
# take 0.44 (Hadamard transforms and stochastic rounding compute). There MXFP8 products run at 1.75 and NVFP4
# at 3.42 times bfloat16, of 2 and 4 by the peaks. stas00/ml-engineering, compute/accelerator, has FP8 at 1.77
# (H100), 1.83 (H200) and 1.97 (B200) times bfloat16, of 2.
NARROW = {
    ProductFormat.FP8: Narrow(1.0, 2 + 2 + 1 + 1, 1.0, 0.93),
    ProductFormat.MXFP8: Narrow(1 + 1 / 32, 2 + 2 * (1 + 1 / 32), 1.0, 0.875),
    ProductFormat.NVFP4: Narrow(0.5 + 1 / 16, 2 + 2 + 2 * (0.5 + 1 / 16), 0.65, 0.855),
}


def narrow_rate(profile: Profile, narrow: ProductFormat) -> float:
    """FLOP/s of products in a narrow format over those in the tables' precision.

    The profile's own value; else the ratio of the peaks times the share that products reach elsewhere.

    Raises:
        ValueError: the profile has no such rate and no such peak.
    """
    for known_rate in profile.narrow_rates:
        if known_rate.product_format == narrow:
            return known_rate.rate
    peaks = dict(profile.peak_flop_per_s)
    peak = peaks.get(narrow, peaks.get(ProductFormat.FP8) if narrow is ProductFormat.MXFP8 else None)
    if peak is None:
        known = sorted({*(known_rate.product_format for known_rate in profile.narrow_rates), *peaks})
        raise ValueError(f"profile {profile.name!r} has no products in {narrow}, only in: {', '.join(known)}")
    return max(1.0, NARROW[narrow].rate_of_peaks * peak / profile.peak(profile.table_precision))


def is_measured(profile: Profile, narrow: ProductFormat) -> bool:
    """Whether products in that format were measured on the device."""
    return any(each.product_format == narrow and each.measured for each in profile.narrow_rates)
