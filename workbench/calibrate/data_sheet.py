"""Devices whose kernels somebody measured and published: their data sheets, and their names in the tables."""

from dataclasses import dataclass

from workbench.calibrate.device_sheet import DeviceSheet, shipped_sheet
from workbench.units import GB

_TFLOP = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """What the maker says about one machine, and under which names the tables know it.

    What memory is said to have is decimal and a little less than the device offers: what is left holds the
    context and communication buffers, which no memory table counts.
    """

    sheet: DeviceSheet
    aiconfigurator: str | None
    vidur: str | None

    @property
    def name(self) -> str:
        return self.sheet.device

    @property
    def device(self) -> str:
        return self.sheet.device

    @property
    def memory_gb(self) -> float:
        return self.sheet.memory_bytes / GB

    @property
    def bandwidth_gb_per_s(self) -> float:
        return self.sheet.memory_bytes_per_s / GB

    @property
    def bfloat16_tflop_per_s(self) -> float:
        return self.sheet.bfloat16_flop_per_s / _TFLOP

    @property
    def float32_tflop_per_s(self) -> float:
        return self.sheet.float32_flop_per_s / _TFLOP

    @property
    def float64_tflop_per_s(self) -> float:
        return (self.sheet.float64_flop_per_s or self.sheet.float32_flop_per_s) / _TFLOP

    @property
    def inter_gb_per_s(self) -> float:
        return self.sheet.card_bytes_per_s / GB


A40 = DataSheet(sheet=shipped_sheet("A40"), aiconfigurator=None, vidur="a40")
A100 = DataSheet(sheet=shipped_sheet("A100-80GB"), aiconfigurator="A100-SXM-80GB", vidur="a100")
H100 = DataSheet(sheet=shipped_sheet("H100"), aiconfigurator="H100-SXM", vidur="h100")
H200 = DataSheet(sheet=shipped_sheet("H200"), aiconfigurator="H200-SXM", vidur=None)
L20 = DataSheet(sheet=shipped_sheet("L20"), aiconfigurator=None, vidur=None)
SHEETS = (A40, A100, H100, H200, L20)
