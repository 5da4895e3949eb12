"""MiniCPM's vision tower: SigLIP's for images of any size, each patch at the nearest place of a table."""

from collections.abc import Sequence
from math import ceil, inf, log, sqrt
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.model.config_fields import Config, flag, text, whole
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example
from workbench.model.families.vit import siglip

SIDE = 2  # of the squares of patches that a projector merges
_SIDE_PX, _MOST_SLICES = 448, 9  # defaults: side of a square with an image's area, slices of an image
_MOST = 1024  # slices, far beyond any processor's
_GROWS = "small_image_upsize"
_PROCESSED = ("scale_resolution", "max_slice_nums", "slice_mode", _GROWS)


def _tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    """Whole squares of patches of an image, or of a slice, which is brought to the area of a square.

    Source: `find_best_resize` of transformers' image processors for MiniCPM-V 4.6 and MiniCPM-OCR, whose
    slices and images without slices may grow.

    Raises:
        ValueError: a processor by which sizes depend on what an image shows, or by which images do not grow.
    """
    if (grows := text(config, _GROWS, "always")) != "always":
        raise ValueError(f"{config['model_type']}: {_GROWS} must be always, got {grows!r}; nearest: always")
    patch = whole(config, "patch_size", 16)
    ratio = width_px / height_px
    height = int(whole(config, "scale_resolution", _SIDE_PX) / sqrt(ratio))
    rows, columns = (SIDE * _divided(px, SIDE * patch) for px in (height, int(height * ratio)))
    merged = whole(config, "spatial_merge_size", 1) ** 2
    return ItemTokens(rows * columns, rows * columns // merged)


def _divided(length: int, step: int) -> int:
    return max(round(length / step), 1)


def _splits(config: Config, height_px: int, width_px: int) -> Sequence[tuple[int, int]]:
    """The whole image, then its slices, before they are brought to size.

    Source: `get_refine_size` of the same processors.
    """
    whole_image = (height_px, width_px)
    rows, columns = _slices(config, height_px, width_px)
    if rows * columns == 1:
        return (whole_image,)
    slice_px = _divided(height_px, rows), _divided(width_px, columns)
    return (whole_image, *(slice_px,) * (rows * columns))


def _slices(config: Config, height_px: int, width_px: int) -> tuple[int, int]:
    """Rows and columns of slices: about as many as squares have the image's area, nearest to its shape.

    Of equally near grids the one with more rows counts.

    Source: `get_sliced_grid` of the same processors.
    """
    side, most = (
        whole(config, "scale_resolution", _SIDE_PX),
        whole(config, "max_slice_nums", _MOST_SLICES, most=_MOST),
    )
    wanted = min(ceil(height_px * width_px / side**2), most)
    if wanted <= 1 or not flag(config, "slice_mode", default=True):
        return 1, 1
    shape, nearest, grid = log(width_px / height_px), inf, (1, 1)
    for num in (each for each in (wanted - 1, wanted, wanted + 1) if 1 < each <= most):
        for rows in (each for each in range(1, num + 1) if num % each == 0):
            distance = abs(shape - log(num // rows / rows))
            if distance < nearest or (distance == nearest and rows > grid[0]):
                nearest, grid = distance, (rows, num // rows)
    return grid


def _processed(processor: Config) -> dict[str, Any]:
    return {key: processor[key] for key in _PROCESSED if processor.get(key) is not None}


MINICPM_VISION = Encoder(
    name="MiniCPM vision",
    role="vision",
    model_type="minicpmv4_6_vision",
    aliases=("minicpm_ocr_vision",),
    examples={"minicpm vision": Example(config=EXAMPLE_VIT, tokens=(64, 64))},
    make=siglip,
    image_tokens=_tokens,
    splits=_splits,
    processed=_processed,
)
