"""The batch of a drafted job: equal samples, or as many items as the rows of somebody's data have."""

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
    takes_any_size,
    tile_tokens,
    video_of,
)
from workbench.model.model_graph import TEXT, ModelGraph, Module

MOST_ROWS = 10_000  # of a user's data that are looked at
MOST_SIZES = 16  # of images and videos


def equal_samples(
    parts: Parts | None, graph: ModelGraph, text_tokens: int, image_px: tuple[int, int] | None
) -> dict[str, Any]:
    """One item of every encoder in each sample: `fixed` of a job."""
    items: dict[str, Any] = {}
    for module in _encoders(graph, parts):
        assert parts is not None
        said = dict(parts.modules[module.name].items)
        if not said and takes_any_size(module):  # a tower of any size where others have one
            said["images"] = [PAGE_PX]
        if "images" in said and image_px is not None:
            said["images"] = [list(image_px)]
        items[module.modality] = {"each": 1, **said}
    if image_px is not None and not any("images" in said for said in items.values()):
        raise ValueError(
            "--image: want a model with an encoder for images of any size, this one has none; leave it out"
        )
    return {"fixed": {"text_tokens": text_tokens, **({"items": items} if items else {})}}


def like_data(parts: Parts | None, graph: ModelGraph, data: Path) -> dict[str, Any]:
    """As many items and as much text as the first rows of a data set have: `mixture` of a job.

    Raises:
        ValueError: no sizes, as `read_sizes` says it, or images, videos or clips that no encoder takes.
    """
    rows = read_sizes(data)[:MOST_ROWS]
    texts = [sum(row.text_tokens) for row in rows]
    encoders = {module.modality == AUDIO: module for module in _encoders(graph, parts)}
    for is_audio, what in ((False, "images or videos"), (True, "clips")):
        if is_audio not in encoders and any(_items(row, is_audio=is_audio) for row in rows):
            raise ValueError(f"data {str(data)!r} has {what}, the model has no encoder for them")
    for video in (video for row in rows for video in row.videos):
        video_of(encoders[False], *video)  # says whether a rule takes it
    items = {
        module.modality: _mixed(module, rows, _cut(module, parts, is_audio=is_audio))
        for is_audio, module in encoders.items()
        if any(_items(row, is_audio=is_audio) for row in rows)
    }
    drawn = {"seed": 0, "text_tokens": [max(1, min(texts)), max(texts)]}
    return {"mixture": {**drawn, **({"items": items} if items else {})}}


def _encoders(graph: ModelGraph, parts: Parts | None) -> list[Module]:
    return [module for module in graph.modules if module.modality != TEXT and parts is not None]


def _items(row: Sizes, *, is_audio: bool) -> Sequence[Any]:
    return row.audio_s if is_audio else (*row.images, *row.videos)


def _cut(module: Module, parts: Parts | None, *, is_audio: bool) -> Callable[[Any], Sequence[Any]]:
    """What an image or a clip of the data counts as: windows of a clip, tiles of an image, or its size."""
    if is_audio:
        return lambda duration_s: clip_tokens(module, duration_s)
    if parts is not None and TILES in parts.notes and not _is_sized(module):
        return lambda size: tile_tokens(module, *size)
    return lambda size: [size]


def _is_sized(module: Module) -> bool:
    """Whether sizes of images tell it how many tokens they make."""
    return takes_any_size(module) or packs_tiles(module)


def _runnable(module: Module, tile: ItemTokens) -> ItemTokens:
    """As nearly so many tokens of a tile as the runtime makes of it, which cuts off no padding."""
    kept, merged = tile.tokens_in - class_tokens(module.layers[0]), merged_tokens(module.layers[-1])
    made = evenly_near(kept, tile.tokens_out) if merged == 1 else kept // merged
    return tile._replace(tokens_out=made)


def _mixed(module: Module, rows: Sequence[Sizes], cut: Callable[[Any], Sequence[Any]]) -> dict[str, Any]:
    """Words of a mixture; a clip counts as its windows and an image as its tiles, each an item."""
    is_audio = module.modality == AUDIO
    held = [[item for each in _items(row, is_audio=is_audio) for item in cut(each)] for row in rows]
    said: dict[str, Any] = {"most": max(map(len, held))}
    if without := sum(not each for each in held):
        said["missing"] = round(without / len(rows), 3)
    sizes = [size for each in held for size in each]
    if isinstance(sizes[0], ItemTokens):
        tokens: ItemTokens = sorted(sizes)[len(sizes) // 2]
        said["tokens"] = list(tokens if is_audio else _runnable(module, tokens))
    elif _is_sized(module):
        said |= _sized(sizes)
    return said


def _sized(sizes: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The commonest images; where there are videos, of all by size as many in even steps."""
    if all(len(size) == len(PAGE_PX) for size in sizes):
        return {"images": [list(size) for size, _ in Counter(sizes).most_common(MOST_SIZES)]}
    ordered, num = sorted(sizes, key=prod), min(MOST_SIZES, len(sizes))
    chosen = [ordered[(2 * place + 1) * len(sizes) // (2 * num)] for place in range(num)]
    images = [list(size) for size in chosen if len(size) == len(PAGE_PX)]
    videos = [list(size) for size in chosen if len(size) > len(PAGE_PX)]
    return {"videos": videos} | ({"images": images} if images else {})
