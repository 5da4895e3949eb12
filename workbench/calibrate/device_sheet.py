"""A data sheet: published figures of one device, each cell with its source, in one CSV file."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.cost.profile import PROFILES
from workbench.units import GB

SHEETS = PROFILES / "sheets"
COLUMNS = ("cell", "value", "standing", "source")
WORDS = ("device", "architecture")
COUNTS = ("processors", "link_ranks")
_TERA = 1e12
# Suffix of a numeric cell -> (suffix of its field, factor). Cells use makers' units, fields are SI.
UNITS = {
    "_gbytes_per_s": ("_bytes_per_s", float(GB)),
    "_gbytes": ("_bytes", float(GB)),
    "_tflop_per_s": ("_flop_per_s", _TERA),
    "_watts": ("_w", 1.0),
}
OVER_BFLOAT16 = 1.25  # factor by which an 8-bit peak may differ from twice the bfloat16 one
WITH_ZEROS = 1.6  # times the best known peak per processor or watt: beyond, it must be a sparse peak


class Standing(StrEnum):
    """SOURCED: published by someone. PRESUMED: unpublished; the source says why it is assumed."""

    SOURCED = "sourced"
    PRESUMED = "presumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """One device by its data sheet, in SI units; all peaks are dense.

    Args:
        device: name.
        architecture: devices of one architecture run the same kernels.
        processors: streaming multiprocessors or compute units, over which products are tiled.
        memory_bytes, memory_bytes_per_s: of the device memory; decimal.
        float32_flop_per_s, bfloat16_flop_per_s: peaks of products.
        power_w: power limit of the board.
        pcie_bytes_per_s: to the host, one way.
        card_bytes_per_s: of the network card of one device, one way.
        link_ranks: devices joined by the link, or sharing a node if there is none.
        link_bytes_per_s: of one device to the others of its link domain, one way; None: over PCIe.
        float64_flop_per_s, fp8_flop_per_s, mxfp8_flop_per_s, nvfp4_flop_per_s: further peaks; None: has none.
        reached_bfloat16_flop_per_s, reached_fp8_flop_per_s: the fastest product that anybody measured.
        full_power_w: power without a limit; None: as `power_w`.
        presumed: unpublished cells.
        sources: (cell, source) pairs.
    """

    device: str
    architecture: str
    processors: int
    memory_bytes: float
    memory_bytes_per_s: float
    float32_flop_per_s: float
    bfloat16_flop_per_s: float
    power_w: float
    pcie_bytes_per_s: float
    card_bytes_per_s: float
    link_ranks: int
    link_bytes_per_s: float | None = None
    float64_flop_per_s: float | None = None
    fp8_flop_per_s: float | None = None
    mxfp8_flop_per_s: float | None = None
    nvfp4_flop_per_s: float | None = None
    reached_bfloat16_flop_per_s: float | None = None
    reached_fp8_flop_per_s: float | None = None
    full_power_w: float | None = None
    presumed: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def peaks(self) -> tuple[tuple[str, float], ...]:
        """(precision, dense peak) pairs."""
        known = (
            ("bfloat16", self.bfloat16_flop_per_s),
            ("float32", self.float32_flop_per_s),
            ("float64", self.float64_flop_per_s),
            ("fp8", self.fp8_flop_per_s),
            ("mxfp8", self.mxfp8_flop_per_s),
            ("nvfp4", self.nvfp4_flop_per_s),
        )
        return tuple((precision, rate) for precision, rate in known if rate is not None)


def shipped_sheets() -> tuple[str, ...]:
    """Names of the devices whose sheets ship, sorted."""
    return tuple(sorted(path.stem for path in SHEETS.glob("*.csv")))


def shipped_sheet(name: str) -> DeviceSheet:
    """The sheet of a shipped device; ValueError with the nearest name otherwise."""
    path = SHEETS / f"{name}.csv"
    if name not in shipped_sheets():
        raise ValueError(f"no data sheet of {name!r}: {_nearest(name, shipped_sheets())}")
    return read_sheet(path)


def read_sheet(path: Path) -> DeviceSheet:
    """Read a sheet from a CSV file of cells: name, value, standing and source.

    Raises:
        ValueError: an unknown column or cell, a repeated or missing one, an invalid value, or a cell
            without a source; names the line, the rule, the value and the nearest choice.
    """
    if not path.is_file():
        raise ValueError(f"data sheet {path}: no such file")
    cells = {}
    for number, row in enumerate(_rows(path), start=2):
        name, cell = _cell(row, f"{path}: line {number}")
        if name in cells:
            raise ValueError(f"{path}: line {number}: cell {name!r} stands twice; want it once")
        cells[name] = cell
    missing = [name for name in REQUIRED if name not in cells]
    if missing:
        raise ValueError(
            f"{path}: no cell {', '.join(missing)}; want each, {Standing.PRESUMED} where nobody published it"
        )
    values = {_field(name): value for name, (value, _, _) in cells.items()}
    return DeviceSheet(
        **values,
        presumed=tuple(name for name, (_, standing, _) in cells.items() if standing is Standing.PRESUMED),
        sources=tuple((name, source) for name, (_, _, source) in cells.items()),
    )


def _rows(path: Path) -> list[dict[str, str]]:
    rows = csv.DictReader(io.StringIO(read_bounded(path, MOST_SETTINGS_BYTES), newline=""))
    try:
        _check_columns(rows.fieldnames or (), path)
        return list(rows)
    except csv.Error as error:
        raise ValueError(f"{path}: want a CSV file: {error}") from None


def check_sheet(sheet: DeviceSheet, others: Iterable[DeviceSheet]) -> None:
    """Check a sheet's cells against one another and against sheets of the same architecture.

    Raises:
        ValueError: cells that contradict each other, most often a peak that counts the zeros of sparse
            matrices.
    """
    _check_zeros(sheet, tuple(others))
    eight = sheet.bfloat16_flop_per_s * 2
    for name in ("fp8", "mxfp8"):
        peak = getattr(sheet, f"{name}_flop_per_s")
        if peak is not None and not eight / OVER_BFLOAT16 <= peak <= eight * OVER_BFLOAT16:
            raise _contradiction(sheet, f"{name}_tflop_per_s", peak, "twice bfloat16_tflop_per_s", eight)
    four = sheet.nvfp4_flop_per_s
    if four is not None and not 2 * eight / OVER_BFLOAT16 <= four <= 3 * eight * OVER_BFLOAT16:
        raise _contradiction(
            sheet, "nvfp4_tflop_per_s", four, "four to six times bfloat16_tflop_per_s", 2 * eight
        )
    reached, full = sheet.reached_bfloat16_flop_per_s, sheet.full_power_w
    if reached is not None and reached > sheet.bfloat16_flop_per_s:
        raise _contradiction(
            sheet, "reached_bfloat16_tflop_per_s", reached, "at most the peak", sheet.bfloat16_flop_per_s
        )
    if full is not None and full < sheet.power_w:
        raise ValueError(
            f"data sheet of {sheet.device}: power_watts must be <= full_power_watts, "
            f"got {sheet.power_w:g} and {full:g}; nearest: {full:g}"
        )
    if sheet.link_bytes_per_s is not None and sheet.link_bytes_per_s > sheet.memory_bytes_per_s:
        raise ValueError(
            f"data sheet of {sheet.device}: link_gbytes_per_s must be below memory_gbytes_per_s, one way "
            f"and in bytes, got {sheet.link_bytes_per_s / GB:g}; nearest: {sheet.link_bytes_per_s / GB / 8:g}"
        )


def _check_zeros(sheet: DeviceSheet, others: Sequence[DeviceSheet]) -> None:
    """Compare the peak per processor within its architecture if another is known, or within its generation
    (`Ada` of `Ada AD102`), else per watt with all others.
    """
    alike = [other for other in others if other.architecture == sheet.architecture]
    alike = alike or [other for other in others if _generation(other) == _generation(sheet)]
    best = max((_per_processor(other) for other in alike), default=0.0) * sheet.processors
    rule = f"at most {WITH_ZEROS} times others of {sheet.architecture}"
    if not alike:
        best = max((_per_watt(other) for other in others), default=math.inf) * sheet.power_w
        rule = f"at most {WITH_ZEROS} times the best known a watt"
    if sheet.bfloat16_flop_per_s > WITH_ZEROS * best:
        raise _contradiction(sheet, "bfloat16_tflop_per_s", sheet.bfloat16_flop_per_s, rule, best)


def _contradiction(sheet: DeviceSheet, cell: str, value: float, rule: str, wanted: float) -> ValueError:
    return ValueError(
        f"data sheet of {sheet.device}: {cell} must be dense, {rule}, got {value / _TERA:g}: does it count "
        f"the zeros of sparse matrices? nearest: {wanted / _TERA:g}"
    )


def _generation(sheet: DeviceSheet) -> str:
    return sheet.architecture.split()[0].casefold()


def _per_processor(sheet: DeviceSheet) -> float:
    return sheet.bfloat16_flop_per_s / sheet.processors


def _per_watt(sheet: DeviceSheet) -> float:
    return sheet.bfloat16_flop_per_s / (sheet.full_power_w or sheet.power_w)


def _check_columns(columns: Sequence[str], path: Path) -> None:
    for name in columns:
        if name not in COLUMNS:
            raise ValueError(f"{path}: unknown column {name!r}: {_nearest(name, COLUMNS)}")
    for name in COLUMNS:
        if name not in columns:
            raise ValueError(f"{path}: no column {name!r}; want {', '.join(COLUMNS)}")


def _cell(row: dict[str, str], where: str) -> tuple[str, tuple[Any, Standing, str]]:
    name, text, source = ((row[key] or "").strip() for key in ("cell", "value", "source"))
    if name not in CELLS:
        raise ValueError(f"{where}: unknown cell {name!r}: {_nearest(name, CELLS)}")
    if not text or not source:
        raise ValueError(f"{where}: {name}: want a value and its source, got {text!r} and {source!r}")
    standing = (row["standing"] or "").strip()
    if standing not in tuple(Standing):
        raise ValueError(f"{where}: {name}: standing {standing!r}: {_nearest(standing, tuple(Standing))}")
    return name, (_value(name, text, where), Standing(standing), source)


def _value(name: str, text: str, where: str) -> str | int | float:
    if name in WORDS:
        return text
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{where}: {name}: want a number, got {text!r}; nearest: 1") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{where}: {name}: want a number > 0, got {text}; nearest: 1")
    if name in COUNTS:
        if number != int(number):
            raise ValueError(f"{where}: {name}: want a whole number, got {text}; nearest: {round(number)}")
        return int(number)
    return number * next(factor for ending, (_, factor) in UNITS.items() if name.endswith(ending))


def _field(cell: str) -> str:
    for ending, (field, _) in UNITS.items():
        if cell.endswith(ending):
            return cell.removesuffix(ending) + field
    return cell


def _cell_of(field: str) -> str:
    for ending, (unit, _) in UNITS.items():
        if field.endswith(unit):
            return field.removesuffix(unit) + ending
    return field


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    return f"want one of {', '.join(known)}; nearest: {near[0]}"


_FIELDS = tuple(field for field in fields(DeviceSheet) if field.name not in ("presumed", "sources"))
CELLS = tuple(_cell_of(field.name) for field in _FIELDS)
REQUIRED = tuple(_cell_of(field.name) for field in _FIELDS if field.default is not None)
