"""One preprocessed example, and its encoding in messages: a JSON header and raw arrays, never code."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.data.records import IMAGE, Record, text_tokens
from runtime.preprocess.images import Patches, Rule, preprocess_image
from workbench.data.corpus import TEXT, ItemTokens

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of its texts and patches of its images, each in sequence order."""

    id: int
    texts: tuple[NDArray[np.int32], ...]
    images: tuple[Patches, ...]

    @property
    def tokens_in(self) -> int:
        """Tokens of all images within the encoder."""
        return sum(image.tokens.tokens_in for image in self.images)

    @property
    def tokens(self) -> int:
        """Tokens in the language model."""
        return sum(len(text) for text in self.texts) + sum(i.tokens.tokens_out for i in self.images)


def preprocess(record: Record, folder: Path, rule: Rule) -> Example:
    """Preprocess one example, in a producer or in a trainer without producers."""
    texts = tuple(np.array(text_tokens(record, k), np.int32) for k in range(len(record.of(TEXT))))
    images = tuple(preprocess_image(folder / path, rule) for path in record.of(IMAGE))
    return Example(record.id, texts, images)


def example_frames(example: Example) -> tuple[dict[str, Any], list[Buffer]]:
    """Encode an example as (description, buffers); `example_of` decodes them."""
    described = [[*image.grid, image.values.shape[1], image.tokens.tokens_out] for image in example.images]
    header = {"id": example.id, "texts": [len(text) for text in example.texts], "images": described}
    arrays: list[NDArray[Any]] = [*example.texts, *(image.values for image in example.images)]
    return header, [array.data.cast("B") if array.size else b"" for array in arrays]


def num_frames(header: Mapping[str, Any]) -> int:
    """Number of buffers of a description."""
    return len(header["texts"]) + len(header["images"])


def example_of(header: Mapping[str, Any], buffers: Sequence[Buffer]) -> Example:
    """Decode an example without copying; arrays are read-only views.

    Raises:
        ValueError: a buffer has another size than in its description.
    """
    lengths = [4 * length for length in header["texts"]]
    lengths += [rows * columns * width for rows, columns, width, _ in header["images"]]
    sizes = [len(buffer) for buffer in buffers]
    if sizes != lengths:
        raise ValueError(f"example {header['id']}: want buffers of {lengths} bytes, got {sizes}")
    split = len(header["texts"])
    texts = tuple(np.frombuffer(buffer, np.int32) for buffer in buffers[:split])
    images = tuple(
        Patches(
            np.frombuffer(buffer, np.uint8).reshape(rows * columns, width),
            (rows, columns),
            ItemTokens(rows * columns, tokens_out),
        )
        for buffer, (rows, columns, width, tokens_out) in zip(buffers[split:], header["images"], strict=True)
    )
    return Example(header["id"], texts, images)


def packed(kind: str, **content: Any) -> bytes:
    """The header frame of a message."""
    return json.dumps({"kind": kind, **content}, separators=(",", ":")).encode()
