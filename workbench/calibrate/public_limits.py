"""Limits of the shipped devices besides their tables: power, launches, narrow formats, head widths."""

from collections.abc import Callable

from workbench.calibrate.data_sheet import HOPPER, DataSheet
from workbench.calibrate.tables import rounded
from workbench.cost.device_limits import LaunchTimes, NarrowRate, PowerLimit
from workbench.cost.interpolate import Surface
from workbench.cost.profile import ATTENTION_AXES, SustainedHeads, Table

BEST = "stas00/ml-engineering, compute/accelerator"
_SUSTAINED = "MooreThreads/SimuMax, configs/system/h100_nvlink.json @160921c, over this table"
# Fitted to rows of tp 1 and 2 in every ninth of vTrain's 1,440 (A100, Megatron-LM): an operator costs about
# three launches and the Python around them.
HOST_KERNEL_S, HOST_COLLECTIVE_S = 5.5e-5, 3e-5
# GPUs of one node differ by 5 % and more (stas00/ml-engineering, compute/accelerator): the extremes of eight
# normal draws are 2.85 standard deviations apart on average.
CLOCK_SPREAD = 0.0175
# Gray 2019, "Getting Started with CUDA Graphs" (NVIDIA technical blog): kernels of 2.9 us follow one another
# every 3.8 us if the host launches them ahead, every 3.4 us in a graph.
LAUNCH = LaunchTimes(
    kernel_gap_s=0.9e-6,
    graph_gap_s=0.5e-6,
    host_kernel_s=HOST_KERNEL_S,
    host_collective_s=HOST_COLLECTIVE_S,
    source="gaps: NVIDIA technical blog on CUDA graphs; host: fitted to VIA-Research/vTrain @f8dda84",
)


def power_limit(sheet: DataSheet) -> PowerLimit:
    """The data sheet's power limit, with published shares that training sustains under it."""
    return PowerLimit(
        rated_w=sheet.sheet.power_w,
        source=f"NVIDIA {sheet.device} data sheet",
        sustained_products=sheet.sustained_products,
        sustained_source=_SUSTAINED if sheet.sustained_products < 1 else "",
        clock_spread=CLOCK_SPREAD,
    )


def narrow_rates(sheet: DataSheet) -> tuple[NarrowRate, ...]:
    """Rate of FP8 over bfloat16, from the best shape of each."""
    best = sheet.sheet.reached_bfloat16_flop_per_s
    if sheet.best_fp8_tflop_per_s is None or best is None:
        return ()
    rate = rounded(sheet.best_fp8_tflop_per_s * 1e12 / best)
    return (NarrowRate(product_format="fp8", rate=rate, measured=True, source=BEST),)


def attention_heads(sheet: DataSheet, attention: Table, backward_rate: float) -> tuple[SustainedHeads, ...]:
    """Rates by head width: published for Hopper, else derived from the table."""
    if sheet in HOPPER:
        return flash3_heads()
    surface = Surface(attention.points)
    return flash2_heads(lambda *at: surface.read(*at).rate, backward_rate)


TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_FORWARD = {  # TFLOP/s without a mask, by head width
    64: (333, 392, 460, 476, 496, 497),
    128: (467, 565, 625, 638, 646, 648),
    256: (482, 639, 707, 736, 746, 756),
}
_CAUSAL = {128: (292, 423, 521, 579, 602, 616), 256: (286, 427, 537, 612, 628, 642)}
_BACKWARD = {64: (272, 363, 422), 128: (316, 424, 501, 542, 559, 561)}
# FlashAttention-2 in the same figures, with a mask, width 64 over 128: 324 over 370 TFLOP/s.
NARROW_HEADS = 324 / 370
_FLASH3 = "Shah et al. 2024 (FlashAttention-3), figures 5 and 6"
_FLASH2 = "this table at width 128; 64 over 128 and backward over forward as of FlashAttention-2 (Dao 2023)"


def flash3_heads() -> tuple[SustainedHeads, ...]:
    """Rates of Hopper for widths 64, 128 and 256, with and without a causal mask."""
    heads = []
    for width in (64, 128, 256):
        for causal in (False, True):
            forward = tuple(_forward(width, index, causal=causal) for index in range(len(LENGTHS)))
            backward = tuple(rate * _backward_ratio(width, index) for index, rate in enumerate(forward))
            measured = not causal and width == 128
            heads.append(_heads(width, causal, (forward, backward), _FLASH3, measured))
    return tuple(heads)


def flash2_heads(
    flop_per_s: Callable[[float, float, float], float], backward_rate: float
) -> tuple[SustainedHeads, ...]:
    """Rates of Ampere and Ada for widths 64 and 128 with a causal mask, from a table at width 128."""
    heads = []
    for width, share in ((64, NARROW_HEADS), (128, 1.0)):
        forward = tuple(share * flop_per_s(*_at(length, width)) / 1e12 for length in LENGTHS)
        backward = tuple(rate * backward_rate for rate in forward)
        heads.append(_heads(width, True, (forward, backward), _FLASH2, False))  # noqa: FBT003
    return tuple(heads)


def _forward(width: int, index: int, *, causal: bool) -> float:
    if not causal:
        return _FORWARD[width][index]
    if width in _CAUSAL:
        return _CAUSAL[width][index]
    return _CAUSAL[128][index] * _FORWARD[width][index] / _FORWARD[128][index]


def _backward_ratio(width: int, index: int) -> float:
    known = _BACKWARD.get(width, _BACKWARD[128])
    nearest = min(index, len(known) - 1)
    return known[nearest] / _FORWARD[width if width in _BACKWARD else 128][nearest]


def _at(length: int, width: int) -> tuple[float, float, float]:
    return float(length), WIDTH / width * TOKENS / length, 1.0


def _heads(
    width: int,
    causal: bool,  # noqa: FBT001
    rates: tuple[tuple[float, ...], tuple[float, ...]],
    source: str,
    measured: bool,  # noqa: FBT001
) -> SustainedHeads:
    tables = [
        Table(
            axes=ATTENTION_AXES,
            points=tuple(
                (*_at(length, width), rounded(rate * 1e12))
                for length, rate in zip(LENGTHS, direction, strict=True)
            ),
            measured=measured,
            source=source,
        )
        for direction in rates
    ]
    return SustainedHeads(head_dim=width, causal=causal, forward=tables[0], backward=tables[1])
