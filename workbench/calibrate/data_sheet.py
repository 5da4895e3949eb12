"""Devices whose kernels were measured and published: their data sheets, and their names in the tables."""

from dataclasses import dataclass

from workbench.calibrate.device_sheet import DeviceSheet, shipped_sheet

# Products reach 70 % of the peak on average over training's shapes (MooreThreads/SimuMax, configs/system/
# h100_nvlink.json @160921c), while the table's, from short loops, have a median of 781 of 989 TFLOP/s.
SUSTAINED_HOPPER = 0.886


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """The data sheet of one machine, and its names in the tables.

    Stated memory is decimal and a little less than the device offers: the difference holds the context and
    communication buffers, which no memory table counts.

    Args:
        sustained_products: what training sustains, as a share of the table's products.
        best_fp8_tflop_per_s: the fastest FP8 product of any shape; None: not measured.
    """

    sheet: DeviceSheet
    aiconfigurator: str | None
    vidur: str | None
    sustained_products: float = 1.0
    best_fp8_tflop_per_s: float | None = None

    @property
    def device(self) -> str:
        return self.sheet.device


A40 = DataSheet(sheet=shipped_sheet("A40"), aiconfigurator=None, vidur="a40")
A100 = DataSheet(sheet=shipped_sheet("A100-80GB"), aiconfigurator="A100-SXM-80GB", vidur="a100")
H100 = DataSheet(
    sheet=shipped_sheet("H100"),
    aiconfigurator="H100-SXM",
    vidur="h100",
    sustained_products=SUSTAINED_HOPPER,
    best_fp8_tflop_per_s=1402.6,
)
H200 = DataSheet(
    sheet=shipped_sheet("H200"),
    aiconfigurator="H200-SXM",
    vidur=None,
    sustained_products=SUSTAINED_HOPPER,
    best_fp8_tflop_per_s=1453.4,
)
L20 = DataSheet(sheet=shipped_sheet("L20"), aiconfigurator=None, vidur=None)
SHEETS = (A40, A100, H100, H200, L20)
HOPPER = (H100, H200)
