"""The batch of a first job file: equal samples, or a mixture like those of a user's own data."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.data.size_files import read_sizes
from workbench.data.sizes import Sizes
from workbench.model.composites.composite import AUDIO, Parts
from workbench.model.composites.vision import PAGE_PX
from workbench.model.item_tokens import clip_tokens, native_tokens
from workbench.model.model_graph import TEXT, ModelGraph, Module

MICROBATCHES = 8  # a replica and step, to start from
MOST_ROWS = 10_000  # of a user's data that are looked at
MOST_SIZES = 16  # of images, the commonest


def equal_samples(
    parts: Parts | None, graph: ModelGraph, text_tokens: int, image_px: tuple[int, int] | None
) -> dict[str, Any]:
    """One item of every encoder in each sample: `fixed` of a job."""
    items: dict[str, Any] = {}
    for module in _encoders(graph, parts):
        assert parts is not None
        said = dict(parts.modules[module.name].items)
        if not said and native_tokens(module) is None:  # a tower of any size where others have one
            said["images"] = [PAGE_PX]
        if "images" in said and image_px is not None:
            said["images"] = [list(image_px)]
        items[module.modality] = {"each": 1, **said}
    return {"fixed": {"text_tokens": text_tokens, **({"items": items} if items else {})}}


def like_data(parts: Parts | None, graph: ModelGraph, data: Path) -> dict[str, Any]:
    """As many items and as much text as the first rows of a data set have: `mixture` of a job.

    Raises:
        ValueError: no sizes, as `read_sizes` says it, or images or clips that no encoder takes.
    """
    rows = read_sizes(data)[:MOST_ROWS]
    texts = [sum(row.text_tokens) for row in rows]
    encoders = {module.modality == AUDIO: module for module in _encoders(graph, parts)}
    for is_audio, what in ((False, "images"), (True, "clips")):
        if is_audio not in encoders and any(_items(row, is_audio=is_audio) for row in rows):
            raise ValueError(f"data {str(data)!r} has {what}, the model has no encoder for them")
    items = {
        module.modality: _mixed(module, rows, is_audio=is_audio)
        for is_audio, module in encoders.items()
        if any(_items(row, is_audio=is_audio) for row in rows)
    }
    drawn = {"seed": 0, "text_tokens": [max(1, min(texts)), max(texts)]}
    return {"mixture": {**drawn, **({"items": items} if items else {})}}


def _encoders(graph: ModelGraph, parts: Parts | None) -> list[Module]:
    return [module for module in graph.modules if module.modality != TEXT and parts is not None]


def _items(row: Sizes, *, is_audio: bool) -> Sequence[Any]:
    return row.audio_s if is_audio else row.images


def _mixed(module: Module, rows: Sequence[Sizes], *, is_audio: bool) -> dict[str, Any]:
    held = [_items(row, is_audio=is_audio) for row in rows]
    said: dict[str, Any] = {"most": max(map(len, held))}
    if without := sum(not each for each in held):
        said["missing"] = round(without / len(rows), 3)
    sizes = [size for each in held for size in each]
    if is_audio:
        middle = sorted(sizes)[len(sizes) // 2]
        said["tokens"] = list(clip_tokens(module, middle)[0])
    elif native_tokens(module) is None:
        said["images"] = [list(size) for size, _ in Counter(sizes).most_common(MOST_SIZES)]
    return said
