"""Converts an image file to patches: decode, resize by the model's rule, cut."""

import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from workbench.data.corpus import ItemTokens, qwen2_vl_resize, square_image_tokens

# Shape suffixes: H = height, W = width, C = channels, P = patches, F = values of a patch,
# R, Q = rows and columns of merge blocks, M = side of a merge block, S = side of a patch.

Pixels = NDArray[np.uint8]
FORMATS = ("JPEG", "PNG")
MOST_SIDE_PX = 2**14  # of a resized image
MOST_PIXELS = MOST_SIDE_PX**2


class MalformedImageError(ValueError):
    """A file without a readable image; `path` is its path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"image {path}: {reason}")
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareRule:
    """CLIP and SigLIP: every image becomes one square; patches in raster order."""

    image_px: int
    patch_px: int
    channels: int = 3
    kind: str = "square"

    def __post_init__(self) -> None:
        square_image_tokens(self.image_px, self.patch_px)
        if self.image_px > MOST_SIDE_PX:
            raise ValueError(f"images are at most {MOST_SIDE_PX} pixels wide, got {self.image_px}")
        if self.channels not in (1, 3):
            raise ValueError(f"images can be read with 1 or 3 channels, got {self.channels}")

    @property
    def merge_side(self) -> int:
        return 1

    @property
    def filter(self) -> Image.Resampling:
        return Image.Resampling.BILINEAR

    def size(self, height_px: int, width_px: int) -> tuple[int, int]:
        """(height, width) after resizing; incomplete patches at the ends are dropped later."""
        del height_px, width_px
        return self.image_px, self.image_px


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenRule:
    """Qwen2-VL: sides become multiples of a merge block; patches in order of merge blocks."""

    patch_px: int = 14
    merge_side: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    kind: str = "qwen2-vl"

    def __post_init__(self) -> None:
        if min(self.patch_px, self.merge_side) < 1 or not 1 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                "qwen2-vl rule: want patch_px and merge_side >= 1 and 1 <= min_pixels <= max_pixels, got "
                f"{self.patch_px}, {self.merge_side}, {self.min_pixels} and {self.max_pixels}"
            )
        if max(self.max_pixels, self.patch_px * self.merge_side) > MOST_PIXELS:
            raise ValueError(
                f"qwen2-vl rule: images have at most {MOST_PIXELS} pixels, got {self.max_pixels}"
            )

    @property
    def channels(self) -> int:
        return 3

    @property
    def filter(self) -> Image.Resampling:
        return Image.Resampling.BICUBIC

    def size(self, height_px: int, width_px: int) -> tuple[int, int]:
        """(height, width) after resizing."""
        return qwen2_vl_resize(
            height_px,
            width_px,
            multiple_px=self.patch_px * self.merge_side,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )


Rule = SquareRule | QwenRule


def rule_as_json(rule: Rule) -> dict[str, Any]:
    return asdict(rule)


def rule_from_json(data: Mapping[str, Any]) -> Rule:
    """Decode a rule; ValueError where it is invalid."""
    kinds: dict[str, type[Rule]] = {"square": SquareRule, "qwen2-vl": QwenRule}
    if not isinstance(data, Mapping) or str(data.get("kind")) not in kinds:
        kind_given = data.get("kind") if isinstance(data, Mapping) else data
        raise ValueError(f"image rule must be square or qwen2-vl, got {kind_given!r:.60}")
    kind = kinds[str(data["kind"])]
    names = [field.name for field in fields(kind)]
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if not needed <= data.keys() <= set(names):
        raise ValueError(f"image rule {data['kind']}: want {', '.join(names)}, got {', '.join(data):.80}")
    for name, value in data.items():
        if name != "kind" and (type(value) is not int or not 1 <= value <= MOST_PIXELS):
            raise ValueError(f"image rule: want {name} from 1 to {MOST_PIXELS}, got {value!r:.40}")
    return kind(**data)


@dataclass(frozen=True, slots=True)
class Patches:
    """One image: [P, F] bytes, the grid (rows, columns) of its patches, and its tokens."""

    values: Pixels
    grid: tuple[int, int]
    tokens: ItemTokens


def read_pixels(path: Path, channels: int, rule: Rule | tuple[int, int], filter_: Image.Resampling) -> Pixels:
    """[H, W, C] bytes of a JPEG or PNG file, resized by the rule or to (height, width).

    Raises:
        MalformedImageError: a missing, damaged or implausibly large file, or another format.
    """
    mode = "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                height, width = rule if isinstance(rule, tuple) else rule.size(image.height, image.width)
                resized = image.convert(mode).resize((width, height), filter_)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MalformedImageError(path, f"cannot be read: {error}") from None
    except Image.DecompressionBombWarning as error:
        raise MalformedImageError(path, f"cannot be read: {error}") from None
    return np.array(resized, dtype=np.uint8).reshape(height, width, channels)


def cut(pixels_HWC: Pixels, patch_px: int, merge_side: int = 1) -> tuple[Pixels, tuple[int, int]]:
    """[P, F] patches, each ordered by channel, and their grid; incomplete ones at the ends are dropped.

    Patches of one merge block are consecutive, as Qwen2-VL's merger reads them (Wang et al. 2024);
    with blocks of one patch that is raster order.
    Differs: the trainer duplicates frames for Qwen2-VL's patches, which span two frames in time.
    """
    step = patch_px * merge_side
    rows, columns = pixels_HWC.shape[0] // step, pixels_HWC.shape[1] // step
    whole = pixels_HWC[: rows * step, : columns * step]
    blocks = whole.reshape(rows, merge_side, patch_px, columns, merge_side, patch_px, -1)
    values_RQMMCSS = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    num = rows * columns * merge_side**2
    return np.ascontiguousarray(values_RQMMCSS).reshape(num, -1), (rows * merge_side, columns * merge_side)


def joined(values_PF: Pixels, grid: tuple[int, int], patch_px: int, merge_side: int = 1) -> Pixels:
    """[C, H, W], the inverse of `cut` but for dropped parts."""
    rows, columns = grid[0] // merge_side, grid[1] // merge_side
    blocks = values_PF.reshape(rows, columns, merge_side, merge_side, -1, patch_px, patch_px)
    channels = blocks.shape[4]
    return blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(channels, grid[0] * patch_px, grid[1] * patch_px)


def preprocess_image(path: Path, rule: Rule) -> Patches:
    """Decode, resize and cut an image, and count its tokens; MalformedImageError where it is unreadable."""
    pixels_HWC = read_pixels(path, rule.channels, rule, rule.filter)
    values_PF, grid = cut(pixels_HWC, rule.patch_px, rule.merge_side)
    return Patches(values_PF, grid, ItemTokens(len(values_PF), len(values_PF) // rule.merge_side**2))
