"""Placement that moves few keys and values: exact counting, limits, local optimality, known masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.cornstarch.block_placement import BlockReads, gathered_bytes, moved_bytes, place_blocks
from tests.examples import examples
from tests.token_oracle import loads_of
from workbench.balance.tokens import policies as tokens


def reads_of(rows, block_bytes=10):
    """BlockReads of lists of columns, one list per row."""
    offsets = np.cumsum([0, *map(len, rows)])
    columns = [column for row in rows for column in row]
    return BlockReads(offsets, np.array(columns, np.int32), np.array(block_bytes))


def moved_by_sets(rows, block_bytes, owners):
    """Every rank keeps a set of blocks that it needs and does not own."""
    needed = {(owners[b], column) for b, row in enumerate(rows) for column in row}
    return sum(block_bytes[column] for rank, column in needed if owners[column] != rank)


@st.composite
def masks(draw, max_blocks=10):
    num_blocks = draw(st.integers(1, max_blocks))
    columns = st.sets(st.integers(0, num_blocks - 1), max_size=num_blocks).map(sorted)
    rows = draw(st.lists(columns, min_size=num_blocks, max_size=num_blocks))
    sizes = draw(st.lists(st.integers(0, 20), min_size=num_blocks, max_size=num_blocks))
    return rows, sizes


@pytest.fixture(scope="module", autouse=True)
def compiled_before_deadlines_count():
    place_blocks(reads_of([[0], [0, 1]]), 2)


@given(data=st.data(), mask=masks(), num_ranks=st.integers(1, 4))
def test_bytes_are_counted_once_per_rank_that_lacks_them(data, mask, num_ranks):
    rows, sizes = mask
    owners = data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(rows), max_size=len(rows)))
    assert moved_bytes(reads_of(rows, sizes), owners, num_ranks) == moved_by_sets(rows, sizes, owners)


def test_full_mask_gathers_everything():
    reads = reads_of([list(range(8))] * 8)
    assert (
        moved_bytes(reads, tokens.contiguous(reads.row_work, 4), 4) == gathered_bytes(reads, 4) == 8 * 10 * 3
    )


@given(mask=masks(), num_ranks=st.integers(1, 4), imbalance=st.sampled_from([0.0, 0.05, 0.5]))
@examples(200)
def test_limit_is_kept_and_no_single_move_saves_more(mask, num_ranks, imbalance):
    rows, sizes = mask
    reads = reads_of(rows, sizes)
    work = reads.row_work.tolist()
    found = place_blocks(reads, num_ranks, imbalance=imbalance)
    longest_first = tokens.longest_first(work, num_ranks)
    limit = max((1 + imbalance) * sum(work) / num_ranks, *loads_of(work, longest_first.tolist(), num_ranks))
    owners = found.owners.tolist()
    loads = loads_of(work, owners, num_ranks)
    assert max(loads) <= limit
    assert found.max_over_mean == pytest.approx(max(loads) * num_ranks / sum(work) if sum(work) else 1.0)
    assert found.moved_bytes == moved_by_sets(rows, sizes, owners)
    assert found.moved_bytes <= moved_bytes(reads, longest_first, num_ranks)
    for block in range(len(rows)):
        for rank in range(num_ranks):
            if loads[rank] + work[block] <= limit and rank != owners[block]:
                moved = [*owners[:block], rank, *owners[block + 1 :]]
                assert moved_by_sets(rows, sizes, moved) >= found.moved_bytes


def test_documents_of_equal_work_stay_whole():
    """Four causal documents of four blocks: nothing has to move, and dealing blocks in turn moves much."""
    rows = [[4 * (b // 4) + column for column in range(b % 4 + 1)] for b in range(16)]
    reads = reads_of(rows)
    found = place_blocks(reads, 4)
    assert (found.moved_bytes, found.max_over_mean) == (0, 1.0)
    assert moved_bytes(reads, tokens.stripe(reads.row_work, 4), 4) > 0


def test_window_is_cut_into_runs():
    """Each of the three boundaries moves the two blocks that the window reaches back over."""
    rows = [list(range(max(0, b - 2), b + 1)) for b in range(64)]
    assert place_blocks(reads_of(rows), 4).moved_bytes == 3 * 2 * 10


def test_given_work_is_what_is_balanced():
    rows = [[b] for b in range(4)]
    found = place_blocks(reads_of(rows), 2, work=[3, 1, 1, 1], imbalance=0)
    assert sorted(loads_of([3, 1, 1, 1], found.owners.tolist(), 2)) == [3, 3]


def test_equal_input_equal_placement_that_cannot_be_changed():
    rows = [list(range(max(0, b - 5), b + 1)) for b in range(40)]
    first, second = (place_blocks(reads_of(rows), 3) for _ in range(2))
    assert first.owners.tolist() == second.owners.tolist()
    with pytest.raises(ValueError, match="read-only"):
        first.owners[0] = 1


@pytest.mark.parametrize(
    ("offsets", "columns", "sizes", "message"),
    [
        ([0], [], 1, "at least one row"),
        ([0, 2, 1], [0], 1, "rise from 0"),
        ([0, 2], [0], 1, "end at 2"),
        ([0, 1], [1], 1, r"0\.\.0, as many blocks of keys as of queries, got 1\.\.1"),
        ([0, 2, 2], [1, 0], 1, "rise within each row"),
        ([0, 2, 2], [1, 1], 1, "rise within each row"),
        ([0, 1], [0], -1, "block_bytes must be >= 0, got -1"),
    ],
)
def test_bad_tiles_are_refused(offsets, columns, sizes, message):
    with pytest.raises(ValueError, match=message):
        BlockReads(np.array(offsets), np.array(columns, np.int32), np.array(sizes))


def test_bad_limits_are_refused():
    reads = reads_of([[0], [1]])
    with pytest.raises(ValueError, match=r"imbalance must be >= 0, got -0\.1"):
        place_blocks(reads, 2, imbalance=-0.1)
    with pytest.raises(ValueError, match="most_passes must be >= 1, got 0"):
        place_blocks(reads, 2, most_passes=0)
    with pytest.raises(ValueError, match="work for each of 2 blocks, got 1"):
        place_blocks(reads, 2, work=[1])
    with pytest.raises(ValueError, match="one owner for each of 2"):
        moved_bytes(reads, [0], 2)
