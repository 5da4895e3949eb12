"""Tables of the page that can be sorted by their headers: displayed text and sort value of each cell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from workbench.report.figure import Figure

Row = Sequence["Cell"]

MOST_PRINTED = 60  # rows, as style.css has it


@dataclass(frozen=True, slots=True)
class Cell:
    """Displayed text; `value` is what it is sorted by, None: the text."""

    text: str
    value: float | None = None
    link: str | None = None

    def html(self, style: str) -> str:
        value = "" if self.value is None else f' data-value="{self.value!r}"'
        text = escape(self.text)
        inside = text if self.link is None else f'<a href="{escape(self.link)}">{text}</a>'
        return f"<td{style}{value}>{inside}</td>"


def cell(text: str) -> Cell:
    """A cell for a figure, sorted by its first value, or for other text."""
    value = next(iter(text.values.values()), None) if isinstance(text, Figure) else None
    return Cell(text, value)


def number(value: float | None, shown: Callable[[float], str] = str) -> Cell:
    """A cell for a formatted number; a dash for None."""
    return Cell("-") if value is None else Cell(shown(value), value)


def sortable_table(
    headers: Sequence[str],
    groups: Sequence[Sequence[Row]],
    *,
    titles: Sequence[str] = (),
    left: int = 0,
    marks: Callable[[int], str] = lambda position: "",
) -> str:
    """A table whose groups of rows are sorted separately.

    Args:
        headers: of the columns.
        groups: rows of each, in their initial order.
        titles: of the groups; empty: untitled.
        left: number of left-aligned columns, from the first.
        marks: returns attributes of a row by its index in its group.
    """
    styles = [' class="l"' if index < left else "" for index in range(len(headers))]
    head = "".join(
        f'<th{style} scope="col"><button type="button">{escape(text)}</button></th>'
        for text, style in zip(headers, styles, strict=True)
    )
    bodies = []
    for position, rows in enumerate(groups):
        title = (
            f'<tr class="group"><td class="l" colspan="{len(headers)}">{escape(titles[position])}</td></tr>'
            if titles
            else ""
        )
        lines = "".join(
            f"<tr{marks(index)}>{''.join(map(Cell.html, row, styles))}</tr>" for index, row in enumerate(rows)
        )
        bodies.append(f"<tbody>{title}{lines}</tbody>")
    is_long = sum(map(len, groups)) > MOST_PRINTED
    return (
        f'<div class="scroll{" long" if is_long else ""}" tabindex="0"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead>{''.join(bodies)}</table></div>"
    )
