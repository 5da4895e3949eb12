"""Mutations of bytes, for any file or frame."""

from random import Random

TOKENS = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[2J", b"\r", b"\n", b'"', b"{", b"[", b"]", b"}", b",", b":",
    b"&a ", b"*a", b"!!float x", b"!!bool x", b"? ", b"NaN", b"-Infinity", b"-1", b"1e999", b"9" * 400,
    b"9" * 5000, b"[" * 5000, b"\xff" * 7 + b"\x7f", b"\xff\xff\xff\xff", b"\x00\x00\x00\x80",
)  # fmt: skip
MOST_PIECE = 64  # bytes that are taken out, doubled or moved at once


def mutated(content: bytes, other: bytes, rng: Random) -> bytes:
    """The content with one to three changes; `other` is another seed of its kind, for pieces."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = _changed(content, other, rng)
    return content


def _changed(content: bytes, other: bytes, rng: Random) -> bytes:  # noqa: PLR0911  (a case each)
    if not content:
        return rng.choice(TOKENS)
    position = rng.randrange(len(content))
    end = min(len(content), position + rng.randrange(1, MOST_PIECE))
    source = rng.randrange(len(other) or 1)
    match rng.randrange(9):
        case 0 | 1:
            return (
                content[:position]
                + bytes([content[position] ^ 1 << rng.randrange(8)])
                + content[position + 1 :]
            )
        case 2:
            return content[:position] + bytes([rng.randrange(256)]) + content[position + 1 :]
        case 3:
            return content[:position] + rng.choice(TOKENS) + content[position:]
        case 4:
            return content[:position] + content[end:]
        case 5:
            return content[:end] + content[position:end] * rng.choice((1, 1, 20)) + content[end:]
        case 6:
            return content[:position] + other[source : source + end - position] + content[end:]
        case 7:
            return _number(content, rng)
        case _:
            return content[:position] if rng.random() < 0.3 else _line_twice(content, rng)


def _number(content: bytes, rng: Random) -> bytes:
    """Replace a digit by another one, or by an unexpected number."""
    digits = [position for position, byte in enumerate(content[:100_000]) if 48 <= byte <= 57]
    if not digits:
        return content
    position = rng.choice(digits)
    new = rng.choice((b"%d" % rng.randrange(10), b"-1", b"NaN", b"1e308", b"0x10", b"9" * 20))
    return content[:position] + new + content[position + 1 :]


def _line_twice(content: bytes, rng: Random) -> bytes:
    """Duplicate or remove a line, and so its keys."""
    lines = content.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    return b"".join((*lines[:index], *lines[index : index + 1] * rng.choice((0, 2)), *lines[index + 1 :]))
