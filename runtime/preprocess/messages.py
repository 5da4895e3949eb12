"""Schema of messages to a preprocessing server: fields by kind, bounded before anything is stored."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from runtime.preprocess import fields
from runtime.preprocess.fields import Fields, parse_header

MOST_HEADER_BYTES = 2**18  # of a message to a server: that of the largest example
MOST_DEPTH = 5
MOST_GROUPS = 4096


class Role(StrEnum):
    """Permissions of a peer's key."""

    PRODUCER = "producer"
    TRAINER = "trainer"
    READER = "reader"


def parse_message(frame: bytes | memoryview) -> dict[str, Any]:
    """Parse and check the header of a message to a server.

    Raises:
        ValueError: an invalid header; the message names the field, the rule and the value.
    """
    return parse_header(frame, FIELDS, most_bytes=MOST_HEADER_BYTES, most_depth=MOST_DEPTH)


FIELDS: Fields = {
    "ready": {},
    "done": {"task": fields.task, "example": fields.example},
    "malformed": {
        "task": fields.task,
        "path": fields.text(fields.MOST_TEXT),
        "reason": fields.text(fields.MOST_TEXT),
    },
    "hello": {"name": fields.name},
    "find": {"example": fields.number(-fields.MOST_NUMBER, fields.MOST_NUMBER)},
    "want": {
        "name": fields.name,
        "done": fields.position,
        "position": fields.position,
        "group": fields.number(0, MOST_GROUPS - 1),
        "num_groups": fields.number(1, MOST_GROUPS),
        "content": fields.content,
    },
    "finished": {"name": fields.name, "done": fields.position},
    "leave": {},
    "records": {"start": fields.position},
    "status": {},
}
WITH_BUFFERS = frozenset({"done"})
KINDS_OF: Mapping[Role, frozenset[str]] = {
    Role.PRODUCER: frozenset({"ready", "done", "malformed"}),
    Role.TRAINER: frozenset({"hello", "find", "want", "finished", "leave", "records", "status"}),
    Role.READER: frozenset({"hello", "leave", "status"}),
}
