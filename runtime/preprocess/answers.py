"""Schema of messages from a preprocessing server to its peers, as strict as that of messages to it."""

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
    """Parse and check the header of a message from a server.

    Raises:
        ValueError: an invalid header; the message names the field, the rule and the value.
    """
    return parse_header(frame, ANSWERS, most_bytes=MOST_HEADER_BYTES, most_depth=MOST_DEPTH)


def _rule(value: Any) -> dict[str, Any]:
    """Check an image rule, which stays JSON until it is used."""
    rule_from_json(value)
    rule: dict[str, Any] = value
    return rule


def _segments(value: Any) -> list[tuple[str, str]]:
    segments = []
    for entry in list_of_at_most(value, MOST_ITEMS):
        kind, content = list_of(entry, 2)
        if not isinstance(kind, str) or kind not in (TEXT, IMAGE, AUDIO):
            raise ValueError(f"a segment is {TEXT}, {IMAGE} or {AUDIO}, got {kind!r:.40}")
        segments.append((str(kind), str(fields.text(MOST_CONTENT)(content))))
    return segments


def list_of(value: Any, length: int) -> list[Any]:
    """A list of exactly that length."""
    if len(list_of_at_most(value, length)) != length:
        raise ValueError(f"want {length} items, got {len(value)}")
    return list(value)


def _records(value: Any) -> list[tuple[int, list[tuple[str, str]], str]]:
    records = []
    for entry in list_of_at_most(value, MOST_LISTED):
        number, segments, mask = list_of(entry, 3)
        records.append((_id(number), _segments(segments), canonical(_said(mask))))
    return records


def _skipped(value: Any) -> list[tuple[int, str, str]]:
    """Check (number, path, reason) of skipped examples."""
    skipped = []
    for entry in list_of_at_most(value, MOST_LISTED):
        number, path, reason = list_of(entry, 3)
        skipped.append((_id(number), _said(path), _said(reason)))
    return skipped


def _microbatches(value: Any) -> list[list[dict[str, Any]]]:
    return [
        [fields.example(example) for example in list_of_at_most(microbatch, MOST_LISTED)]
        for microbatch in list_of_at_most(value, MOST_LISTED)
    ]


def _names(value: Any) -> list[str]:
    return [_said(name) for name in list_of_at_most(value, MOST_LISTED)]


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
