"""An image as the patches that Qwen's vision towers read, and back."""

import torch
from torch import Tensor

# Shape suffixes: T = patches of an image, D = numbers of a patch, C = channels, Y and X = rows and columns of
# pixels.


def blockwise(x_YX: Tensor, side: int) -> Tensor:
    """[rows * columns, ...]: squares of side x side neighbours one after the other, row by row inside."""
    rows, columns = x_YX.shape[:2]
    return (
        x_YX.unflatten(0, (rows // side, side))
        .unflatten(2, (columns // side, side))
        .transpose(1, 2)
        .flatten(0, 3)
    )


def patches_of(image_CYX: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """[T, C * frames * patch * patch] in the order in which patches merge; all frames are alike."""
    grid = image_CYX.unfold(1, patch, patch).unfold(2, patch, patch)  # [C, rows, columns, patch, patch]
    each = blockwise(grid.permute(1, 2, 0, 3, 4), merge)
    return each[:, :, None].expand(-1, -1, frames, -1, -1).flatten(1)


def image_of(x_TD: Tensor, grid: tuple[int, int], patch: int, merge: int, frames: int) -> Tensor:
    """[C, Y, X], the image that `patches_of` would cut like that.

    Raises:
        ValueError: as many patches do not make the grid, or frames that differ (a clip).
    """
    rows, columns = grid
    if len(x_TD) != rows * columns or rows % merge or columns % merge:
        raise ValueError(
            f"a grid of {rows} x {columns} patches, both multiples of {merge}, wants {rows * columns} "
            f"patches, got {len(x_TD)}"
        )
    framed = x_TD.unflatten(1, (-1, frames, patch, patch))
    if not torch.equal(framed, framed[:, :, :1].expand_as(framed)):
        raise ValueError("the frames of an image must be equal; clips are not read")
    blocks = framed[:, :, 0].unflatten(0, (rows // merge, columns // merge, merge, merge))
    return blocks.permute(4, 0, 2, 5, 1, 3, 6).flatten(4, 6).flatten(1, 3)
