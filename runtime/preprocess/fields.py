"""Checks of message fields, which bound every value before it is stored."""

from collections.abc import Callable, Mapping
from typing import Any

from runtime.preprocess.stream import Content
from workbench.strict_json import parse_strict

MOST_NAME = 200  # characters
MOST_TEXT = 1000
MOST_ITEMS = 4096  # texts or images of an example
MOST_SIDE = 2**20  # of any count in an image or a text
MOST_NUMBER = 2**53

Field = Callable[[Any], Any]
Fields = Mapping[str, Mapping[str, Field]]  # by kind of message


def parse_header(
    frame: bytes | memoryview, kinds: Fields, *, most_bytes: int, most_depth: int
) -> dict[str, Any]:
    """Parse the first frame of a message: an object with its kind, and the fields of that kind.

    Raises:
        ValueError: an invalid header; the message names the field, the rule and the value.
    """
    if len(frame) > most_bytes:
        raise ValueError(f"message header: at most {most_bytes} bytes, got {len(frame)}")
    header = parse_strict(bytes(frame), most_bytes=most_bytes, most_depth=most_depth)
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("message header: want an object with its kind")
    kind = header.pop("kind")
    fields = kinds.get(kind)
    if fields is None:
        raise ValueError(f"no message of kind {kind!r:.60}")
    if header.keys() != fields.keys():
        names = ", ".join(f"{name!s:.20}" for name in list(header)[:8])
        raise ValueError(f"{kind}: want {', '.join(fields) or 'nothing'} beside its kind, got {names!r}")
    try:
        return {"kind": kind} | {name: check(header[name]) for name, check in fields.items()}
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None


def number(least: int, most: int) -> Field:
    """A check for a whole number in a range."""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"want a whole number from {least} to {most}, got {value!r:.40}")
        return value

    return check


def text(most: int) -> Field:
    """A check for a text of at most that many characters."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"want a text of at most {most} characters, got {value!r:.40}")
        return value

    return check


def name(value: Any) -> str:
    """Check the name of a trainer."""
    trainer: str = text(MOST_NAME)(value)
    if not trainer.isprintable():
        raise ValueError(f"want a name without control characters, got {trainer!r:.40}")
    return trainer


def list_of_at_most(value: Any, most: int) -> list[Any]:
    """Check a list of at most that length."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"want a list of at most {most}, got {value!r:.40}")
    return value


def task(value: Any) -> tuple[int, int]:
    """Check a task: batch, and index of the example in it."""
    numbers = [number(0, MOST_NUMBER)(each) for each in list_of_at_most(value, 2)]
    if len(numbers) != 2:
        raise ValueError(f"want a task of two numbers, got {len(numbers)}")
    return numbers[0], numbers[1]


def image(value: Any) -> list[int]:
    """Check an image: rows, columns, bytes of a patch, tokens in the language model."""
    sides = [number(0, MOST_SIDE)(each) for each in list_of_at_most(value, 4)]
    if len(sides) != 4 or sides[3] > sides[0] * sides[1]:
        raise ValueError(
            f"want rows, columns, width and no more tokens than patches of an image, got {sides}"
        )
    return sides


def example(value: Any) -> dict[str, Any]:
    """Check the description of an example's buffers."""
    if not isinstance(value, dict) or value.keys() != {"id", "texts", "images"}:
        raise ValueError("want an example of id, texts and images")
    return {
        "id": number(-MOST_NUMBER, MOST_NUMBER)(value["id"]),
        "texts": [number(0, MOST_SIDE)(each) for each in list_of_at_most(value["texts"], MOST_ITEMS)],
        "images": [image(each) for each in list_of_at_most(value["images"], MOST_ITEMS)],
    }


def content(value: Any) -> Content:
    """Check which content of examples is requested."""
    if value not in list(Content):
        raise ValueError(f"want content {' or '.join(Content)}, got {value!r:.40}")
    return Content(value)


position = number(0, MOST_NUMBER)
