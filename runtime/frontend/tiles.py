"""Users' images in several tiles, whose features are put together: how a batch gives them, what they make."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.frontend.items import counts, flattened, per_sample
from runtime.models.adapter import MicrobatchData
from runtime.models.encoder import IMAGES, SIZES, EncoderAdapter, ItemSize
from runtime.models.tile_rows import put_together, without_padding
from runtime.models.vision import IMAGE_DIMS
from workbench.data.corpus import Tiled
from workbench.data.sample import Item, Segment
from workbench.model.families.tiles import GRIDS, NEWLINE, SHRINKS
from workbench.model.item_tokens import ends_lone_tiles, image_tokens, native_tokens

# Shape suffixes: N = tiles, C = channels, Y, X = height, width of a tile, T = tokens, D = width.


class Read(NamedTuple):
    """One item as its encoder reads it, and its size."""

    item: Tensor
    size: ItemSize


def words_of(tiles: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a tower's configuration says of tiles; ValueError for a word that says nothing of them."""
    if tiles is None:
        return {}
    for word in tiles:
        if word not in (GRIDS, SHRINKS):
            raise ValueError(f"tiles says {word!r}; want {GRIDS} and {SHRINKS}, or nothing")
    return {**tiles, NEWLINE: True}


def tiled_items(
    adapter: EncoderAdapter, key: str, inputs: Mapping[str, Any], places: Sequence[int | None]
) -> list[tuple[Read, ...]]:
    """Per sample its images, each [N, C, Y, X]: an overview and the tiles of its grid.

    An input is one tensor [images, N, C, Y, X] of the whole batch, in which N is that of the largest image,
    or per sample one image, a tensor or a sequence of several, or None. `image_sizes` has (height, width) of
    every image. Where `batch_num_images` says that several share a sample, each is a single tile before
    LLaVA-OneVision's tower, as in transformers.

    Args:
        adapter: of the encoder.
        key: that holds the images.
        inputs: by key, after the callback.
        places: per sample, how many special tokens of this encoder its text has; None: it has none yet.

    Raises:
        ValueError: what does not fit, with the encoder named.
    """
    name, held = adapter.module.name, inputs[key]
    if inputs.get(SIZES) is None:
        raise ValueError(
            f"encoder {name!r} puts tiles together: give {SIZES}, (height, width) of every image"
        )
    sizes_px = [(int(height), int(width)) for height, width in flattened(inputs[SIZES])]
    listed = held.dim() == IMAGE_DIMS + 2 if isinstance(held, Tensor) else False
    if not listed and len(held) != len(places):
        raise ValueError(f"encoder {name!r}: want input for {len(places)} samples, got {len(held)}")
    by_sample = None if listed else [_images(entry, name) for entry in held]
    images = list(held) if by_sample is None else [image for entry in by_sample for image in entry]
    if len(images) != len(sizes_px):
        raise ValueError(f"encoder {name!r}: {SIZES} must name {len(images)} images, got {len(sizes_px)}")
    alone = _alone(adapter, inputs.get(IMAGES), len(images))
    reads = [
        _read(adapter, image, size_px, is_alone=each)
        for image, size_px, each in zip(images, sizes_px, alone, strict=True)
    ]
    if by_sample is None:
        own = counts([read.size.tokens_out for read in reads], places, name)
    else:
        own = [len(entry) for entry in by_sample]
    return per_sample(reads, own)


def _images(entry: Any, name: str) -> list[Tensor]:
    if entry is None:
        return []
    if isinstance(entry, Tensor) and entry.dim() == IMAGE_DIMS + 1:
        return [entry]
    images = list(entry)
    if any(not isinstance(each, Tensor) or each.dim() != IMAGE_DIMS + 1 for each in images):
        raise ValueError(f"encoder {name!r}: an image is its tiles, [tiles, channels, height, width]")
    return images


def _alone(adapter: EncoderAdapter, said: Any, num: int) -> list[bool]:
    """Per image whether it is cut into tiles, as no other is in its sample."""
    if said is None or not ends_lone_tiles(adapter.module):
        return [True] * num
    numbers = [int(each) for each in said]
    if sum(numbers) != num:
        raise ValueError(f"encoder {adapter.module.name!r}: {IMAGES} counts {sum(numbers)} images, got {num}")
    return [each == 1 for each in numbers for _ in range(each)]


def _read(adapter: EncoderAdapter, image: Tensor, size_px: tuple[int, int], *, is_alone: bool) -> Read:
    size = _size(adapter, size_px, is_alone=is_alone)
    segment = Segment(adapter.module.modality, 0, *size)
    want = (segment.num_tiles, *adapter.raw_shape(segment)[-IMAGE_DIMS:])
    if len(image) < segment.num_tiles or tuple(image.shape[1:]) != want[1:]:
        raise ValueError(
            f"encoder {adapter.module.name!r}: an image of {size_px[0]} x {size_px[1]} px has tiles of shape "
            f"{want}, got {tuple(image.shape)}"
        )
    return Read(image[: segment.num_tiles] if segment.num_tiles > 1 else image[0], size)


def _size(adapter: EncoderAdapter, size_px: tuple[int, int], *, is_alone: bool) -> ItemSize:
    native = native_tokens(adapter.module)
    assert native is not None, "its tiles have one size"
    if not is_alone:
        return ItemSize(native[0], native[1] + 1)
    found = image_tokens(adapter.module, *size_px)
    assert isinstance(found, Tiled), "asked of what puts tiles together"
    return ItemSize(*found.tokens, grid=found.grid, unpadded=found.unpadded)


def tile_features(
    adapter: EncoderAdapter,
    model: PreTrainedModel,
    projector: nn.Module,
    newline_D: Tensor,
    image: Tensor,
    segment: Segment,
) -> Tensor:
    """[T, D] of one image behind the user's own model and projector."""
    tiles = (image,) if image.dim() == IMAGE_DIMS else tuple(image)
    seen_TD = torch.cat([adapter.features(model, tile_CYX) for tile_CYX in tiles])
    rows = adapter.tile_rows
    data = MicrobatchData(
        items=(Item(0, segment.k),),
        tokens_in=(len(seen_TD),),
        tokens_out=(segment.tokens_out,),
        grids=(segment.grid,),
        unpadded=(segment.unpadded,),
    )
    kept_TD = without_padding(seen_TD, data, lambda tile_TD: tile_TD, rows.along)
    return put_together(projector(kept_TD), data, newline_D, rows)
