"""What bounds the shipped devices besides their tables: power, launches, narrow formats, head widths."""

from workbench.calibrate.data_sheet import HOPPER, DataSheet
from workbench.calibrate.flash_tables import flash2_heads, flash3_heads
from workbench.cost.device_limits import LaunchTimes, NarrowRate, PowerLimit
from workbench.cost.interpolate import Surface
from workbench.cost.profile import SustainedHeads, Table

BEST = "stas00/ml-engineering, compute/accelerator"
_SUSTAINED = "MooreThreads/SimuMax, configs/system/h100_nvlink.json @160921c, over this table"
# Fitted to rows of tp 1 and 2 in every ninth of vTrain's 1,440 (A100, Megatron-LM): an operator is about
# three launches and the Python around them.
HOST_KERNEL_S, HOST_COLLECTIVE_S = 5.5e-5, 3e-5
# GPUs of one node differ by 5 % and more (stas00/ml-engineering, compute/accelerator): of eight normal draws
# the first and the last are 2.85 standard deviations apart in the mean.
CLOCK_SPREAD = 0.0175
# Gray 2019, "Getting Started with CUDA Graphs" (NVIDIA technical blog): kernels of 2.9 us follow one another
# every 3.8 us where the host launches them ahead, every 3.4 us in a graph.
LAUNCH = LaunchTimes(
    kernel_gap_s=0.9e-6,
    graph_gap_s=0.5e-6,
    host_kernel_s=HOST_KERNEL_S,
    host_collective_s=HOST_COLLECTIVE_S,
    source="gaps: NVIDIA technical blog on CUDA graphs; host: fitted to VIA-Research/vTrain @f8dda84",
)


def power_limit(sheet: DataSheet) -> PowerLimit:
    """By data sheet; what training sustains under it is what others found."""
    return PowerLimit(
        rated_w=sheet.power_w,
        source=f"NVIDIA {sheet.name} data sheet",
        sustained_products=sheet.sustained_products,
        sustained_source=_SUSTAINED if sheet.sustained_products < 1 else "",
        clock_spread=CLOCK_SPREAD,
    )


def narrow_rates(sheet: DataSheet) -> tuple[NarrowRate, ...]:
    """FP8 over bfloat16: the best shape of each."""
    if sheet.best_fp8_tflop_per_s is None or sheet.best_product_tflop_per_s is None:
        return ()
    rate = sheet.best_fp8_tflop_per_s / sheet.best_product_tflop_per_s
    return (NarrowRate(product_format="fp8", rate=float(f"{rate:.4g}"), measured=True, source=BEST),)


def attention_heads(sheet: DataSheet, attention: Table, backward_rate: float) -> tuple[SustainedHeads, ...]:
    """By head width: published for Hopper, else the table at other widths."""
    if sheet in HOPPER:
        return flash3_heads()
    surface = Surface(attention.points)
    return flash2_heads(lambda *at: surface.read(*at).rate, backward_rate)
