"""Rows of the kernel benchmark: one for each cell, pass and contender, in a file from which a run resumes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from experiments.bench.kernel_cells import Contender
from workbench.whole_file import check_writable, write_text

FORMAT = 1
PART = "kernels"
PLAN, BITS = "plan", "bits"  # kinds of units that are no passes of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One contender's pass on one cell: a median time, or the error.

    Args:
        kind: of the cell: "full", "cp g=4", "cp g=1", "hd64" or "hd256"; or `PLAN` or `BITS`.
        direction: "forward", "backward", "plan" or "repeat".
        who: name of the contender.
        seconds: median of interleaved runs.
        spread: (third quartile - first quartile) / median.
        flop: of a forward, by exact area.
        modelled: list-scheduling time of the forward in units of a FULL tile, for ours.
    """

    kind: str
    mask: str
    length: int
    head_dim: int
    dtype: str
    seed: int
    direction: str
    who: str
    seconds: float | None = None
    spread: float | None = None
    flop: float | None = None
    modelled: float | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        """What the row measures; unique within a file."""
        cell = f"{PART}/{self.kind}/{self.mask}#{self.seed}/{self.length}/{self.head_dim}/{self.dtype}"
        return f"{cell}/{self.direction}/{self.who}"

    @property
    def cell(self) -> tuple[str, int, str, int]:
        return self.mask, self.length, self.kind, self.seed


class RowFile:
    """Rows of one device and set of versions in a file; every change is on disk when `add` returns."""

    def __init__(self, path: Path | None, device: str, versions: dict[str, str | None]) -> None:
        """Load the rows of the file; without a path they are kept in memory.

        Raises:
            ValueError: the file is no such file, of another format, device or other versions, or the
                path cannot be written.
        """
        self._path = path
        self.head = {"script": "experiments.bench.kernels", "format": FORMAT, "device": device}
        self.head |= {"versions": versions}
        self.rows: dict[str, KernelRow] = {}
        if path is not None:
            check_writable(path)
            if path.exists():
                self.rows = {row.key: row for row in self._read(path)}

    def add(self, rows: Sequence[KernelRow]) -> None:
        """Add new rows; a row whose key exists is ignored, even if the stored one is an error."""
        for row in rows:
            self.rows.setdefault(row.key, row)
        if self._path is not None:
            kept = {**self.head, "rows": [asdict(row) for row in self.rows.values()]}
            write_text(json.dumps(kept, indent=1) + "\n", self._path)

    def _read(self, path: Path) -> list[KernelRow]:
        try:
            kept: Any = json.loads(path.read_text(encoding="utf-8"))
            rows = [KernelRow(**row) for row in kept["rows"]]
            head = {name: kept[name] for name in self.head}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: no file of this benchmark's rows ({error})") from error
        for name, ours in self.head.items():
            if head[name] != ours:
                raise ValueError(
                    f"{path}: rows of {name} {head[name]}, these would be of {ours}; want another --out"
                )
        if wrong := [row for row in rows if not _is_sound(row)]:
            raise ValueError(f"{path}: row {wrong[0].key}: unknown contender or a time that is not above 0")
        return rows


def _is_sound(row: KernelRow) -> bool:
    numbers = [getattr(row, field.name) for field in fields(row) if field.name in ("seconds", "flop")]
    return row.who in Contender.__members__ and all(x is None or x > 0 for x in numbers)
