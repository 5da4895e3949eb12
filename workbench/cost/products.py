"""Formats of the products of linear layers: bytes of their operands, and the cost of casts."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from workbench.cost.profile import Profile
from workbench.model.experts import ROUTER
from workbench.model.layer import Layer, LayerKind, Matmul, Operator

BFLOAT16_BYTES = 2  # of an element before its cast, and of a product's result


class ProductFormat(StrEnum):
    """SAME: as weights. FP8: one scale a tensor, from the tensor itself. MXFP8: one for 32 elements. NVFP4:
    one for 16.

    FP8_DELAYED: the scale is that of earlier steps. FP8_ROW: one scale along each sum of a product, a row of
    one operand and a column of the other (torchao). FP8_BLOCK: one for 128 elements of an activation and for
    128 x 128 of a weight (DeepSeek-V3).
    """

    SAME = "same"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    FP8_DELAYED = "fp8_delayed"
    FP8_ROW = "fp8_row"
    FP8_BLOCK = "fp8_block"


@dataclass(frozen=True, slots=True)
class Narrow:
    """A narrow format.

    Args:
        element_bytes: bytes of an element in memory, including its share of a scale.
        cast_bytes: bytes read and written to cast an element of an input in the forward, and of a result's
            gradient in the backward; along its rows and along its columns, unless `later_cast_bytes`.
        cast_rate: rate of the cast over that of other memory-bound kernels.
        rate_of_peaks: mean share of the ratio of peaks that products reach, where not measured.
        later_cast_bytes: of an element of both that is cast again for the weights' gradient.
        weight_cast_bytes: of an element of a weight in the forward and for the input's gradient. 0: weights
            are cast once a step, for all microbatches.
        kernels: of casts that are launched in a forward and in a backward; 0: not counted.
        rated_as: whose rate products take; None: its own.
        is_rate_measured: whether that rate is of the same kernels.
        keeps_wide: whether inputs are kept for the backward as they are before their cast.
    """

    element_bytes: float
    cast_bytes: float
    cast_rate: float
    rate_of_peaks: float
    later_cast_bytes: float = 0.0
    weight_cast_bytes: tuple[float, float] = (0.0, 0.0)
    kernels: tuple[int, int] = (0, 0)
    rated_as: ProductFormat | None = None
    is_rate_measured: bool = True
    keeps_wide: bool = False


# A tensor's greatest value is sought in a pass of its own (FP8 with current scaling, NVFP4); blocks of MXFP8
# find theirs while they are cast. Transformer Engine's GEMM profiling tutorial (docs at 3329417; B300,
# 15,872 tokens of width 4,096) times products with casts and without: MXFP8 operands, 2 bytes read and 1
# written, take 0.30 ms for 656 million elements, 85 % of 8 TB/s; those of NVFP4 0.67 ms where their bytes
# take 0.44 (Hadamard transforms and stochastic rounding compute). There MXFP8 products run at 1.75 and NVFP4
# at 3.42 times bfloat16, of 2 and 4 by the peaks. stas00/ml-engineering, compute/accelerator, has FP8 at 1.77
# (H100), 1.83 (H200) and 1.97 (B200) times bfloat16, of 2.
#
# A delayed scale needs no pass for the greatest value: 2 bytes read, 1 written in each layout. A scale a row:
# torchao (BSD-3-Clause), float8_linear.py, casts input, gradient and weight anew for either product that
# reads them, and keeps what they were cast from. Along a row one kernel reads 2 bytes and writes 1; the
# greatest value of a column is known only after all rows, which no cache holds, so another kernel reads 2
# bytes first.
# torchao's own roofline counts that read once. A scale a block: Transformer Engine's Float8BlockScaling casts
# in one kernel into both layouts, with 4 bytes of scale for 128 elements, and weights once a step.
ROW_BYTES, COLUMN_BYTES = 2 + 1, 2 + 2 + 1
BLOCK_BYTES = 1 + 4 / 128
NARROW = {
    ProductFormat.FP8: Narrow(1.0, 2 + 2 + 1 + 1, 1.0, 0.93),
    ProductFormat.FP8_DELAYED: Narrow(1.0, 2 + 1 + 1, 1.0, 0.93, rated_as=ProductFormat.FP8),
    ProductFormat.FP8_ROW: Narrow(
        1.0,
        ROW_BYTES,
        1.0,
        0.93,
        later_cast_bytes=COLUMN_BYTES,
        weight_cast_bytes=(ROW_BYTES, COLUMN_BYTES),
        kernels=(1 + 1, 1 + 2 + 2 + 2),  # input, weight; gradient, weight, gradient, input
        rated_as=ProductFormat.FP8,
        is_rate_measured=False,
        keeps_wide=True,
    ),
    ProductFormat.FP8_BLOCK: Narrow(
        BLOCK_BYTES,
        2 + 2 * BLOCK_BYTES,
        1.0,
        0.93,
        kernels=(1, 1),
        rated_as=ProductFormat.FP8,
        is_rate_measured=False,
    ),
    ProductFormat.MXFP8: Narrow(1 + 1 / 32, 2 + 2 * (1 + 1 / 32), 1.0, 0.875),
    ProductFormat.NVFP4: Narrow(0.5 + 1 / 16, 2 + 2 + 2 * (0.5 + 1 / 16), 0.65, 0.855),
}


def is_narrowed(layer: Layer, operator: Operator) -> bool:
    """Whether narrow formats apply to an operator: to products of blocks, but not to routers."""
    return isinstance(operator, Matmul) and layer.kind is LayerKind.BLOCK and operator.name != ROUTER


def known_rate(profile: Profile, narrow: ProductFormat) -> float | None:
    """FLOP/s of products in a narrow format over those in the tables' precision; None: not known.

    The profile's own value; else the ratio of the peaks times the share that products reach elsewhere.
    """
    rated, peaks = rated_format(narrow), dict(profile.peak_flop_per_s)
    for own in profile.narrow_rates:
        if own.product_format == rated:
            return own.rate
    if rated not in peaks:
        return None
    return max(1.0, NARROW[rated].rate_of_peaks * peaks[rated] / profile.peak(profile.table_precision))


def narrow_rate(profile: Profile, narrow: ProductFormat) -> float:
    """`known_rate` of a device that has one; ValueError for one without such a rate and such a peak."""
    rate = known_rate(profile, narrow)
    if rate is None:
        known = sorted(
            {*(own.product_format for own in profile.narrow_rates), *dict(profile.peak_flop_per_s)}
        )
        nearest = ProductFormat.FP8 if ProductFormat.FP8 in known else ProductFormat.SAME
        raise ValueError(
            f"profile {profile.name!r} has no products in {narrow}, only in: {', '.join(known)}; "
            f"nearest: {nearest}"
        )
    return rate


class CastKernels(NamedTuple):
    """Kernels of casts that are launched in each pass."""

    forward: int
    backward: int


def cast_kernels(formats: Iterable[ProductFormat]) -> CastKernels:
    """Kernels around products in these formats."""
    known = [NARROW[narrow].kernels for narrow in formats if narrow is not ProductFormat.SAME]
    return CastKernels(sum(forward for forward, _ in known), sum(backward for _, backward in known))


def rated_format(narrow: ProductFormat) -> ProductFormat:
    """The format whose rate products in that format take."""
    return NARROW[narrow].rated_as or narrow


def is_measured(profile: Profile, narrow: ProductFormat) -> bool:
    """Whether products in that format were measured on the device."""
    known = (rate for rate in profile.narrow_rates if rate.product_format == rated_format(narrow))
    return NARROW[narrow].is_rate_measured and any(rate.measured for rate in known)
