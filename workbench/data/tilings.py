"""Number of fixed-size tiles into which models' processors cut an image; each tile is an encoder item.

The grid of AnyRes, LLaVA-NeXT's, is `workbench.data.corpus.anyres_grid`. Several tiles come with an
overview of the whole image; a single tile has none.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Any

import numpy as np

IDEFICS_MOST_PX = 4096  # longest side, whatever a processor's configuration states
_PHI4_LEAST_PX = 10
_ENOUGH_SHOWN = 0.9  # of an image's area, in Ovis 2


def internvl_tiles(height_px: int, width_px: int, *, tile_px: int, least: int, most: int) -> int:
    """InternVL: the image is stretched to the grid of `least` to `most` tiles nearest to its aspect ratio.

    Source: `get_number_of_image_patches` of transformers' GOT-OCR2 image processor, which InternVL uses.

    Example:
        >>> internvl_tiles(1080, 1920, tile_px=448, least=1, most=12)
        9
    """
    _check(height_px, width_px, tile_px, most)
    rows, columns = _nearest_grid(height_px, width_px, tile_px, least, most)
    return 1 + rows * columns if rows * columns > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi4Canvas:
    """The grid of tiles on which Phi-4 multimodal places an image, padded at its lower or right edge.

    Args:
        below_px, beside_px: of padding.
    """

    rows: int
    columns: int
    tile_px: int
    below_px: int
    beside_px: int

    @property
    def num_tiles(self) -> int:
        """Tiles of the grid, plus one of the whole image."""
        return 1 + self.rows * self.columns

    def unpadded(self, patch_px: int) -> tuple[int, int]:
        """(rows, columns) of features outside padding: every second patch of a tile in either direction.

        Source: the processor's attention mask, which excludes whole patches of padding.

        Example:
            >>> phi4_canvas(1080, 1920, tile_px=448, most=36).unpadded(14)
            (45, 80)
        """
        in_tile = self.tile_px // patch_px
        return (
            _every_second(self.rows, in_tile, self.below_px // patch_px),
            _every_second(self.columns, in_tile, self.beside_px // patch_px),
        )


def phi4_canvas(height_px: int, width_px: int, *, tile_px: int, most: int) -> Phi4Canvas:
    """As many tiles as the image covers, even partly, or the nearest grid of at most `most`.

    Source: `dynamic_preprocess` of transformers' Phi-4 image processor.

    Raises:
        ValueError: a side that would shrink below 10 px, as there.

    Example:
        >>> phi4_canvas(1080, 1920, tile_px=448, most=36).num_tiles
        16
    """
    _check(height_px, width_px, tile_px, most)
    rows, columns = ceil(height_px / tile_px), ceil(width_px / tile_px)
    if rows * columns > most:
        rows, columns = _nearest_grid(height_px, width_px, tile_px, 1, most)
    higher, wider = rows * tile_px / height_px, columns * tile_px / width_px
    scale = min(higher, wider)
    if int(min(height_px, width_px) * scale) < _PHI4_LEAST_PX:
        raise ValueError(
            f"image of {height_px} x {width_px} px: brought to {rows} x {columns} tiles, its shorter side "
            f"must keep {_PHI4_LEAST_PX} px; nearest: a shorter side of {ceil(_PHI4_LEAST_PX / scale)} px"
        )
    return Phi4Canvas(
        rows=rows,
        columns=columns,
        tile_px=tile_px,
        below_px=rows * tile_px - int(height_px * scale) if wider < higher else 0,
        beside_px=0 if wider < higher else columns * tile_px - int(width_px * scale),
    )


def _every_second(tiles: int, in_tile: int, padded: int) -> int:
    """Every second patch of each tile along one side, without the padding at the end of the last."""
    unpadded_patches = in_tile * tiles - padded
    return sum(ceil(min(in_tile, max(0, unpadded_patches - in_tile * tile)) / 2) for tile in range(tiles))


def idefics3_tiles(height_px: int, width_px: int, *, tile_px: int, longest_px: int) -> int:
    """Idefics3, SmolVLM: the longer side becomes `longest_px`, small images too, then both whole tiles.

    Source: `resize`, `resize_for_vision_encoder`, `split_images` of transformers' Idefics3 image processor.

    Example:
        >>> idefics3_tiles(1080, 1920, tile_px=364, longest_px=1456)
        13
    """
    _check(height_px, width_px, tile_px, longest_px)
    height, width = _resized(height_px, width_px, longest_px)
    height, width = (height + height % 2, width) if width_px >= height_px else (height, width + width % 2)
    if max(height, width) > IDEFICS_MOST_PX:
        height, width = _resized(height, width, IDEFICS_MOST_PX)
    height, width = _resized(height, width, ceil(max(height, width) / tile_px) * tile_px)
    tiles = ceil(height / tile_px) * ceil(width / tile_px)
    return 1 + tiles if tiles > 1 else 1


def llama4_tiles(height_px: int, width_px: int, *, tile_px: int, most: int) -> int:
    """Llama 4: the grid that enlarges the image least, or else shrinks it least; of equal ones the smallest.

    Source: `get_best_fit` of transformers' Llama 4 image processor, which divides in float32.

    Example:
        >>> llama4_tiles(1080, 1920, tile_px=336, most=16)
        16
    """
    return _least_stretched(height_px, width_px, tile_px, most, np.float32)


def ovis2_tiles(height_px: int, width_px: int, *, tile_px: int, most: int) -> int:
    """Ovis 2: the fewest tiles that show over 90 % of the image's area, or else those that show most.

    A part of the image that is longer than a tile is shrunk to it, and shows so much less.

    Source: `get_min_tile_covering_grid` of transformers' Ovis 2 image processor.

    Complexity: O(most^2 log(most)).

    Example:
        >>> ovis2_tiles(1080, 1920, tile_px=448, most=12)
        13
    """
    _check(height_px, width_px, tile_px, most)
    shown = {
        grid: _shown_area(height_px, width_px, grid, tile_px) / (width_px * height_px)
        for grid in _grids(1, most)
    }
    enough = [grid for grid, share in shown.items() if share > _ENOUGH_SHOWN]
    key = (lambda grid: (prod(grid), -shown[grid])) if enough else (lambda grid: (-shown[grid], prod(grid)))
    tiles = prod(min(enough or shown, key=key))
    return 1 + tiles if tiles > 1 else 1


def _shown_area(height_px: int, width_px: int, grid: tuple[int, int], tile_px: int) -> float:
    """Pixels of all parts of an image once each is shrunk into a tile; the last parts have the remainder."""
    area = 0.0
    for height in _parts_of(height_px, grid[0]):
        for width in _parts_of(width_px, grid[1]):
            longer, shorter = max(height, width), min(height, width)
            area += longer * shorter if longer <= tile_px else tile_px * (shorter / longer * tile_px)
    return area


def _parts_of(length_px: int, num: int) -> list[int]:
    each = length_px // num
    return [each] * (num - 1) + [length_px - (num - 1) * each]


def cohere_tiles(height_px: int, width_px: int, *, tile_px: int, most: int) -> int:
    """Command A Vision: Llama 4's rule, divided in float64.

    Source: `get_optimal_tiled_canvas` of transformers' Cohere 2 Vision image processor.

    Example:
        >>> cohere_tiles(1080, 1920, tile_px=512, most=12)
        13
    """
    return _least_stretched(height_px, width_px, tile_px, most, np.float64)


def _least_stretched(
    height_px: int, width_px: int, tile_px: int, most: int, kind: type[np.floating[Any]]
) -> int:
    """The number of tiles, with one of the whole image; `kind`: of the numbers that grids are compared by."""
    _check(height_px, width_px, tile_px, most)
    grids = _grids(1, most)
    sides = np.array(grids, kind) * kind(tile_px)
    scales = np.minimum(sides[:, 0] / kind(height_px), sides[:, 1] / kind(width_px))
    enlarging = scales[scales >= 1]
    chosen = enlarging.min() if enlarging.size else scales.max()
    tiles = min(
        rows * columns for (rows, columns), scale in zip(grids, scales, strict=True) if scale == chosen
    )
    return 1 + tiles if tiles > 1 else 1


def unpadded(height_px: int, width_px: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a canvas's features covered by an image of that shape; the rest is padding.

    Source: `unpad_image` of transformers' LLaVA-NeXT, which crops both sides equally.

    Example:
        >>> unpadded(480, 640, 48, 48)
        (36, 48)
    """
    _check(height_px, width_px, rows, columns)
    if width_px / height_px > columns / rows:
        return rows - (rows - int(round(height_px * (columns / width_px), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width_px * (rows / height_px), 7))) // 2 * 2


@cache
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of `least` to `most` tiles, by their number, then by columns."""
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def _nearest_grid(height_px: int, width_px: int, tile_px: int, least: int, most: int) -> tuple[int, int]:
    """The grid nearest in width over height; of equally near ones the last that the image fills by half."""
    shape, best, nearest = width_px / height_px, (1, 1), float("inf")
    for rows, columns in _grids(least, most):
        distance = abs(shape - columns / rows)
        is_filled = height_px * width_px > 0.5 * tile_px**2 * rows * columns
        if distance < nearest or (distance == nearest and is_filled):
            best, nearest = (rows, columns), distance
    return best


def _resized(height: int, width: int, longer: int) -> tuple[int, int]:
    """(height, width) of the image with its longer side scaled to `longer`."""
    shape = width / height
    return (max(1, int(longer / shape)), longer) if width >= height else (longer, max(1, int(longer * shape)))


def _check(height_px: int, width_px: int, tile_px: int, most: int) -> None:
    if min(height_px, width_px, tile_px, most) < 1:
        raise ValueError(
            f"image of {height_px} x {width_px} px: want sides, a tile and a limit >= 1, got a tile of "
            f"{tile_px} px and a limit of {most}"
        )
