"""A printed table as a declaration: its cells, their tolerances, and our computation for a row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import PrintedRow, printed_rows

# Cell -> ours: the likeliest, then those of other plausible settings, by their names.
Values = Mapping[str, Sequence[float] | Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A column of printed numbers.

    Args:
        column: of the CSV file.
        unit: of the numbers.
        rel_tol: relative tolerance, or a function that returns it for a cell as printed.
    """

    column: str
    unit: str
    rel_tol: float | Callable[[str], float]

    def number(self, key: str, printed: str, where: str) -> PaperNumber:
        tolerance = self.rel_tol if isinstance(self.rel_tol, float) else self.rel_tol(printed)
        return PaperNumber(key, float(printed), self.unit, where, tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of a printed table, each compared with what `compute` returns for its row.

    Args:
        csv: name of the printed table.
        where: its name in the paper.
        key: of a row; the cell's name is appended.
        cells: by name. Cells that are empty in print are skipped.
        compute: computes our values of a row, by cell name.
        unstated: what the paper leaves open, where `compute` gives more than one value.
        holds: selects the rows to compare; all by default.
    """

    csv: str
    where: str
    key: Callable[[PrintedRow], str]
    cells: Mapping[str, Cell]
    compute: Callable[[PrintedRow], Values]
    unstated: str = ""
    holds: Callable[[PrintedRow], bool] = lambda _: True

    def evidence(self) -> Evidence:
        """Return one row of the report per cell."""
        evidence = Evidence()
        for row in printed_rows(self.csv):
            filled = {name: cell for name, cell in self.cells.items() if row[cell.column]}
            if not filled or not self.holds(row):
                continue
            ours = self.compute(row)
            for name, cell in filled.items():
                number = cell.number(f"{self.key(row)}{name}", row[cell.column], self.where)
                values = ours[name]
                if len(values) == 1:
                    (only,) = values.values() if isinstance(values, Mapping) else values
                    evidence.add(number, only)
                else:
                    evidence.add_range(number, values, self.unstated)
        return evidence
