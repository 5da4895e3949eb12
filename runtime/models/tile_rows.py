"""Features of an image's tiles, concatenated row by row with a learned token at the end of each row.

Source: `pack_image_features` and `unpad_image` of transformers' LLaVA-NeXT and LLaVA-OneVision.
Differs: padding is cut off before the projector, which processes tokens independently, not after it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runtime.models.adapter import MicrobatchData

# Shape suffixes: T = packed tokens, R, C = rows, columns of tiles, P = features of a tile, A = of one along a
# side, Y, X = rows, columns of features, D = width.

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TileRows:
    """How a model concatenates features of tiles.

    Args:
        along: number of features along a side of a tile.
        shrunk: (rows, columns) that an image covers -> (rows, columns) that reach the LLM.
    """

    along: int
    shrunk: Callable[[Pair], Pair]


class _Image(NamedTuple):
    """One item of a microbatch; without `grid` and `unpadded` a single tile."""

    name: tuple[int, int]
    tokens_in: int
    tokens_out: int
    grid: Pair | None
    unpadded: Pair | None


def without_padding(
    x_TD: Tensor, data: MicrobatchData, kept: Callable[[Tensor], Tensor], along: int
) -> Tensor:
    """[T', D] features of each image without padding: its overview, then the canvas, row by row.

    Args:
        x_TD: features of all tiles.
        kept: maps features of a tile to those without a class token.
        along: as in `TileRows`.
    """
    images = list(_images(data))
    items = x_TD.split([image.tokens_in for image in images])
    return torch.cat([_filled(x, image, kept, along) for x, image in zip(items, images, strict=True)])


def _filled(x_TD: Tensor, image: _Image, kept: Callable[[Tensor], Tensor], along: int) -> Tensor:
    if image.grid is None or image.unpadded is None:
        return kept(x_TD)
    (rows, columns), (height, width) = image.grid, image.unpadded
    overview_PD, *tiles = (kept(tile_TD) for tile_TD in x_TD.chunk(1 + rows * columns))
    tiles_RCAAD = torch.stack(tiles).unflatten(1, (along, along)).unflatten(0, (rows, columns))
    canvas_YXD = tiles_RCAAD.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    above, left = (canvas_YXD.shape[0] - height) // 2, (canvas_YXD.shape[1] - width) // 2
    filled_YXD = canvas_YXD[above : above + height, left : left + width]
    return torch.cat([overview_PD, filled_YXD.flatten(0, 1)])


def put_together(y_TD: Tensor, data: MicrobatchData, newline_D: Tensor, rows: TileRows) -> Tensor:
    """Tokens in the LLM's sequence, from the projected output of `without_padding`.

    Raises:
        ValueError: an item with a different number of tokens than in the plan.
    """
    images = list(_images(data))
    items = y_TD.split([_num_filled(image, rows.along) for image in images])
    return torch.cat([_ended(y, image, newline_D, rows) for y, image in zip(items, images, strict=True)])


def _num_filled(image: _Image, along: int) -> int:
    return along**2 + (0 if image.unpadded is None else image.unpadded[0] * image.unpadded[1])


def _ended(y_TD: Tensor, image: _Image, newline_D: Tensor, rows: TileRows) -> Tensor:
    overview_PD, features_TD = y_TD.split([rows.along**2, len(y_TD) - rows.along**2])
    if image.unpadded is None:
        out_TD = y_TD if image.tokens_out == len(y_TD) else torch.cat([y_TD, newline_D[None]])
    else:
        features_YXD = _interpolated(features_TD.unflatten(0, image.unpadded), rows.shrunk(image.unpadded))
        ends_Y1D = newline_D.expand(len(features_YXD), 1, -1)
        out_TD = torch.cat([overview_PD, torch.cat([features_YXD, ends_Y1D], dim=1).flatten(0, 1)])
    if len(out_TD) != image.tokens_out:
        raise ValueError(
            f"item {image.name}: its projector makes {len(out_TD)} tokens, the plan says {image.tokens_out}"
        )
    return out_TD


def _interpolated(x_YXD: Tensor, size: Pair) -> Tensor:
    if tuple(x_YXD.shape[:2]) == size:
        return x_YXD
    y_1DYX = functional.interpolate(x_YXD.permute(2, 0, 1)[None], size, mode="bilinear")
    return y_1DYX[0].permute(1, 2, 0)


def _images(data: MicrobatchData) -> Iterator[_Image]:
    nothing = (None,) * len(data.items)
    for (sample, k), tokens_in, tokens_out, grid, unpadded in zip(
        data.items,
        data.tokens_in,
        data.tokens_out,
        data.grids or nothing,
        data.unpadded or nothing,
        strict=True,
    ):
        yield _Image((sample, k), tokens_in, tokens_out, grid, unpadded)
