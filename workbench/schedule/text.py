"""Schedules as text grids: one line per group of ranks, readable in review."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from workbench.schedule.action import Action

Rows = tuple[int, ...]
Programs = Mapping[Rows, Sequence[Action]]

MARK = "<--"
IDLE = "."
GOES_ON = "="
SHOWN_ROWS = 8  # of a grid inside an error, on each side of the marked cell
SHOWN_COLUMNS = 12


class Cell(NamedTuple):
    """A cell of a schedule: the row's ranks and the position in its program."""

    ranks: Rows
    position: int


class Slot(NamedTuple):
    """An action with its start and end, in ticks; end > start."""

    action: Action
    start_tick: int
    end_tick: int


def format_programs(programs: Programs, mark: Cell | None = None) -> str:
    """Format programs in issue order, e.g. `0,1 | 0F0 0F1 0B0`, columns aligned.

    Args:
        programs: ranks (or stages of a group) -> actions.
        mark: a cell to point at with `<--`; its position may be one past the end.
    """
    cells = {ranks: [str(action) for action in actions] for ranks, actions in programs.items()}
    if mark is not None:
        row = [*cells[mark.ranks], ""]
        row[mark.position] = f"{row[mark.position]} {MARK}".lstrip()
        cells[mark.ranks] = row
    return _grid(cells)


def format_timeline(rows: Mapping[Rows, Sequence[Slot]]) -> str:
    """Format a schedule over time: a column per tick, `=` while an action continues, `.` while idle.

    Raises:
        ValueError: slots of one row that overlap or take no time, naming them, with the grid
            of that row's program marked.
    """
    last = max((slot.end_tick for slots in rows.values() for slot in slots), default=0)
    cells = {}
    for ranks, slots in rows.items():
        ordered = sorted(slots, key=lambda slot: slot.start_tick)
        _check_slots(ranks, ordered)
        line = [IDLE] * last
        for slot in ordered:
            line[slot.start_tick] = str(slot.action)
            line[slot.start_tick + 1 : slot.end_tick] = [GOES_ON] * (slot.end_tick - slot.start_tick - 1)
        cells[ranks] = line
    return _grid(cells)


def marked_error(message: str, programs: Programs, where: Cell) -> ValueError:
    """Return a ValueError that shows the schedule around the offending cell, which is marked."""
    labels = list(programs)
    row = labels.index(where.ranks)
    first_row, first = max(0, row - SHOWN_ROWS), max(0, where.position - SHOWN_COLUMNS)
    window = {
        ranks: programs[ranks][first : where.position + SHOWN_COLUMNS + 1]
        for ranks in labels[first_row : row + SHOWN_ROWS + 1]
    }
    grid = format_programs(window, Cell(where.ranks, where.position - first))
    return ValueError(f"{message} (action {where.position} of the row)\n{grid}")


def _check_slots(ranks: Rows, slots: Sequence[Slot]) -> None:
    program = {ranks: tuple(checked.action for checked in slots)}
    for index, checked in enumerate(slots):
        if checked.end_tick <= checked.start_tick:
            message = f"row {_label(ranks)}: {checked.action} takes no tick, a grid cannot show it"
            raise marked_error(message, program, Cell(ranks, index))
    for index, (slot, following) in enumerate(pairwise(slots)):
        if following.start_tick < slot.end_tick:
            message = f"row {_label(ranks)}: {following.action} starts before {slot.action} ends"
            raise marked_error(message, program, Cell(ranks, index + 1))


def _grid(cells: Mapping[Rows, Sequence[str]]) -> str:
    labels = {ranks: _label(ranks) for ranks in cells}
    margin = max((len(label) for label in labels.values()), default=0)
    columns = max((len(line) for line in cells.values()), default=0)
    widths = [max(len(line[i]) for line in cells.values() if i < len(line)) for i in range(columns)]
    lines = [
        f"{labels[ranks]:>{margin}} | "
        + " ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=False))
        for ranks, line in cells.items()
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _label(ranks: Rows) -> str:
    return ",".join(str(rank) for rank in ranks)
