"""The rows of a campaign in a folder: a file of JSON lines for each part, written whole or not at all."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from workbench.whole_file import write_text

FORMAT = "multimodal-workbench gpu day"
FORMAT_VERSION = 1
PREDICTIONS = "predictions.json"  # lies beside the rows, see `experiments.gpu_day.predictions`


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """One measured cell, or how it failed.

    Args:
        key: of the cell.
        stamp: of what decides the row: sources, software, extent, rows of other parts.
        device_name: what the device calls itself.
        versions: package -> version.
        date: ISO, of the measurement.
        seconds: that it took.
        values: what was measured; None where it failed.
        error: one line; None where it did not fail.
    """

    key: str
    stamp: str
    device_name: str
    versions: dict[str, str]
    date: str
    seconds: float
    values: dict[str, Any] | None = None
    error: str | None = None


@dataclass(slots=True)
class Store:
    """Rows by part and key, kept in a folder; every change is in the part's file when it returns."""

    folder: Path
    rows: dict[str, dict[str, StoredRow]] = field(default_factory=dict)

    def put(self, part: str, row: StoredRow) -> None:
        """Add a row, in place of the one of that key."""
        self.rows.setdefault(part, {})[row.key] = row
        write_rows(self.folder / f"{part}.jsonl", part, self.rows[part].values())

    def keep(self, part: str, keys: Iterable[str]) -> None:
        """Drop rows of other keys: of cells that a part no longer has."""
        rows = self.rows.get(part, {})
        gone = set(rows) - set(keys)
        if gone:
            self.rows[part] = {key: row for key, row in rows.items() if key not in gone}
            write_rows(self.folder / f"{part}.jsonl", part, self.rows[part].values())

    def values(self, part: str, stamp: str | None = None) -> dict[str, dict[str, Any]]:
        """What was measured, by key; of one stamp, or whatever it is."""
        return {
            key: row.values
            for key, row in self.rows.get(part, {}).items()
            if row.values is not None and stamp in (None, row.stamp)
        }


def opened(out: Path, earlier: Sequence[Path], parts: Iterable[str], device_name: str) -> Store:
    """The folder to write to, with the rows of earlier calls in it.

    Args:
        earlier: of a cell that several have a row of, the last one's counts; so of predictions.

    Raises:
        ValueError: `out` holds rows that it may not continue, one of `earlier` is no folder or holds
            none, or the rows are of another format version or of another device.
    """
    names = tuple(parts)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: want a folder, this is a file")
    if out.resolve() not in [folder.resolve() for folder in earlier]:
        taken = [name for name in names if (out / f"{name}.jsonl").exists()]
        if taken:
            raise ValueError(
                f"--out {out}: holds rows of {taken[0]} already; want --from {out} to resume from them"
            )
    store = Store(out)
    for folder in earlier:
        for name, rows in _rows_of(folder, names, device_name).items():
            store.rows.setdefault(name, {}).update(rows)
    predictions = [path.read_text(encoding="utf-8") for f in earlier if (path := f / PREDICTIONS).is_file()]
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in store.rows.items():
        write_rows(out / f"{name}.jsonl", name, rows.values())
    if predictions:
        write_text(predictions[-1], out / PREDICTIONS)
    return store


def _rows_of(folder: Path, parts: Sequence[str], device_name: str) -> dict[str, dict[str, StoredRow]]:
    if not folder.is_dir():
        raise ValueError(f"--from {folder}: want the folder of an earlier call, there is none")
    rows_of_parts = {name: read_rows(path) for name in parts if (path := folder / f"{name}.jsonl").is_file()}
    if not rows_of_parts:
        raise ValueError(
            f"--from {folder}: want the folder of an earlier call, it has no {parts[0]}.jsonl or other rows"
        )
    for name, rows in rows_of_parts.items():
        _check_device(folder / f"{name}.jsonl", rows.values(), device_name)
    return rows_of_parts


def write_rows(path: Path, part: str, rows: Iterable[StoredRow]) -> None:
    """A header and a line for each row; whole or not at all."""
    header = {"format": FORMAT, "format_version": FORMAT_VERSION, "part": part}
    lines = [json.dumps(header), *(json.dumps(asdict(row)) for row in rows)]
    write_text("\n".join(lines) + "\n", path)


def read_rows(path: Path) -> dict[str, StoredRow]:
    """The rows of a file by key.

    Raises:
        ValueError: it is none of ours, of another format version, or damaged; file and line are named.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    header = _parsed(path, 1, lines[0]) if lines else {}
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: want rows of a GPU day, its first line does not say so")
    if header.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {header.get('format_version')}, want {FORMAT_VERSION}; "
            "measure into another folder"
        )
    names = {each.name for each in fields(StoredRow)}
    rows: dict[str, StoredRow] = {}
    for number, line in enumerate(lines[1:], 2):
        values = _parsed(path, number, line)
        if set(values) != names:
            wrong = sorted(set(values) ^ names)[0]
            raise ValueError(f"{path}:{number}: want the fields of a row, {wrong!r} is missing or unknown")
        rows[str(values["key"])] = StoredRow(**values)
    return rows


def rows_in(folder: Path, part: str) -> Mapping[str, StoredRow]:
    """The rows of a part in a folder; none where it has no file."""
    path = folder / f"{part}.jsonl"
    return read_rows(path) if path.is_file() else {}


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path}:{number}: not JSON") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}:{number}: want a JSON object, got {type(values).__name__}")
    return values


def _check_device(path: Path, rows: Iterable[StoredRow], device_name: str) -> None:
    other = next((row.device_name for row in rows if row.device_name != device_name), None)
    if other is not None:
        raise ValueError(
            f"{path}: rows of another device: {other}, here it is {device_name}; want a folder for each"
        )
