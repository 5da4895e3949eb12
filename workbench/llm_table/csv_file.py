"""Tables of language models as CSV files: read row by row, written with what was predicted of each."""

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
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for the beginning of one
FIRST_LINE = 2  # of a file's rows, behind the header


@dataclass(frozen=True, slots=True)
class CsvTable:
    """The header and the cells of every row, as they stand in a file."""

    path: Path
    header: tuple[str, ...]
    cells: tuple[dict[str, str], ...]

    def where(self, index: int) -> str:
        """The row's place in the file."""
        return f"{self.path}: line {index + FIRST_LINE}"

    def with_predictions(self, outcomes: Sequence[Prediction | str]) -> str:
        """The file's text with the columns that are predicted; a row that has an error has that alone."""
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


def cells_of(found: Prediction) -> Mapping[str, str]:
    """What `OUTPUTS` say of one row."""
    shares = {f"share_{name}": f"{share:.4f}" for name, share in found.parts.shares().items()}
    return {
        "predicted_s": repr(found.iteration_s),
        "predicted_low_s": repr(found.interval.low_s),
        "predicted_high_s": repr(found.interval.high_s),
        "tokens_per_s_per_gpu": f"{found.tokens_per_s_per_gpu:.6g}",
        "mfu": f"{found.mfu:.4f}",
        "predicted_bytes": str(found.peak_bytes),
        "fits": "yes" if found.spare_bytes >= 0 else "no",
        "spare_bytes": str(found.spare_bytes),
        **shares,
        "unmeasured": SEPARATOR.join(found.unmeasured),
    }


def inert(cell: str) -> str:
    """A cell that a spreadsheet shows instead of running it: a text that begins like a formula gets a quote.

    Numbers stay numbers, negative ones too.
    """
    if not cell.startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def read_table(path: Path) -> CsvTable:
    """The cells of a file; ValueError where it is no CSV, or its header or a row's width is not right."""
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
