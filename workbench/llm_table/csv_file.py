"""Tables of language models as CSV files: read with every bad row named, written with what was predicted."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.bounded_file import read_bounded
from workbench.llm_table.columns import OUTPUTS, check_header, read_row
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import Prediction

MOST_ROWS = 1_000_000
SEPARATOR = " | "  # between unmeasured costs
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for the beginning of one


@dataclass(frozen=True, slots=True)
class CsvTable:
    """The header and the cells of every row, as they stand in a file."""

    path: Path
    header: tuple[str, ...]
    cells: tuple[dict[str, str], ...]

    def rows(self, tell: Callable[[str], None]) -> list[LlmRow]:
        """Every row.

        Args:
            tell: called with a line about each bad row but the last, which is the error's.

        Raises:
            ValueError: the last bad row.
        """
        found, bad = [], []
        for number, row in enumerate(self.cells, start=2):
            try:
                found.append(read_row(row))
            except ValueError as error:
                bad.append(f"{self.path}: line {number}: {error}")
        if not bad:
            return found
        for line in bad[:-1]:
            tell(line)
        raise ValueError(f"{bad[-1]} ({len(bad)} of {len(self.cells)} rows are bad, nothing was written)")

    def with_predictions(self, predictions: Sequence[Prediction]) -> str:
        """The file's text with the columns that are predicted, one prediction a row."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*map(inert, self.header), *OUTPUTS])
        for row, found in zip(self.cells, predictions, strict=True):
            added = (repr(found.iteration_s), found.peak_bytes, SEPARATOR.join(found.unmeasured))
            writer.writerow([*(inert(row[name]) for name in self.header), *added])
        return out.getvalue()


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
    try:
        text = read_bounded(path, encoding="utf-8-sig")
        lines = [line for line in csv.reader(io.StringIO(text), strict=True) if any(map(str.strip, line))]
    except (UnicodeDecodeError, csv.Error) as error:
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
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            raise ValueError(f"{path}: line {number}: want {len(header)} cells, got {len(line)}")
    cells = tuple(dict(zip(header, line, strict=True)) for line in lines[1:])
    return CsvTable(path, tuple(header), cells)
