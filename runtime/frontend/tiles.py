"""Users' images in several tiles: how a batch holds them, and their features put together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.frontend.items import flattened, num_images, per_sample
from runtime.models.adapter import MicrobatchData
from runtime.models.encoder import IMAGES, SIZES, EncoderAdapter, ItemSize
from runtime.models.tile_rows import put_together, without_padding
from runtime.models.vision import IMAGE_DIMS
from workbench.data.corpus import Tiled
from workbench.data.sample import Item, Segment
from workbench.model.families.tiles import GRIDS, NEWLINE, SHRINKS
from workbench.model.item_tokens import ends_lone_tiles, image_tokens, lone_tile

# Shape suffixes: N = tiles, C = channels, Y, X = height, width of a tile, T = tokens, D = width.


class Read(NamedTuple):
    """One item as its encoder reads it, and its size."""

    item: Tensor
    size: ItemSize


def words_of(tiles: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keys about tiles of a tower's configuration; ValueError for any other key."""
    if tiles is None:
        return {}
    for key in tiles:
        if key not in (GRIDS, SHRINKS):
            raise ValueError(f"tiles has the key {key!r}; want {GRIDS}, {SHRINKS} or none")
    return {**tiles, NEWLINE: True}


def tiled_items(
    adapter: EncoderAdapter, key: str, inputs: Mapping[str, Any], places: Sequence[int | None]
) -> list[tuple[Read, ...]]:
    """[samples] images of each, [N, C, Y, X]: an overview and the tiles of its grid.

    An input is one tensor [images, N, C, Y, X] for the whole batch, padded to the N of the largest image, or
    per sample one image, a tensor or a sequence of several, or None. `image_sizes` has (height, width) of
    every image. If several share a sample by `batch_num_images`, each is a single tile for LLaVA-OneVision's
    tower, as in transformers.

    Args:
        adapter: of the encoder.
        key: of the images.
        inputs: by key, after the callback.
        places: per sample, number of special tokens of this encoder in its text; None: not there yet.

    Raises:
        ValueError: inputs that do not fit; the message names the encoder.
    """
    name, values = adapter.module.name, inputs[key]
    if inputs.get(SIZES) is None:
        raise ValueError(
            f"encoder {name!r} puts tiles together: give {SIZES}, (height, width) of every image"
        )
    sizes_px = [(int(height), int(width)) for height, width in flattened(inputs[SIZES])]
    is_whole_batch = isinstance(values, Tensor) and values.dim() == IMAGE_DIMS + 2
    if not is_whole_batch and len(values) != len(places):
        raise ValueError(f"encoder {name!r}: want input for {len(places)} samples, got {len(values)}")
    by_sample = None if is_whole_batch else [_images(entry, name) for entry in values]
    images = list(values) if by_sample is None else [image for entry in by_sample for image in entry]
    if len(images) != len(sizes_px):
        raise ValueError(f"encoder {name!r}: {SIZES} must name {len(images)} images, got {len(sizes_px)}")
    alone = _are_alone(adapter, inputs.get(IMAGES), len(images))
    reads = [
        _read(adapter, image, size_px, is_alone=is_alone)
        for image, size_px, is_alone in zip(images, sizes_px, alone, strict=True)
    ]
    if by_sample is None:
        return per_sample(reads, num_images([read.size.tokens_out for read in reads], places, name))
    return per_sample(reads, [len(entry) for entry in by_sample])


def _images(entry: Any, name: str) -> list[Tensor]:
    if entry is None:
        return []
    if isinstance(entry, Tensor) and entry.dim() == IMAGE_DIMS + 1:
        return [entry]
    images = list(entry)
    if any(not isinstance(image, Tensor) or image.dim() != IMAGE_DIMS + 1 for image in images):
        raise ValueError(f"encoder {name!r}: an image is its tiles, [tiles, channels, height, width]")
    return images


def _are_alone(adapter: EncoderAdapter, images_per_sample: Any, num: int) -> list[bool]:
    """[images] whether each is cut into tiles, as it is the only one of its sample."""
    if images_per_sample is None or not ends_lone_tiles(adapter.module):
        return [True] * num
    numbers = [int(number) for number in images_per_sample]
    if sum(numbers) != num:
        raise ValueError(f"encoder {adapter.module.name!r}: {IMAGES} counts {sum(numbers)} images, got {num}")
    return [number == 1 for number in numbers for _ in range(number)]


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
    if not is_alone:
        return ItemSize(*lone_tile(adapter.module))
    tiled = image_tokens(adapter.module, *size_px)
    assert isinstance(tiled, Tiled), "the tower puts tiles together"
    return ItemSize(*tiled.tokens, grid=tiled.grid, unpadded=tiled.unpadded)


def tile_features(
    adapter: EncoderAdapter,
    model: PreTrainedModel,
    projector: nn.Module,
    newline_D: Tensor,
    image: Tensor,
    segment: Segment,
) -> Tensor:
    """[T, D] features of one image, by the user's own model and projector."""
    tiles = (image,) if image.dim() == IMAGE_DIMS else tuple(image)
    features_TD = torch.cat([adapter.features(model, tile_CYX) for tile_CYX in tiles])
    rows = adapter.tile_rows
    data = MicrobatchData(
        items=(Item(0, segment.k),),
        tokens_in=(len(features_TD),),
        tokens_out=(segment.tokens_out,),
        grids=(segment.grid,),
        unpadded=(segment.unpadded,),
    )
    unpadded_TD = without_padding(features_TD, data, lambda tile_TD: tile_TD, rows.along)
    return put_together(projector(unpadded_TD), data, newline_D, rows)
