"""How a user's encoder reads its inputs: their keys, the items in them, and the size of each item."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.models.adapter import Adapter
from runtime.models.encoder import GRIDS, PIXELS, SIZES, EncoderAdapter, ItemSize
from runtime.models.patch_grid import step_of
from runtime.models.vision_rotary import QwenVisionAdapter
from workbench.data.sample import Segment

# Shape suffixes: C = channels, Y, X = height, width of an image, T = tokens, P = patches, D = numbers of one.


Given = TypeVar("Given")


def reader_of(model: PreTrainedModel, adapter: Adapter) -> EncoderAdapter:
    """The adapter, as one that can read users' items.

    Raises:
        ValueError: the layout of its items is not known.
    """
    if isinstance(adapter, EncoderAdapter):
        return adapter
    raise ValueError(
        f"module {adapter.module.name!r}: there is no rule for the items of {type(model).__name__}; "
        "a job file can plan and run it"
    )


def items_of(
    adapter: EncoderAdapter, key: str, inputs: Mapping[str, Any], places: Sequence[int | None]
) -> list[tuple[Tensor, ...]]:
    """[samples] items of each: images [C, Y, X], steps of videos [C, F, Y, X], or frames [bins, frames].

    An input is, per sample, one item, a tensor of several, a sequence of them, or None. Images
    padded into one tensor have their (height, width) in `image_sizes`. Patches, in one tensor for the
    whole batch or per sample, have (steps, rows, columns) in `image_grid_thw`; those of a video, each step of
    which is an item, are mixed with those of images.

    Args:
        adapter: of the encoder.
        key: of the items.
        inputs: by key, after the callback.
        places: per sample, number of special tokens of this encoder in its text; None: not there yet.

    Raises:
        ValueError: inputs that do not fit; the message names the sample.
    """
    name = adapter.module.name
    values = inputs[key]
    if isinstance(adapter, QwenVisionAdapter) and inputs.get(GRIDS) is not None:
        images = _cut_images(adapter, values, inputs[GRIDS], places)
        _check_samples(name, images, places)
        return images
    _check_samples(name, values, places)
    entries = [_of_sample(entry, adapter.item_dims, name, index) for index, entry in enumerate(values)]
    items = [tuple(window for item in entry for window in adapter.windows(item)) for entry in entries]
    sizes = inputs.get(SIZES)
    return items if sizes is None else _cropped(items, sizes, name)


def _check_samples(name: str, entries: Sequence[Any], places: Sequence[int | None]) -> None:
    if len(entries) != len(places):
        raise ValueError(f"encoder {name!r}: want input for {len(places)} samples, got {len(entries)}")


def _of_sample(entry: Any, num_dims: int, name: str, index: int) -> tuple[Tensor, ...]:
    if entry is None:
        return ()
    if not isinstance(entry, Tensor):
        return tuple(item for part in entry for item in _of_sample(part, num_dims, name, index))
    if entry.dim() == num_dims:
        return (entry,)
    if entry.dim() == num_dims + 1:
        return tuple(entry)
    raise ValueError(
        f"encoder {name!r}, sample {index}: an item has {num_dims} dims, several {num_dims + 1}, "
        f"got shape {tuple(entry.shape)}"
    )


def _cropped(images_of_samples: list[tuple[Tensor, ...]], sizes: Any, name: str) -> list[tuple[Tensor, ...]]:
    """Every image without its padding; `sizes` lists all images in order, or per sample."""
    flat = [tuple(size) for size in flattened(sizes)]
    num = sum(map(len, images_of_samples))
    if len(flat) != num:
        raise ValueError(f"encoder {name!r}: {SIZES} must name {num} images, got {len(flat)}")
    rest = iter(flat)
    return [tuple(_crop(image, next(rest), name) for image in images) for images in images_of_samples]


def _crop(image_CYX: Tensor, size: tuple[int, ...], name: str) -> Tensor:
    height, width = (int(side) for side in size)
    if not (0 < height <= image_CYX.shape[1] and 0 < width <= image_CYX.shape[2]):
        raise ValueError(
            f"encoder {name!r}: {SIZES} has {height} x {width} for an image of {tuple(image_CYX.shape)}"
        )
    return image_CYX[:, :height, :width]


def flattened(rows: Any) -> list[list[int]]:
    """[n, k] integers, from a tensor, or from one tensor or None per sample."""
    if isinstance(rows, Tensor):
        return [[int(value) for value in row] for row in rows.reshape(-1, rows.shape[-1])]
    return [row for entry in rows if entry is not None for row in flattened(torch.as_tensor(entry))]


def _cut_images(
    adapter: QwenVisionAdapter, pixels: Any, grids: Any, places: Sequence[int | None]
) -> list[tuple[Tensor, ...]]:
    name = adapter.module.name
    thw = flattened(grids)
    wrong = next((grid for grid in thw if min(grid) < 1), None)
    if wrong is not None:
        raise ValueError(f"encoder {name!r}: {GRIDS} must be >= 1 step, row and column, got {wrong}")
    patches_PD = _joined(pixels, name)
    wanted = sum(steps * rows * columns for steps, rows, columns in thw)
    if len(patches_PD) != wanted:
        raise ValueError(f"encoder {name!r}: {GRIDS} counts {wanted} patches, {PIXELS} has {len(patches_PD)}")
    sides = [(rows, columns) for steps, rows, columns in thw for _ in range(steps)]
    cut = patches_PD.split([rows * columns for rows, columns in sides])
    items = [
        _item(adapter, index, own_PD, grid)
        for index, (own_PD, grid) in enumerate(zip(cut, sides, strict=True))
    ]
    if isinstance(grids, Tensor):
        tokens = [rows * columns // adapter.merge**2 for rows, columns in sides]
        return per_sample(items, num_images(tokens, places, name))
    steps = [0 if entry is None else sum(grid[0] for grid in flattened([entry])) for entry in grids]
    return per_sample(items, steps)


def _item(adapter: QwenVisionAdapter, index: int, own_PD: Tensor, grid: tuple[int, int]) -> Tensor:
    """An image if its frames are equal, else a step of a video."""
    config: Any = adapter.config
    try:
        x_CFYX = step_of(own_PD, grid, config.patch_size, adapter.merge, config.temporal_patch_size)
    except ValueError as error:
        raise ValueError(f"encoder {adapter.module.name!r}, image {index}: {error}") from None
    is_image = torch.equal(x_CFYX, x_CFYX[:, :1].expand_as(x_CFYX))
    return x_CFYX[:, 0] if is_image else x_CFYX


def _joined(pixels: Any, name: str) -> Tensor:
    parts = [pixels] if isinstance(pixels, Tensor) else [entry for entry in pixels if entry is not None]
    if any(not isinstance(part, Tensor) or part.dim() != 2 for part in parts):
        raise ValueError(f"encoder {name!r}: with {GRIDS}, {PIXELS} must be patches [patches, numbers]")
    return torch.cat(parts) if parts else torch.empty(0, 0)


def num_images(tokens: Sequence[int], places: Sequence[int | None], name: str) -> list[int]:
    """[samples] number of images of each sample, by its special tokens: one per image, or one per token."""
    tokens_of_sample = [count for count in places if count is not None]
    if len(tokens_of_sample) != len(places):
        raise ValueError(
            f"encoder {name!r}: no token assigns images to samples; give {GRIDS} and {PIXELS} per sample"
        )
    if sum(tokens_of_sample) == len(tokens):
        return tokens_of_sample
    counts, next_image = [], 0
    for index, count in enumerate(tokens_of_sample):
        first, missing = next_image, count
        while missing > 0 and next_image < len(tokens):
            missing -= tokens[next_image]
            next_image += 1
        if missing:
            raise ValueError(
                f"encoder {name!r}, sample {index}: {count} special tokens are not those of whole images of "
                f"{', '.join(map(str, tokens[first:next_image])) or 'no'} tokens"
            )
        counts.append(next_image - first)
    if next_image != len(tokens):
        raise ValueError(
            f"encoder {name!r}: the texts have special tokens for {next_image} images, got {len(tokens)}"
        )
    return counts


def per_sample(images: Sequence[Given], numbers: Sequence[int]) -> list[tuple[Given, ...]]:
    """The first so many to the first sample, and so on."""
    rest = iter(images)
    return [tuple(next(rest) for _ in range(number)) for number in numbers]


def size_of(adapter: EncoderAdapter, item: Tensor, name: str, index: int) -> ItemSize:
    """Tokens and grid of one item.

    Raises:
        ValueError: the encoder cannot read an item of that shape.
    """
    size = adapter.item_size(tuple(item.shape))
    want = None
    if size.tokens_out:
        segment = Segment(name, 0, *size)
        want = adapter.nearest_shape(segment, tuple(item.shape))
    if want != tuple(item.shape):
        raise ValueError(
            f"encoder {name!r}, sample {index}: an item has shape {tuple(item.shape)}, the nearest that "
            f"it can read is {want or 'of one token'}"
        )
    return size
