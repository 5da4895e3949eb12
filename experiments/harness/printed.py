"""The papers' printed numbers, read from `experiments/reference/*.csv`."""

import csv
from collections.abc import Mapping
from pathlib import Path

REFERENCE = Path(__file__).parents[1] / "reference"

CLAIMS = {
    "cs_": "cornstarch_claims",
    "dt_": "disttrain_claims",
    "ob_": "oobleck_claims",
}  # how ids begin -> table

PrintedRow = Mapping[str, str]


def printed_rows(name: str) -> tuple[PrintedRow, ...]:
    """Rows of a table in printed order, cells as text.

    Raises:
        ValueError: no such table, or a row with more cells than the header.
    """
    path = REFERENCE / f"{name}.csv"
    if not path.is_file():
        known = ", ".join(sorted(table_path.stem for table_path in REFERENCE.glob("*.csv")))
        raise ValueError(f"no printed table {name!r}: the tables are {known}")
    with path.open(encoding="utf-8", newline="") as file:
        rows = tuple(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path.name} line {number}: cells and header differ in number")
    return rows


def rows_that_print(quantity: str) -> tuple[PrintedRow, ...]:
    """Rows of all tables with a column of that name; ValueError where none has it."""
    tables = [printed_rows(path.stem) for path in sorted(REFERENCE.glob("*.csv"))]
    matching = tuple(row for rows in tables for row in rows if quantity in row)
    if not matching:
        raise ValueError(f"no printed table has a column {quantity!r}")
    return matching


def claim_value(claim_id: str) -> float:
    """The number of a claim made in prose; ValueError for an unknown name."""
    tables = [table for start, table in CLAIMS.items() if claim_id.startswith(start)]
    matching = [row for table in tables for row in printed_rows(table) if row["claim_id"] == claim_id]
    if len(matching) != 1:
        raise ValueError(f"no claim {claim_id!r} in {', '.join(tables) or ' or '.join(CLAIMS.values())}")
    return float(matching[0]["value"])


def is_true(cell: str) -> bool:
    """Parse a printed check mark; ValueError for anything but true and false."""
    if cell not in ("true", "false"):
        raise ValueError(f"want true or false, got {cell!r}")
    return cell == "true"
