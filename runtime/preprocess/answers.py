"""What a preprocessing server may say to its peers: as strict as what they say to it."""

from typing import Any

from runtime.data.records import AUDIO, IMAGE
from runtime.preprocess import fields
from runtime.preprocess.fields import (
    MOST_ITEMS,
    MOST_NUMBER,
    MOST_TEXT,
    Fields,
    list_of_at_most,
    parse_header,
)
from runtime.preprocess.images import rule_from_json
from workbench.data.corpus import TEXT
from workbench.masks.patterns import canonical

MOST_HEADER_BYTES = 2**24
MOST_DEPTH = 8
MOST_WINDOW = 4096  # batches ahead of a trainer
MOST_LISTED = 2**20  # examples in one message
MOST_CONTENT = 2**24  # characters of a text of an example


def parse_answer(frame: bytes | memoryview) -> dict[str, Any]:
    """The header of a message from a server.

    Raises:
        ValueError: it is none; the field, the rule and the value are named.
    """
    return parse_header(frame, ANSWERS, most_bytes=MOST_HEADER_BYTES, most_depth=MOST_DEPTH)


def _rule(value: Any) -> dict[str, Any]:
    """As JSON still: whoever reads images makes it a rule."""
    rule_from_json(value)
    found: dict[str, Any] = value
    return found


def _segments(value: Any) -> list[tuple[str, str]]:
    found = []
    for each in list_of_at_most(value, MOST_ITEMS):
        kind, content = list_of(each, 2)
        if not isinstance(kind, str) or kind not in (TEXT, IMAGE, AUDIO):
            raise ValueError(f"a segment is {TEXT}, {IMAGE} or {AUDIO}, got {kind!r:.40}")
        found.append((str(kind), str(fields.text(MOST_CONTENT)(content))))
    return found


def list_of(value: Any, length: int) -> list[Any]:
    """Exactly so many."""
    if len(list_of_at_most(value, length)) != length:
        raise ValueError(f"want {length} items, got {len(value)}")
    return list(value)


def _records(value: Any) -> list[tuple[int, list[tuple[str, str]], str]]:
    found = []
    for each in list_of_at_most(value, MOST_LISTED):
        number, segments, mask = list_of(each, 3)
        if not isinstance(mask, str):
            raise ValueError(f"want the text of a mask, got {mask!r:.40}")
        found.append((_id(number), _segments(segments), canonical(mask)))
    return found


def _skipped(value: Any) -> list[tuple[int, str, str]]:
    """Number, path and reason."""
    found = []
    for each in list_of_at_most(value, MOST_LISTED):
        number, path, reason = list_of(each, 3)
        found.append((_id(number), _said(path), _said(reason)))
    return found


def _microbatches(value: Any) -> list[list[dict[str, Any]]]:
    return [
        [fields.example(each) for each in list_of_at_most(held, MOST_LISTED)]
        for held in list_of_at_most(value, MOST_LISTED)
    ]


def _names(value: Any) -> list[str]:
    return [_said(each) for each in list_of_at_most(value, MOST_LISTED)]


def _pids(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError(f"want processes by name, got {value!r:.40}")
    return {_said(name): _count(pid) for name, pid in value.items()}


_id = fields.number(-MOST_NUMBER, MOST_NUMBER)
_count = fields.position
_least_one = fields.number(1, MOST_NUMBER)
_said = fields.text(MOST_TEXT * 4)
ANSWERS: Fields = {
    "task": {"task": fields.task, "id": _id, "segments": _segments, "rule": _rule},
    "welcome": {
        "done": _count,
        "window": fields.number(1, MOST_WINDOW),
        "batch_size": _least_one,
        "num_batches": _least_one,
        "rule": _rule,
    },
    "found": {"position": _count},
    "records": {"start": _count, "total": _count, "records": _records},
    "batch": {"position": _count, "microbatches": _microbatches, "skipped": _skipped},
    "status": {
        "producers": _count,
        "local": _pids,
        "lost": _count,
        "trainers": _names,
        "done": _count,
        "skipped": _skipped,
        "batches": _count,
        "waiting": _count,
        "lent": _count,
        "dropped": _names,
    },
    "still": {},
    "refused": {"reason": _said},
    "fatal": {"reason": _said},
}
