"""Speed of predicting rows of language models: on one core, every row a different plan.

Setup:   the ten models of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
         Clusters Using Megatron-LM", SC, table 1 (up to 64 stages and 512 microbatches a replica), and
         eleven of the sizes that Megatron-Core's README reports on H100s, with virtual stages and small
         degrees of data parallelism of our choice. And one of 64 stages and 3,072 microbatches.
Ours:    CPU seconds of the one thread, from a row to its time and bytes; two rows run first, untimed, to
         compile the sweep's loop and read the profiles. No two rows have the same plan.
Run:     python -m experiments.bench.sim_speed --json
"""

import time
from dataclasses import dataclass
from statistics import median

from sim.predict import iteration_s
from workbench.llm_table.columns import read_row
from workbench.llm_table.predict import RowPredictor

# hidden, layers, heads, tp, pp, virtual stages, dp, micro-batch, batch
SC21 = (
    (2304, 24, 24, 1, 1, 1, 32, 16, 512),
    (3072, 30, 32, 2, 1, 1, 32, 16, 512),
    (4096, 36, 32, 4, 1, 1, 32, 16, 512),
    (6144, 40, 48, 8, 1, 1, 32, 8, 1024),
    (8192, 48, 64, 8, 2, 1, 32, 4, 1536),
    (10240, 60, 80, 8, 4, 3, 32, 2, 1792),
    (12288, 80, 96, 8, 8, 2, 24, 2, 2304),
    (16384, 96, 128, 8, 16, 2, 15, 1, 2160),
    (20480, 105, 128, 8, 35, 3, 9, 1, 2520),
    (25600, 128, 160, 8, 64, 1, 6, 1, 3072),
)
H100 = (
    (2048, 24, 16, 1, 1, 1, 48, 1, 192),
    (4096, 30, 32, 2, 1, 1, 48, 1, 192),
    (6144, 32, 48, 4, 1, 1, 48, 1, 192),
    (7168, 48, 56, 8, 1, 1, 48, 1, 192),
    (8192, 84, 64, 8, 2, 7, 48, 1, 384),
    (10240, 92, 80, 8, 4, 1, 48, 1, 768),
    (12288, 96, 96, 8, 6, 4, 48, 1, 1152),
    (16384, 96, 128, 8, 8, 4, 48, 1, 1536),
    (18432, 112, 144, 8, 16, 7, 48, 1, 3072),
    (12288, 96, 96, 8, 6, 1, 2, 1, 1152),
    (12288, 96, 96, 8, 12, 2, 1, 1, 1152),
)
LONGEST = (25600, 128, 160, 8, 64, 1, 1, 1, 3072)
SIZES = ("hidden", "layers", "heads", "tp", "pp", "virtual_stages", "dp", "micro_batch", "global_batch")
OF_SC21 = {
    "sequence": 2048,
    "vocab": 51200,
    "gpu": "A100-80GB",
    "attention": "stored",
    "recompute": "full",
    "precision": "fp16",
}
OF_H100 = {"sequence": 4096, "vocab": 131072, "gpu": "H100"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTime:
    """Time to predict one row."""

    name: str
    num_passes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RowRates:
    """Rates over all rows."""

    rows: tuple[RowTime, ...]

    @property
    def rows_per_s(self) -> float:
        return len(self.rows) / sum(row.seconds for row in self.rows)

    @property
    def row_median_s(self) -> float:
        return median(row.seconds for row in self.rows)

    @property
    def row_worst_s(self) -> float:
        return max(row.seconds for row in self.rows)


def row_rates() -> RowRates:
    """Predict every row once."""
    cells = [
        dict(zip(SIZES, sizes, strict=True)) | rest
        for table, rest in (((*SC21, LONGEST), OF_SC21), (H100, OF_H100))
        for sizes in table
    ]
    predictor = RowPredictor(iteration_s)
    return RowRates(tuple(_timed(predictor, cell) for cell in (cells[0], cells[-1], *cells))[2:])


def _timed(predictor: RowPredictor, cells: dict[str, object]) -> RowTime:
    row = read_row({name: str(value) for name, value in cells.items()})
    started = time.process_time()
    predictor.predict(row)
    return RowTime(
        name=f"tp {row.tp}, pp {row.pp} x {row.virtual_stages}, {row.num_microbatches} microbatches",
        num_passes=2 * row.pp * row.virtual_stages * row.num_microbatches,
        seconds=time.process_time() - started,
    )
