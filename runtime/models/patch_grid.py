"""Converts an image, or a step of a video, to the patches that Qwen's vision towers read, and back."""

from torch import Tensor

# Shape suffixes: T = patches of an image, D = numbers of a patch, C = channels, F = frames, Y and X = rows
# and columns of pixels.

STEP_DIMS = 4  # number of dims of a step of a video


def blockwise(x_YX: Tensor, side: int) -> Tensor:
    """[rows * columns, ...]: squares of side x side elements in order, each row by row."""
    rows, columns = x_YX.shape[:2]
    return (
        x_YX.unflatten(0, (rows // side, side))
        .unflatten(2, (columns // side, side))
        .transpose(1, 2)
        .flatten(0, 3)
    )


def patches_of(x: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """[T, C * F * patch * patch] patches, in the order in which they merge.

    Args:
        x: [C, F, Y, X] of a step of a video, or [C, Y, X] of an image, which is repeated for all frames.
        frames: F.
    """
    x_CFYX = x if x.dim() == STEP_DIMS else x[:, None].expand(-1, frames, -1, -1)
    grid = x_CFYX.unfold(2, patch, patch).unfold(3, patch, patch)  # [C, F, rows, columns, patch, patch]
    return blockwise(grid.permute(2, 3, 0, 1, 4, 5), merge).flatten(1)


def step_of(x_TD: Tensor, grid: tuple[int, int], patch: int, merge: int, frames: int) -> Tensor:
    """[C, F, Y, X], the inverse of `patches_of`; ValueError where patches do not fill the grid."""
    rows, columns = grid
    if len(x_TD) != rows * columns or rows % merge or columns % merge:
        raise ValueError(
            f"a grid of {rows} x {columns} patches, both multiples of {merge}, wants {rows * columns} "
            f"patches, got {len(x_TD)}"
        )
    framed = x_TD.unflatten(1, (-1, frames, patch, patch))
    blocks = framed.unflatten(0, (rows // merge, columns // merge, merge, merge))
    return blocks.permute(4, 5, 0, 2, 6, 1, 3, 7).flatten(5, 7).flatten(2, 4)
