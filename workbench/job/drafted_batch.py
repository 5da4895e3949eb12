"""The batch of a drafted job: equal samples, or samples with the sizes of given data."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.data.size_files import read_sizes
from workbench.data.sizes import Sizes
from workbench.model.composites.composite import AUDIO, TILES, Parts
from workbench.model.composites.vision import PAGE_PX
from workbench.model.item_tokens import (
    class_tokens,
    clip_tokens,
    evenly_near,
    merged_tokens,
    packs_tiles,
    split_px,
    takes_any_size,
    tile_tokens,
    video_of,
)
from workbench.model.model_graph import TEXT, ModelGraph, Module

MOST_ROWS = 10_000  # rows of a user's data that are read
MOST_SIZES = 16  # distinct sizes of images and videos in a mixture


def equal_samples(
    parts: Parts | None, graph: ModelGraph, text_tokens: int, image_px: tuple[int, int] | None
) -> dict[str, Any]:
    """The `fixed` entry of a job: one item of every encoder in each sample."""
    items: dict[str, Any] = {}
    for module in _encoders(graph, parts):
        assert parts is not None
        entry = dict(parts.modules[module.name].items)
        if not entry and takes_any_size(module):  # an encoder of any size whose family is usually of one size
            entry["images"] = [PAGE_PX]
        if "images" in entry and image_px is not None:
            entry["images"] = [list(image_px)]
        items[module.modality] = {"each": 1, **entry}
    if image_px is not None and not any("images" in entry for entry in items.values()):
        raise ValueError(
            "--image: want a model with an encoder for images of any size, this one has none; leave it out"
        )
    return {"fixed": {"text_tokens": text_tokens, **({"items": items} if items else {})}}


def like_data(parts: Parts | None, graph: ModelGraph, data: Path) -> dict[str, Any]:
    """The `mixture` entry of a job, with items and text like the first rows of a data set.

    Raises:
        ValueError: no sizes, as `read_sizes`, or images, videos or clips that no encoder takes.
    """
    rows = read_sizes(data)[:MOST_ROWS]
    texts = [sum(row.text_tokens) for row in rows]
    encoders = {module.modality == AUDIO: module for module in _encoders(graph, parts)}
    for is_audio, what in ((False, "images or videos"), (True, "clips")):
        if is_audio not in encoders and any(_items(row, is_audio=is_audio) for row in rows):
            raise ValueError(f"data {str(data)!r} has {what}, the model has no encoder for them")
    for video in (video for row in rows for video in row.videos):
        video_of(encoders[False], *video)  # raises where no rule takes it
    items = {
        module.modality: _mixed(module, rows, _cut(module, parts, is_audio=is_audio))
        for is_audio, module in encoders.items()
        if any(_items(row, is_audio=is_audio) for row in rows)
    }
    mixture = {"seed": 0, "text_tokens": [max(1, min(texts)), max(texts)]}
    return {"mixture": {**mixture, **({"items": items} if items else {})}}


def _encoders(graph: ModelGraph, parts: Parts | None) -> list[Module]:
    return [module for module in graph.modules if module.modality != TEXT and parts is not None]


def _items(row: Sizes, *, is_audio: bool) -> Sequence[Any]:
    return row.audio_s if is_audio else (*row.images, *row.videos)


def _cut(module: Module, parts: Parts | None, *, is_audio: bool) -> Callable[[Any], Sequence[Any]]:
    """The rule that turns an image or clip into items: windows of a clip, tiles of an image, or its size."""
    if is_audio:
        return lambda duration_s: clip_tokens(module, duration_s)
    if parts is not None and TILES in parts.notes and not _is_sized(module):
        return lambda size: tile_tokens(module, *size)
    return lambda size: split_px(module, *size) if len(size) == 2 else (size,)  # else of a video


def _is_sized(module: Module) -> bool:
    """Whether sizes of images tell it how many tokens they make."""
    return takes_any_size(module) or packs_tiles(module)


def _runnable(module: Module, tile: ItemTokens) -> ItemTokens:
    """The tile's tokens as the runtime makes them: it cuts off no padding."""
    tokens_in, merged = tile.tokens_in - class_tokens(module.layers[0]), merged_tokens(module.layers[-1])
    tokens_out = evenly_near(tokens_in, tile.tokens_out) if merged == 1 else tokens_in // merged
    return tile._replace(tokens_out=tokens_out)


def _mixed(module: Module, rows: Sequence[Sizes], cut: Callable[[Any], Sequence[Any]]) -> dict[str, Any]:
    """A mixture's entry for one encoder; each window of a clip and each tile of an image is an item."""
    is_audio = module.modality == AUDIO
    items_of_rows = [
        [item for items in _items(row, is_audio=is_audio) for item in cut(items)] for row in rows
    ]
    entry: dict[str, Any] = {"most": max(map(len, items_of_rows))}
    if without := sum(not items for items in items_of_rows):
        entry["missing"] = round(without / len(rows), 3)
    sizes = [size for items in items_of_rows for size in items]
    if isinstance(sizes[0], ItemTokens):
        tokens: ItemTokens = sorted(sizes)[len(sizes) // 2]
        entry["tokens"] = list(tokens if is_audio else _runnable(module, tokens))
    elif _is_sized(module):
        entry |= _sized(sizes)
    return entry


def _sized(sizes: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The most common image sizes; with videos, evenly spaced quantiles of all sizes."""
    if all(len(size) == len(PAGE_PX) for size in sizes):
        return {"images": [list(size) for size, _ in Counter(sizes).most_common(MOST_SIZES)]}
    ordered, num = sorted(sizes, key=prod), min(MOST_SIZES, len(sizes))
    quantiles = [ordered[(2 * step + 1) * len(sizes) // (2 * num)] for step in range(num)]
    images = [list(size) for size in quantiles if len(size) == len(PAGE_PX)]
    videos = [list(size) for size in quantiles if len(size) > len(PAGE_PX)]
    return {"videos": videos} | ({"images": images} if images else {})
