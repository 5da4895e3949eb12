"""What makers say about A40, A100-80GB, H100, H200 and L20, for what nobody measured."""

from dataclasses import dataclass

# Products at 70 % of the peak in the mean over training's shapes (MooreThreads/SimuMax, configs/system/
# h100_nvlink.json @160921c), where the table's, short loops, have 781 TFLOP/s of 989 in the median.
SUSTAINED_HOPPER = 0.886


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """What the maker says about one machine, and under which names the tables know it.

    `memory_gb` is decimal and a little less than the device offers: what is left holds the
    context and communication buffers, which no memory table counts. `best_*` are the best products of any
    shape on random numbers, means of 100 after 50, as stas00/ml-engineering found them
    (compute/accelerator, "Maximum Achievable Matmul FLOPS"); None: not tried.
    """

    name: str
    device: str
    memory_gb: float
    bandwidth_gb_per_s: float
    bfloat16_tflop_per_s: float
    float32_tflop_per_s: float
    float64_tflop_per_s: float
    aiconfigurator: str | None
    vidur: str | None
    inter_gb_per_s: float
    power_w: float
    sustained_products: float = 1.0
    fp8_tflop_per_s: float | None = None
    best_product_tflop_per_s: float | None = None
    best_fp8_tflop_per_s: float | None = None

    @property
    def peaks(self) -> tuple[tuple[str, float], ...]:
        """(precision, dense TFLOP/s) of what the sheet lists."""
        narrow = () if self.fp8_tflop_per_s is None else (("fp8", self.fp8_tflop_per_s),)
        return (
            ("bfloat16", self.bfloat16_tflop_per_s),
            ("float32", self.float32_tflop_per_s),
            ("float64", self.float64_tflop_per_s),
            *narrow,
        )


A40 = DataSheet(
    name="A40",
    device="A40",
    memory_gb=48,
    bandwidth_gb_per_s=696,
    bfloat16_tflop_per_s=149.7,
    float32_tflop_per_s=37.4,
    float64_tflop_per_s=0.585,
    aiconfigurator=None,
    vidur="a40",
    inter_gb_per_s=25,
    power_w=300,
)
A100 = DataSheet(
    name="A100-80GB",
    device="A100-80GB",
    memory_gb=80,
    bandwidth_gb_per_s=2039,
    bfloat16_tflop_per_s=312,
    float32_tflop_per_s=19.5,
    float64_tflop_per_s=9.7,
    aiconfigurator="A100-SXM-80GB",
    vidur="a100",
    inter_gb_per_s=25,
    power_w=400,
    best_product_tflop_per_s=271.2,
)
H100 = DataSheet(
    name="H100",
    device="H100",
    memory_gb=80,
    bandwidth_gb_per_s=3350,
    bfloat16_tflop_per_s=989,
    float32_tflop_per_s=66.9,
    float64_tflop_per_s=33.5,
    aiconfigurator="H100-SXM",
    vidur="h100",
    inter_gb_per_s=50,
    power_w=700,
    sustained_products=SUSTAINED_HOPPER,
    fp8_tflop_per_s=1979,
    best_product_tflop_per_s=794.5,
    best_fp8_tflop_per_s=1402.6,
)
H200 = DataSheet(
    name="H200",
    device="H200",
    memory_gb=141,
    bandwidth_gb_per_s=4800,
    bfloat16_tflop_per_s=989,
    float32_tflop_per_s=66.9,
    float64_tflop_per_s=33.5,
    aiconfigurator="H200-SXM",
    vidur=None,
    inter_gb_per_s=50,
    power_w=700,
    sustained_products=SUSTAINED_HOPPER,
    fp8_tflop_per_s=1979,
    best_product_tflop_per_s=794.5,
    best_fp8_tflop_per_s=1453.4,
)
L20 = DataSheet(
    name="L20",
    device="L20",
    memory_gb=48,
    bandwidth_gb_per_s=864,
    bfloat16_tflop_per_s=119.5,
    float32_tflop_per_s=59.35,
    float64_tflop_per_s=0.93,
    aiconfigurator=None,
    vidur=None,
    inter_gb_per_s=25,
    power_w=275,
    fp8_tflop_per_s=239,
)
SHEETS = (A40, A100, H100, H200, L20)
HOPPER = (H100, H200)
