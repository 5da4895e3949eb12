"""Text from somebody else, as it may stand on a terminal or in a log: one line, printable, not too long."""

MOST_CHARACTERS = 300


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """On one line, control characters spelled out, the middle left out where it is longer than `most`."""
    line = " ".join(text.split())
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line[: 4 * most + 4])
    if len(shown) <= most and len(line) <= 4 * most:
        return shown
    whole = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line[-most:])
    head = most * 2 // 3
    return f"{shown[:head]} ... {whole[-(most - head - 5) :]}"
