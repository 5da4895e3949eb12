"""A printed table as a declaration: which cells, how near, and what we compute for a row."""

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
        rel_tol: how near ours must be, or what says so of a cell as it is printed.
    """

    column: str
    unit: str
    rel_tol: float | Callable[[str], float]

    def number(self, key: str, printed: str, where: str) -> PaperNumber:
        tolerance = self.rel_tol if isinstance(self.rel_tol, float) else self.rel_tol(printed)
        return PaperNumber(key, float(printed), self.unit, where, tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of a printed table, each held against what `compute` makes of its row.

    Args:
        csv: name of the printed table.
        where: its name in print.
        key: of a row; the name of a cell follows it.
        cells: by name. Cells that are empty in print are passed over.
        compute: ours of a row, by the names of cells.
        unstated: what the paper leaves open, where `compute` gives more than one value.
        holds: rows that are compared; all by default.
    """

    csv: str
    where: str
    key: Callable[[PrintedRow], str]
    cells: Mapping[str, Cell]
    compute: Callable[[PrintedRow], Values]
    unstated: str = ""
    holds: Callable[[PrintedRow], bool] = lambda _: True

    def evidence(self) -> Evidence:
        """One row of the report for every cell."""
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
