"""SigLIP 2 for images of any size: SigLIP's tower with positions interpolated from a square table."""

from collections.abc import Sequence
from math import ceil, floor, isqrt, sqrt
from typing import Any

from workbench.data.corpus import ItemTokens
from workbench.data.tilings import internvl_tiles
from workbench.model.config_fields import Config, flag, number, text, whole
from workbench.model.families import glm_vision
from workbench.model.families.family import EXAMPLE_VIT, Encoder, Example, Tower
from workbench.model.families.qwen_vision import image_limits
from workbench.model.families.tiles import COSMOS_EDGE, LFM2_VL, TILING
from workbench.model.families.vit import siglip

_PATCHES = 256  # default rows of the table, and patches of the largest image
_SEARCHED, _PRECISION = 100.0, 1e-5  # scales of an image, as transformers bisects them


def _siglip2(config: Config) -> Tower:
    patch = whole(config, "patch_size", 16)
    return siglip({**config, "image_size": _side(config) * patch})


def _side(config: Config) -> int:
    """Rows of the square table of positions.

    Raises:
        ValueError: no square.
    """
    num = whole(config, "num_patches", _PATCHES)
    if isqrt(num) ** 2 != num:
        nearest = round(sqrt(num)) ** 2
        raise ValueError(
            f"{config['model_type']}: num_patches must be a square, got {num}; nearest: {nearest}"
        )
    return isqrt(num)


def _tokens(config: Config, height_px: int, width_px: int) -> ItemTokens:
    tiling = text(config, TILING, "")
    if tiling == COSMOS_EDGE:
        return glm_vision.image_tokens({**_COSMOS_LIMITS, **config}, height_px, width_px)
    rule = _lfm2_sides if tiling == LFM2_VL else _siglip2_sides
    rows, columns = (side // whole(config, "patch_size", 16) for side in rule(config, height_px, width_px))
    merged = whole(config, "spatial_merge_size", 1) ** 2
    return ItemTokens(rows * columns, rows * columns // merged)


def _siglip2_sides(config: Config, height_px: int, width_px: int) -> tuple[int, int]:
    """(height, width) in pixels: whole patches, as many as `max_num_patches` allows, also of small images.

    Source: `get_image_size_for_max_num_patches` of transformers' SigLIP 2 image processor.
    """
    patch, most = whole(config, "patch_size", 16), whole(config, "max_num_patches", _PATCHES)

    def patches(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, ceil(px * scale / patch)) for px in (height_px, width_px))
        return rows, columns

    low, high = _PRECISION / 10, _SEARCHED
    while high - low >= _PRECISION:
        middle = (low + high) / 2
        rows, columns = patches(middle)
        low, high = (middle, high) if rows * columns <= most else (low, middle)
    rows, columns = patches(low)
    return rows * patch, columns * patch


def _lfm2_sides(config: Config, height_px: int, width_px: int) -> tuple[int, int]:
    """(height, width) in pixels: whole squares of patches, of `min_image_tokens` to `max_image_tokens`.

    Source: `smart_resize` of transformers' LFM2-VL image processor.
    """
    square = whole(config, "patch_size", 16) * whole(config, "spatial_merge_size", 1)
    least, most = (
        square**2 * whole(config, f"{which}_image_tokens", usual) for which, usual in _LIMITS.items()
    )
    sides = [max(square, round(px / square) * square) for px in (height_px, width_px)]
    area = sides[0] * sides[1]
    if area > most:
        shrink = sqrt(height_px * width_px / most)
        sides = [max(square, floor(px / shrink / square) * square) for px in (height_px, width_px)]
    elif area < least:
        grow = sqrt(least / (height_px * width_px))
        sides = [ceil(px * grow / square) * square for px in (height_px, width_px)]
    return sides[0], sides[1]


_LIMITS = {"min": 64, "max": 256}
_COSMOS_LIMITS = {  # as of transformers' image processor of Cosmos 3 Edge, which is GLM's
    "patch_size": 16,
    "temporal_patch_size": 1,
    "min_pixels": 256**2,
    "max_pixels": 4096**2,
}
_DOWNSAMPLED = 2  # default side of the squares of patches that are merged
_TOLERANCE = 2.0  # default share of the largest area, from which on an image is cut


def _splits(config: Config, height_px: int, width_px: int) -> Sequence[tuple[int, int]]:
    """An image, or for LFM2-VL the tiles of a large one, and all of it once more.

    Source: `resize_and_split` of transformers' LFM2-VL image processor.
    """
    whole_image = (height_px, width_px)
    if text(config, TILING, "") != LFM2_VL or not flag(config, "do_image_splitting", default=True):
        return (whole_image,)
    patch = whole(config, "patch_size", 16)
    square = patch * whole(config, "downsample_factor", _DOWNSAMPLED)
    height, width = (max(patch, round(px / square) * square) for px in whole_image)
    most = square**2 * whole(config, "max_image_tokens", _LIMITS["max"])
    least_tiles, most_tiles = (
        whole(config, key, usual) for key, usual in (("min_tiles", 2), ("max_tiles", 10))
    )
    is_large = height * width > most * number(config, "max_pixels_tolerance", _TOLERANCE)
    if not is_large or least_tiles == most_tiles == 1:
        return (whole_image,)
    side = whole(config, "tile_size", 512)
    num = internvl_tiles(height_px, width_px, tile_px=side, least=least_tiles, most=most_tiles)
    shown = (whole_image,) if num > 1 and flag(config, "use_thumbnail", default=True) else ()
    return (*((side, side),) * max(1, num - 1), *shown)


def _processed(processor: Config) -> dict[str, Any]:
    named = {key: processor[key] for key in _PROCESSED if processor.get(key) is not None}
    return named | image_limits(processor)


_PROCESSED = (
    *("max_num_patches", "min_image_tokens", "max_image_tokens", "max_pixels_tolerance", "downsample_factor"),
    *("do_image_splitting", "use_thumbnail", "min_tiles", "max_tiles", "tile_size"),
)


def _check(config: Config) -> None:
    _side(config)


SIGLIP2 = Encoder(
    name="SigLIP 2, any size",
    role="vision",
    model_type="siglip2_vision_model",
    examples={
        "siglip 2": Example(
            config={key: value for key, value in EXAMPLE_VIT.items() if key != "image_size"}
            | {"num_patches": 64},
            tokens=(64, 64),
        )
    },
    make=_siglip2,
    image_tokens=_tokens,
    splits=_splits,
    processed=_processed,
    check_config=_check,
)
