"""Task tables: they cover every tile once, longest first, and split only where that pays."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split, TaskCost, Tasks, make_tasks

SMS = 132
lists = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=12)
policies = st.one_of(st.sampled_from(Split), st.integers(1, 9).map(FixedSplit))


def table(full: list[int], partial: list[int], heads: int, split: Split | FixedSplit) -> Tasks:
    return make_tasks(np.array(full), np.array(partial), num_heads=heads, num_slots=SMS, split=split)


def cost_of(full: int, partial: int, begin: int, end: int) -> float:
    in_full = max(0, min(end, full) - min(begin, full))
    cost = TaskCost()
    return cost.full * in_full + cost.partial * (end - begin - in_full)


def span(tasks: Tasks, full: list[int], partial: list[int], heads: int) -> float:
    """List scheduling written out: every task of every head to the slot that is free first."""
    free = [0.0] * SMS
    each = zip(tasks.block, tasks.begin, tasks.end, strict=True)
    for block, begin, end in [task for task in each for _ in range(heads)]:
        at = free.index(min(free))
        free[at] += cost_of(full[block], partial[block], begin, end) + TaskCost().task
    return max(free)


@given(lists, st.integers(1, 4), policies)
def test_every_tile_is_in_one_task(tiles, heads, split):
    full, partial = ([pair[i] for pair in tiles] for i in (0, 1))
    tasks = table(full, partial, heads, split)
    for block in range(len(tiles)):
        mine = np.flatnonzero(tasks.block == block)
        ranges = sorted(zip(tasks.begin[mine].tolist(), tasks.end[mine].tolist(), strict=True))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == full[block] + partial[block]
        assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))


@given(lists, st.integers(1, 4), policies)
def test_slots_belong_to_split_blocks(tiles, heads, split):
    tasks = table([t[0] for t in tiles], [t[1] for t in tiles], heads, split)
    counts = np.bincount(tasks.block, minlength=len(tiles))
    assert tasks.split_block.tolist() == np.flatnonzero(counts > 1).tolist()
    assert sorted(tasks.slot[tasks.slot >= 0].tolist()) == list(range(tasks.num_slots))
    for index, block in enumerate(tasks.split_block):
        mine = np.flatnonzero(tasks.block == block)
        in_order = mine[np.argsort(tasks.slot[mine])]
        want = range(tasks.split_start[index], tasks.split_start[index + 1])
        assert tasks.slot[in_order].tolist() == list(want)
        assert (np.diff(tasks.begin[in_order]) >= 0).all()
    assert (tasks.slot[np.isin(tasks.block, tasks.split_block, invert=True)] == -1).all()


@given(lists, policies)
def test_longest_first(tiles, split):
    full, partial = ([pair[i] for pair in tiles] for i in (0, 1))
    tasks = table(full, partial, 1, split)
    costs = [
        cost_of(full[b], partial[b], lo, hi)
        for b, lo, hi in zip(tasks.block, tasks.begin, tasks.end, strict=True)
    ]
    assert all(one >= two - 1e-9 for one, two in itertools.pairwise(costs))


def test_a_whole_model_layer_is_not_split():
    """Causal, 64k tokens, 32 heads on 132 slots: longest first is within 1 % of the mean already."""
    full = list(range(512))
    tasks = table(full, [1] * 512, 32, Split.WHERE_IT_PAYS)
    assert tasks.num_slots == 0


@pytest.mark.parametrize(("heads", "gain"), [(1, 3.0), (4, 1.15)])
def test_few_long_rows_are_split(heads: int, gain: float):
    """One rank of eight of a 64k sequence: 64 query blocks, a quarter of them see most of it."""
    full = [400] * 16 + [12] * 48
    partial = [2] * 64
    whole = table(full, partial, heads, Split.NEVER)
    split = table(full, partial, heads, Split.WHERE_IT_PAYS)
    assert set(split.split_block.tolist()) <= set(range(16)), "short rows stay whole"
    assert span(whole, full, partial, heads) >= gain * span(split, full, partial, heads)


def test_fixed_split_cuts_whatever_it_costs():
    tasks = table([8, 3], [0, 0], 1, FixedSplit(4))
    assert np.bincount(tasks.block).tolist() == [2, 1]
    with pytest.raises(ValueError, match="num_tiles must be >= 1, got 0"):
        FixedSplit(0)
