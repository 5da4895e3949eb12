"""Tiles and areas equal brute force over the dense mask, for any bitfields and any blocks."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.mask_strategies import CASES, bitfields, packed_case
from workbench.masks import builders
from workbench.masks.bitfield import Bitfield, concatenate, dense, padding
from workbench.masks.builders import Groups, Mixture, Run
from workbench.masks.tiles import FULL, PARTIAL, Tiles, area, classify, classify_runs, row_areas, row_work

# No deadlines: what calls first, compiles.
BLOCKS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128])
Kinds = dict[tuple[int, int], int]


def brute(queries: Bitfield, keys: Bitfield, block_q: int, block_k: int) -> Kinds:
    """(row block, column block) -> kind, from the dense mask."""
    mask = dense(queries, keys)
    kinds = {}
    for row, column in product(range(0, len(queries), block_q), range(0, len(keys), block_k)):
        tile = mask[row : row + block_q, column : column + block_k]
        if tile.any():
            kinds[row // block_q, column // block_k] = FULL if tile.all() else PARTIAL
    return kinds


def listed(tiles: Tiles) -> Kinds:
    rows = np.repeat(np.arange(tiles.num_row_blocks), np.diff(tiles.row_offsets))
    pairs = zip(rows.tolist(), tiles.columns.tolist(), strict=True)
    return dict(zip(pairs, tiles.kinds.tolist(), strict=True))


def agrees(queries: Bitfield, keys: Bitfield, block_q: int, block_k: int) -> bool:
    tiles = classify(queries, keys, block_q, block_k)
    mask = dense(queries, keys)
    starts = np.arange(0, len(queries), block_q)
    areas = [int(mask[start : start + block_q].sum()) for start in starts]
    return (
        listed(tiles) == brute(queries, keys, block_q, block_k)
        and row_areas(queries, keys, block_q).tolist() == areas
        and area(queries, keys) == int(mask.sum())
    )


@examples(300)
@given(bitfields(), bitfields(), BLOCKS, BLOCKS)
def test_tiles_of_any_two_fields(queries: Bitfield, keys: Bitfield, block_q: int, block_k: int):
    assert agrees(queries, keys, block_q, block_k)


@examples(150)
@given(bitfields(min_length=1, max_length=300), BLOCKS, BLOCKS, st.randoms(use_true_random=False))
def test_tiles_of_permuted_tokens_of_one_field(field: Bitfield, block_q: int, block_k: int, random):
    order = random.sample(range(len(field)), len(field))
    share = order[: random.randint(0, len(field))]
    assert agrees(field.take(share), field.take(order), block_q, block_k)


@pytest.mark.parametrize("name", [*CASES, "packed"])
def test_tiles_of_every_builder(name: str):
    draw = packed_case if name == "packed" else CASES[name][0]
    for seed in range(30):
        field = draw(np.random.default_rng(seed)).field
        assert agrees(field, field, 2 ** (seed % 5), 2 ** (seed // 5)), seed


@pytest.mark.parametrize(
    "build", [builders.encoder_prepended, builders.encoder_embedded, builders.multimodal_packed]
)
def test_tiles_of_the_papers_masks_at_odd_lengths(build):
    mixture = Mixture(spans=(200, 90))
    for seed, length in enumerate((1, 127, 128, 129, 1500, 2111)):
        documents = {"documents": min(4, length)} if build is builders.multimodal_packed else {}
        field = build(length, seed=seed, mixture=mixture, **documents)
        assert agrees(field, field, 128, 64)


@settings(deadline=None)
@given(bitfields(), bitfields(), BLOCKS, BLOCKS)
def test_columns_ascend_and_the_transpose_holds_the_same_tiles(queries, keys, block_q, block_k):
    tiles = classify(queries, keys, block_q, block_k)
    for row in range(tiles.num_row_blocks):
        columns = tiles.columns[tiles.row_offsets[row] : tiles.row_offsets[row + 1]]
        assert (np.diff(columns) > 0).all()
    back = tiles.transposed()
    assert back.num_row_blocks == tiles.num_col_blocks
    assert listed(back) == {(column, row): kind for (row, column), kind in listed(tiles).items()}
    again = back.transposed()
    assert [again.block_q, again.block_k, again.num_col_blocks] == [block_q, block_k, tiles.num_col_blocks]
    for name in ("row_offsets", "columns", "kinds"):
        assert np.array_equal(getattr(again, name), getattr(tiles, name))
        assert getattr(again, name).dtype == getattr(tiles, name).dtype


@settings(deadline=None)
@given(bitfields(), bitfields(), BLOCKS, BLOCKS)
def test_runs_are_the_tiles_in_as_few_pieces_as_possible(queries, keys, block_q, block_k):
    runs = classify_runs(queries, keys, block_q, block_k)
    tiles = runs.tiles()
    assert row_work(runs).tolist() == row_work(tiles).tolist() == np.diff(tiles.row_offsets).tolist()
    assert runs.num_tiles == tiles.num_tiles
    assert (runs.runs["first"] < runs.runs["end"]).all()
    for row in range(runs.num_row_blocks):
        of_row = runs.runs[runs.row_offsets[row] : runs.row_offsets[row + 1]]
        gaps, kinds = of_row["first"][1:] - of_row["end"][:-1], of_row["kind"]
        assert ((gaps > 0) | ((gaps == 0) & (kinds[1:] != kinds[:-1]))).all()


@pytest.mark.parametrize("length", [1, 128, 1000, 4096, 2**20])
def test_closed_forms(length: int):
    blocks = -(-length // 128)
    diagonal, whole = builders.causal(length), builders.full(length)
    assert area(diagonal, diagonal) == length * (length + 1) // 2
    assert area(whole, whole) == length**2
    runs = classify_runs(diagonal, diagonal)
    assert row_work(runs).tolist() == list(range(1, blocks + 1))
    assert len(classify_runs(whole, whole).runs) == blocks


def test_area_of_a_window_in_closed_form():
    length, window = 2**20, 1000
    field = builders.sliding_window(length, window)
    assert area(field, field) == window * (window + 1) // 2 + (length - window) * window


@pytest.mark.parametrize("groups", Groups)
def test_rows_that_repeat_an_earlier_one_are_as_walked(groups: Groups):
    """Blocks of one encoder, apart and of different sizes, in documents that reuse its bits."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        runs = [Run(int(rng.integers(0, 3)), int(rng.integers(1, 60))) for _ in range(30)]
        field = concatenate([builders.multimodal(part, groups) for part in (runs[:20], runs[20:])])
        shuffled = field.take(rng.permutation(len(field)))
        assert agrees(field, field, 8, 8)
        assert agrees(field, shuffled, 16, 4)
        assert agrees(shuffled, field, 1, 16)


def test_no_tokens_and_nothing_but_padding():
    nothing, some = builders.causal(0), builders.causal(300)
    for queries, keys in ((nothing, some), (some, nothing), (nothing, nothing), (some, padding(200))):
        tiles = classify(queries, keys)
        assert tiles.num_tiles == area(queries, keys) == 0
        assert tiles.row_offsets.tolist() == [0] * (-(-len(queries) // 128) + 1)
        assert tiles.num_col_blocks == -(-len(keys) // 128)
        assert tiles.transposed().num_row_blocks == tiles.num_col_blocks
