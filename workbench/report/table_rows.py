"""Tables as data: rows of plain values under names that programs can use."""

import csv
import io
import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from rich.table import Table
from rich.text import Text

from workbench.on_demand import OnDemand
from workbench.report.figure import Figure

pa, pq = OnDemand("pyarrow"), OnDemand("pyarrow.parquet")

Value = str | int | float | bool | None
Row = dict[str, Value]
_WORDS = (("%", " percent "), ("$", " dollars "), ("/", " per "), (",", ""), ("+", " and "))
_WHOLE, _REAL = re.compile(r"[+-]?\d+"), re.compile(r"[+-]?\d*\.?\d+([eE][+-]?\d+)?")


class KeyedTable(Table):
    """A table with a key by which programs find it among others; its title, which people read, may vary.

    Args:
        key: the same in every run, whatever the figures in the title; None: the title.
    """

    def __init__(self, title: str, *, key: str | None = None, **style: Any) -> None:
        super().__init__(title=title, **style)
        self.key = title if key is None else key


class Format(StrEnum):
    """Output formats of tables."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def written(tables: Sequence[Table], form: Format) -> bytes:
    """Rows of all tables in one format; with several tables, `table` and `title` come first.

    Args:
        form: `CSV` with a header, `JSON` as one list of objects, or a `PARQUET` file.
    """
    rows = rows_of(tables)
    if form is Format.JSON:
        return (json.dumps(rows, indent=1) + "\n").encode()
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form is Format.CSV:
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    columns = {name: _of_one_kind([row.get(name) for row in rows]) for name in names}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def rows_of(tables: Sequence[Table]) -> list[Row]:
    """Rows of one table after another; a dash or an empty cell is None.

    Of several tables, each row has its table's key as `table` and its title as `title`.
    """
    several = len(tables) > 1
    rows: list[Row] = []
    for table in tables:
        own: Row = {"table": _key(table), "title": str(table.title)} if several else {}
        rows += [own | row for row in _rows(table)]
    return rows


def _key(table: Table) -> str:
    return table.key if isinstance(table, KeyedTable) else str(table.title)


def _rows(table: Table) -> list[Row]:
    """Rows of one table; a heading line (`Text`) becomes the column `group` of the lines below it."""
    columns: dict[str, list[Value]] = {}
    for column in table.columns:
        cells = list(column.cells)
        figure = next((cell for cell in cells if isinstance(cell, Figure)), None)
        for unit in figure.values if figure is not None else {"": None}:
            name = _unique(_named(str(column.header), unit), columns)
            columns[name] = [_value(cell, unit) for cell in cells]
    headings = [cell.plain if isinstance(cell, Text) else None for cell in table.columns[0].cells]
    rows: list[Row] = []
    group: str | None = None
    for index, heading in enumerate(headings):
        if heading is not None:
            group = heading
            continue
        group_column: Row = {"group": group} if any(headings) else {}
        rows.append(group_column | {name: values[index] for name, values in columns.items()})
    return rows


def _named(header: str, unit: str) -> str:
    """Column name, such as `peak_memory_bytes` for `peak memory` and `bytes`."""
    text = f"{header} {unit}".lower()
    for sign, word in _WORDS:
        text = text.replace(sign, word)
    return "_".join(re.findall(r"[a-z0-9]+", text)) or "name"


def _unique(name: str, taken: dict[str, list[Value]]) -> str:
    number = 2
    candidate = name
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def _value(cell: Any, unit: str) -> Value:
    if isinstance(cell, Figure):
        value: Value = cell.values.get(unit)
        return value
    text = str(cell).strip()
    if text in ("", "-"):
        return None
    plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else text
    if _WHOLE.fullmatch(plain):
        return int(plain)
    return float(plain) if _REAL.fullmatch(plain) else text


def _of_one_kind(values: list[Value]) -> list[Value]:
    """Values of one type for a file's column: text if any of them is."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2:
        return values
    kind = float if kinds <= {int, float} else str
    return [None if value is None else kind(value) for value in values]
