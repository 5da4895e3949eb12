"""What peers may say to a preprocessing server: by kind, field by field, bounded before anything is kept."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from runtime.preprocess.stream import Content
from workbench.strict_json import parse_strict

MOST_HEADER_BYTES = 2**20  # of a message to a server
MOST_DEPTH = 5
MOST_NAME = 200  # characters
MOST_TEXT = 1000
MOST_ITEMS = 4096  # texts or images of an example
MOST_SIDE = 2**20  # of anything that an image or a text has a number of
MOST_NUMBER = 2**53
MOST_GROUPS = 4096

Field = Callable[[Any], Any]


class Role(StrEnum):
    """What a peer's key lets it do."""

    PRODUCER = "producer"
    TRAINER = "trainer"
    READER = "reader"


def parse_message(frame: bytes | memoryview) -> dict[str, Any]:
    """The header of a message to a server.

    Raises:
        ValueError: it is none; the field, the rule and the value are named.
    """
    if len(frame) > MOST_HEADER_BYTES:
        raise ValueError(f"message header: at most {MOST_HEADER_BYTES} bytes, got {len(frame)}")
    header = parse_strict(bytes(frame), most_bytes=MOST_HEADER_BYTES, most_depth=MOST_DEPTH)
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("message header: want an object with its kind")
    kind = header.pop("kind")
    fields = FIELDS.get(kind)
    if fields is None:
        raise ValueError(f"no message of kind {kind!r:.60}")
    if header.keys() != fields.keys():
        found = ", ".join(f"{name!s:.20}" for name in list(header)[:8])
        raise ValueError(f"{kind}: want {', '.join(fields) or 'nothing'} beside its kind, got {found!r}")
    try:
        return {"kind": kind} | {name: check(header[name]) for name, check in fields.items()}
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None


def _number(least: int, most: int) -> Field:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"want a whole number from {least} to {most}, got {value!r:.40}")
        return value

    return check


def _text(most: int) -> Field:
    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"want a text of at most {most} characters, got {value!r:.40}")
        return value

    return check


def _name(value: Any) -> str:
    name: str = _text(MOST_NAME)(value)
    if not name.isprintable():
        raise ValueError(f"want a name without control characters, got {name!r:.40}")
    return name


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"want a list of at most {most}, got {value!r:.40}")
    return value


def _task(value: Any) -> tuple[int, int]:
    numbers = [_number(0, MOST_NUMBER)(each) for each in _list(value, 2)]
    if len(numbers) != 2:
        raise ValueError(f"want a task of two numbers, got {len(numbers)}")
    return numbers[0], numbers[1]


def _image(value: Any) -> list[int]:
    """Rows, columns, bytes of a patch, tokens in the language model."""
    sides = [_number(0, MOST_SIDE)(each) for each in _list(value, 4)]
    if len(sides) != 4 or sides[3] > sides[0] * sides[1]:
        raise ValueError(
            f"want rows, columns, width and no more tokens than patches of an image, got {sides}"
        )
    return sides


def _example(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != {"id", "texts", "images"}:
        raise ValueError("want an example of id, texts and images")
    return {
        "id": _number(-MOST_NUMBER, MOST_NUMBER)(value["id"]),
        "texts": [_number(0, MOST_SIDE)(each) for each in _list(value["texts"], MOST_ITEMS)],
        "images": [_image(each) for each in _list(value["images"], MOST_ITEMS)],
    }


def _content(value: Any) -> Content:
    if value not in list(Content):
        raise ValueError(f"want content {' or '.join(Content)}, got {value!r:.40}")
    return Content(value)


_position = _number(0, MOST_NUMBER)
FIELDS: Mapping[str, Mapping[str, Field]] = {
    "ready": {},
    "done": {"task": _task, "example": _example},
    "malformed": {"task": _task, "path": _text(MOST_TEXT), "reason": _text(MOST_TEXT)},
    "hello": {"name": _name},
    "find": {"example": _number(-MOST_NUMBER, MOST_NUMBER)},
    "want": {
        "name": _name,
        "done": _position,
        "position": _position,
        "group": _number(0, MOST_GROUPS - 1),
        "num_groups": _number(1, MOST_GROUPS),
        "content": _content,
    },
    "finished": {"name": _name, "done": _position},
    "leave": {},
    "records": {"start": _position},
    "status": {},
}
WITH_BUFFERS = frozenset({"done"})
KINDS_OF: Mapping[Role, frozenset[str]] = {
    Role.PRODUCER: frozenset({"ready", "done", "malformed"}),
    Role.TRAINER: frozenset({"hello", "find", "want", "finished", "leave", "records", "status"}),
    Role.READER: frozenset({"hello", "leave", "status"}),
}
