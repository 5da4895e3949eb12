"""The index of a data folder: its examples, and their texts as tokens. Imports no framework."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from workbench.bounded_file import read_bounded
from workbench.data.corpus import TEXT
from workbench.masks.patterns import CAUSAL, canonical

MOST_ID = 2**53
INDEX = "data.jsonl"
IMAGE = "image"
AUDIO = "audio"

# The byte vocabulary: a text is its UTF-8 bytes, so there is nothing to train or to download.
BOS = 256
EOS = 257
PLACEHOLDER_TOKEN = 258  # for an image or a clip where a sample is written as tokens
VOCAB_SIZE = 259


@dataclass(frozen=True, slots=True)
class Record:
    """One example: (kind, content) in sequence order; content is a text or a file's path.

    `mask` names the attention mask in the language model.
    """

    id: int
    segments: tuple[tuple[str, str], ...]
    mask: str = CAUSAL

    def of(self, kind: str) -> tuple[str, ...]:
        return tuple(content for name, content in self.segments if name == kind)


def read_records(folder: Path) -> tuple[Record, ...]:
    """The examples of a folder, in the order of `data.jsonl`.

    Raises:
        ValueError: no such file, an invalid line, a repeated id. The message names the line.
    """
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"data folder {folder}: no {INDEX} in it")
    records: list[Record] = []
    ids: set[int] = set()
    for number, line in enumerate(read_bounded(path).splitlines(), start=1):
        try:
            record = _record(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: not an example: {error}") from None
        if record.id in ids:
            raise ValueError(f"{path} line {number}: id {record.id} occurs twice")
        ids.add(record.id)
        records.append(record)
    if not records:
        raise ValueError(f"{path}: no examples in it")
    return tuple(records)


def _record(data: dict[str, Any]) -> Record:
    if data.keys() - {"mask"} != {"id", "segments"} or not isinstance(data["id"], int):
        raise ValueError("want the keys id (a whole number), segments and optionally mask")
    if isinstance(data["id"], bool) or abs(data["id"]) > MOST_ID:
        raise ValueError(f"want an id of at most {MOST_ID}, got {data['id']!r:.60}")
    mask = data.get("mask", CAUSAL)
    if not isinstance(mask, str):
        raise ValueError(f"mask must be a name or a call, got {mask!r:.60}")
    segments: list[tuple[str, str]] = []
    for segment in data["segments"]:
        ((kind, content),) = segment.items()
        if kind not in (TEXT, IMAGE, AUDIO) or not isinstance(content, str) or not content:
            raise ValueError(f"a segment is {TEXT}, {IMAGE} or {AUDIO} with its content, got {segment}")
        _check_content(kind, content)
        segments.append((kind, content))
    if not any(kind == TEXT for kind, _ in segments):
        raise ValueError("want at least one text")
    return Record(data["id"], tuple(segments), canonical(mask))


def _check_content(kind: str, content: str) -> None:
    """Raise ValueError for a text that is not valid UTF-8, and a file outside the folder."""
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{kind}: {error.object[error.start]!r} is half a character") from None
    if kind == TEXT:
        return
    if "\0" in content:
        raise ValueError(f"want the name of a file, got {content!r:.60}")
    path = PurePosixPath(content)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{kind} {content!r:.60} is not inside the folder; a link there may lead to it")


def text_tokens(record: Record, k: int) -> list[int]:
    """The bytes of text k; the first of a sample starts with BOS, the last ends with EOS."""
    texts = record.of(TEXT)
    tokens = list(texts[k].encode())
    return [*([BOS] if k == 0 else []), *tokens, *([EOS] if k == len(texts) - 1 else [])]
