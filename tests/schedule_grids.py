"""Grids of schedules, read back: what `workbench.schedule.text` writes, and the reviewed golden files."""

from collections.abc import Iterable

from workbench.schedule.action import Action, parse_action
from workbench.schedule.text import GOES_ON, IDLE, MARK, Rows, Slot


def parse_programs(text: str) -> dict[Rows, tuple[Action, ...]]:
    """Parse a grid made by `format_programs`; marks and lines that start with # are skipped.

    Raises:
        ValueError: naming the line, for a row without ` | `, a repeated row or a bad action.
    """
    programs: dict[Rows, tuple[Action, ...]] = {}
    for number, ranks, cells in _rows(text):
        if ranks in programs:
            raise ValueError(f"line {number}: row {','.join(map(str, ranks))} stands twice")
        programs[ranks] = tuple(_action(number, cell) for cell in cells if cell != MARK)
    return programs


def parse_timeline(text: str) -> dict[Rows, tuple[Slot, ...]]:
    """Parse a grid made by `format_timeline`.

    Raises:
        ValueError: naming the line, as `parse_programs`, or for a `=` that goes on from nothing.
    """
    rows: dict[Rows, tuple[Slot, ...]] = {}
    for number, ranks, cells in _rows(text):
        slots: list[Slot] = []
        for tick, cell in enumerate(cells):
            if cell == GOES_ON:
                if not slots or slots[-1].end_tick != tick:
                    raise ValueError(f"line {number}, tick {tick}: {GOES_ON!r} goes on from no action")
                slots[-1] = slots[-1]._replace(end_tick=tick + 1)
            elif cell != IDLE:
                slots.append(Slot(_action(number, cell), tick, tick + 1))
        rows[ranks] = tuple(slots)
    return rows


def _rows(text: str) -> Iterable[tuple[int, Rows, list[str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        label, bar, cells = line.partition("|")
        parts = label.strip().split(",")
        if not bar or not all(part.isdigit() for part in parts):
            raise ValueError(f"line {number}: want `<ranks> | <actions>`, e.g. `0,1 | 0F0 0B0`, got {line!r}")
        yield number, tuple(int(part) for part in parts), cells.split()


def _action(number: int, text: str) -> Action:
    try:
        return parse_action(text)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
