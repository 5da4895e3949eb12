"""AnyRes: what plans count and what the callback cuts are the same, and as LLaVA-NeXT was released."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution

from runtime.frontend.callbacks import AnyRes
from tests.examples import examples
from workbench.data.corpus import ANYRES_GRIDS, anyres_grid

SIDES = st.integers(1, 3000)


@given(SIDES, SIDES, st.sampled_from([8, 16, 336, 384]))
@examples(150)
@example(336, 336, 336)
@example(673, 671, 336)
def test_the_grid_is_the_released_one(height: int, width: int, tile_px: int) -> None:
    rooms = [(rows * tile_px, columns * tile_px) for rows, columns in ANYRES_GRIDS]
    theirs = select_best_resolution((height, width), rooms)
    if theirs is None:  # nothing of the image would be left in any grid
        return
    rows, columns = anyres_grid(height, width, tile_px=tile_px)
    assert (rows * tile_px, columns * tile_px) == tuple(theirs)


def test_a_grid_of_the_users_counts_the_same() -> None:
    grids = ((1, 4), (4, 1), (3, 3))
    blocks = AnyRes(block_px=8, grids=grids).blocks(torch.zeros(3, 30, 9))
    rows, columns = anyres_grid(30, 9, tile_px=8, grids=grids)
    assert len(blocks) == 1 + rows * columns == 5


def test_images_without_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="image of 0 x 5 px: want sides and tile >= 1 px"):
        anyres_grid(0, 5, tile_px=8)
