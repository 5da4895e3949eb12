"""The little Markdown that generated pages are written in."""

from collections.abc import Iterable, Sequence

MADE_BY = "<!-- Made by `python -m docs.generate`; do not edit. -->"


def page(title: str, *blocks: str) -> str:
    """A whole page; blocks are separated by an empty line."""
    return "\n\n".join([MADE_BY, f"# {title}", *(block for block in blocks if block)]) + "\n"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A pipe table; pipes and line breaks inside cells are escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def code(text: object) -> str:
    """Inline code."""
    return f"`{text}`"


def anchor(heading: str) -> str:
    """The fragment by which a heading of plain words is linked to."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.strip().replace(" ", "-")


def one_line(text: str) -> str:
    """Paragraphs of a docstring on one line."""
    return " ".join(text.split())


def _cell(value: object) -> str:
    return one_line(str(value)).replace("|", "\\|")
