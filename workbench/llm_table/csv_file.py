"""CSV files of language models: read row by row, written with the predictions."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.bounded_file import read_bounded
from workbench.llm_table.columns import OUTPUTS, check_header
from workbench.llm_table.predict import Prediction

MOST_ROWS = 1_000_000
SEPARATOR = " | "  # between unmeasured costs
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # starts of cells that a spreadsheet evaluates
FIRST_LINE = 2  # line of a file's first row, after the header


@dataclass(frozen=True, slots=True)
class CsvTable:
    """The header and all cells of a file."""

    path: Path
    header: tuple[str, ...]
    cells: tuple[dict[str, str], ...]

    def where(self, index: int) -> str:
        """Location of a row in the file."""
        return f"{self.path}: line {index + FIRST_LINE}"

    def with_predictions(self, outcomes: Sequence[Prediction | str]) -> str:
        """The file's text with the predicted columns added; a failed row gets its error alone."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*map(inert, self.header), *OUTPUTS])
        for row, outcome in zip(self.cells, outcomes, strict=True):
            added = {"error": outcome} if isinstance(outcome, str) else cells_of(outcome)
            writer.writerow(
                [
                    *(inert(row[name]) for name in self.header),
                    *(inert(added.get(name, "")) for name in OUTPUTS),
                ]
            )
        return out.getvalue()


def cells_of(prediction: Prediction) -> Mapping[str, str]:
    """The `OUTPUTS` cells of one prediction."""
    shares = {f"share_{name}": f"{share:z.4f}" for name, share in prediction.parts.shares().items()}
    return {
        "predicted_s": repr(prediction.iteration_s),
        "predicted_low_s": repr(prediction.interval.low_s),
        "predicted_high_s": repr(prediction.interval.high_s),
        "tokens_per_s_per_gpu": f"{prediction.tokens_per_s_per_gpu:.6g}",
        "mfu": f"{prediction.mfu:.4f}",
        "predicted_bytes": str(prediction.peak_bytes),
        "fits": "yes" if prediction.spare_bytes >= 0 else "no",
        "spare_bytes": str(prediction.spare_bytes),
        **shares,
        "unmeasured": SEPARATOR.join(prediction.unmeasured),
    }


def inert(cell: str) -> str:
    """Quote a text cell that a spreadsheet would evaluate as a formula.

    Numbers, negative ones included, are unchanged.
    """
    if not cell.startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def read_table(path: Path) -> CsvTable:
    """Read a file; ValueError unless it is a CSV with a valid header and rows of equal width."""
    text = read_bounded(path, encoding="utf-8-sig")
    try:
        lines = [line for line in csv.reader(io.StringIO(text), strict=True) if any(map(str.strip, line))]
    except csv.Error as error:
        raise ValueError(f"{path}: want a CSV file in UTF-8: {error}") from error
    if len(lines) < 2:
        raise ValueError(f"{path}: want a header and at least one row, got {len(lines)} lines")
    if len(lines) > MOST_ROWS + 1:
        raise ValueError(f"{path}: want at most {MOST_ROWS:,} rows, got {len(lines) - 1:,}")
    header = [name.strip() for name in lines[0]]
    try:
        check_header(header)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for number, line in enumerate(lines[1:], start=FIRST_LINE):
        if len(line) != len(header):
            raise ValueError(f"{path}: line {number}: want {len(header)} cells, got {len(line)}")
    cells = tuple(dict(zip(header, line, strict=True)) for line in lines[1:])
    return CsvTable(path, tuple(header), cells)
