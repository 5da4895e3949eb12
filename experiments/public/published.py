"""Published training runs as our rows: printed values, conventions for blanks, and measured times.

Source: `experiments/public/data`, whose README names the pages and their licences.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from workbench.llm_table.frameworks import filled, unscorable
from workbench.llm_table.row_interval import unsaid_of

FOLDER = Path(__file__).parent / "data"
FRAMEWORK = "framework"
PER_CENT = 100.0
TERA = 1e12


class Target(StrEnum):
    """The unit of a published number: seconds of an iteration, TFLOP/s a GPU, or MFU in per cent."""

    SECONDS = "measured_s"
    TFLOPS = "measured_tflops"
    MFU = "measured_mfu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published run.

    Args:
        data_set: its file, without the suffix.
        line: its line in the file.
        framework: whose conventions fill blanks.
        cells: the input of `workbench predict`, with blanks filled.
        target: the unit of the published number.
        measured: in the target's unit.
        unscorable: why nothing can price it; None: something can.
        unsaid: relevant columns that the page leaves blank, and how open a convention leaves them.
    """

    data_set: str
    line: int
    framework: str
    cells: Mapping[str, str]
    target: Target
    measured: float
    unscorable: str | None
    unsaid: Mapping[str, float]

    @property
    def model(self) -> str:
        return self.cells.get("model", "")

    def predicted(self, iteration_s: float) -> float:
        """The number that the page would print for such an iteration."""
        if self.target is Target.SECONDS:
            return iteration_s
        flop_per_s = counted_flop(self) / iteration_s / float(self.cells["gpus"])
        if self.target is Target.TFLOPS:
            return flop_per_s / TERA
        return PER_CENT * flop_per_s / PEAK_FLOP_PER_S[self.cells["gpu"]]

    @property
    def measured_s(self) -> float:
        """Seconds of an iteration behind what was printed."""
        return self.measured if self.target is Target.SECONDS else self.predicted(1.0) / self.measured

    def error(self, iteration_s: float) -> float:
        """Relative difference from the published number; above zero: predicted too slow."""
        ratio = self.predicted(iteration_s) / self.measured
        return ratio - 1 if self.target is Target.SECONDS else 1 - ratio


PEAK_FLOP_PER_S = {"A100-80GB": 312e12, "H100": 989e12}  # dense two-byte products, NVIDIA's data sheets


def counted_flop(row: Published) -> float:
    """FLOP of an iteration as the row's page counts them: a GPT's, with full scores.

    Source: Narayanan et al. 2021, section 5.1, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h) with full
    recomputation. Without it, forward and backward alone: three quarters of the blocks', and the head's.
    """
    batch, sequence, layers, hidden, vocab = (
        float(row.cells[name]) for name in ("global_batch", "sequence", "layers", "hidden", "vocab")
    )
    block = 24 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden))
    passes = 4 if row.framework == "Megatron-LM SC21" else 3  # that page counts the second forward
    return passes * block + 6 * batch * sequence * hidden * vocab


def published() -> tuple[Published, ...]:
    """Every row of every file, in the files' order; ValueError for a row without a measurement."""
    rows = []
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += [_row(path.stem, line, cells) for line, cells in enumerate(csv.DictReader(file), 2)]
    return tuple(rows)


def _row(data_set: str, line: int, printed: Mapping[str, str]) -> Published:
    target = next((target for target in Target if printed.get(target)), None)
    if target is None:
        raise ValueError(f"{data_set}.csv: line {line}: want one of {', '.join(Target)}, got none")
    return Published(
        data_set=data_set,
        line=line,
        framework=printed[FRAMEWORK],
        cells={name: value for name, value in filled(printed).items() if value},
        target=target,
        measured=float(printed[target]),
        unscorable=unscorable(printed),
        unsaid=unsaid_of(printed),
    )
