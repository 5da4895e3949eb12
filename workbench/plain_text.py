"""Makes untrusted text safe for a terminal or a log: one line, printable, of limited length."""

from collections.abc import Collection

MOST_CHARACTERS = 300
MOST_NAMES = 3


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text on one line, with control characters escaped, and the middle cut where longer than `most`."""
    line = " ".join(text.split())
    beginning = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in line[: 4 * most + 4]
    )
    if len(beginning) <= most and len(line) <= 4 * most:
        return beginning
    whole = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in line[-most:]
    )
    head = most * 2 // 3
    return f"{beginning[:head]} ... {whole[-(most - head - 5) :]}"


def some(names: Collection[str]) -> str:
    """The names in order; of more than `MOST_NAMES` the first, and how many more."""
    first, *others = ordered = sorted(names)
    return ", ".join(ordered) if len(ordered) <= MOST_NAMES else f"{first} and {len(others):,} more"
