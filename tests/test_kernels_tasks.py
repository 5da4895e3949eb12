"""Task tables: they cover every tile once, longest first, and split only where that pays."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.bitfield_attention.tasks import (
    FixedSplit,
    Split,
    Tasks,
    make_tasks,
    modelled_span,
)

SMS = 132
lists = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), min_size=1, max_size=12)
policies = st.one_of(st.sampled_from(Split), st.integers(1, 9).map(FixedSplit))


def make(full: list[int], partial: list[int], heads: int, split: Split | FixedSplit) -> Tasks:
    counts = (torch.tensor(x, dtype=torch.int32) for x in (full, partial))
    return make_tasks(*counts, num_heads=heads, num_slots=SMS, split=split)


class Table:
    """The entries of a table that are not only room, as arrays."""

    def __init__(self, full: list[int], partial: list[int], heads: int, split: Split | FixedSplit) -> None:
        made = make(full, partial, heads, split)
        block, begin, end, slot = made.table.numpy()
        real = block < len(full)
        assert (block[~real] == len(full)).all()
        assert not np.concatenate([begin[~real], end[~real]]).any()
        assert (slot[~real] == -1).all()
        self.block, self.begin, self.end, self.slot = (x[real] for x in (block, begin, end, slot))
        num_splits = int((made.split_block < len(full)).sum())
        assert (made.split_block[num_splits:] == len(full)).all()
        assert (made.split_start[num_splits:] == made.split_start[-1]).all()
        self.split_block = made.split_block[:num_splits].numpy()
        self.split_start = made.split_start[: num_splits + 1].numpy()
        self.room = made.num_slots


def table(full: list[int], partial: list[int], heads: int, split: Split | FixedSplit) -> Table:
    return Table(full, partial, heads, split)


def cost_of(full: int, partial: int, begin: int, end: int) -> float:
    in_full = max(0, min(end, full) - min(begin, full))
    return 1.0 * in_full + 1.35 * (end - begin - in_full)


def span(tasks: Table, full: list[int], partial: list[int], heads: int) -> float:
    """List scheduling written out: every task of every head to the slot that is free first."""
    free = [0.0] * SMS
    each = zip(tasks.block, tasks.begin, tasks.end, strict=True)
    for block, begin, end in [task for task in each for _ in range(heads)]:
        at = free.index(min(free))
        free[at] += cost_of(full[block], partial[block], begin, end) + 1.5
    return max(free)


@settings(max_examples=25)
@given(lists, st.integers(1, 4), policies)
def test_tasks_cover_every_tile_once_longest_first_and_own_the_slots_of_split_blocks(tiles, heads, split):
    full, partial = ([pair[i] for pair in tiles] for i in (0, 1))
    tasks = table(full, partial, heads, split)
    assert_every_tile_is_in_one_task(tasks, [sum(pair) for pair in tiles])
    assert_slots_belong_to_split_blocks(tasks, len(tiles))
    costs = [
        cost_of(full[b], partial[b], lo, hi)
        for b, lo, hi in zip(tasks.block, tasks.begin, tasks.end, strict=True)
    ]
    assert all(one >= two - 1e-9 for one, two in itertools.pairwise(costs))


def assert_every_tile_is_in_one_task(tasks: Table, tiles: list[int]) -> None:
    for block, count in enumerate(tiles):
        mine = np.flatnonzero(tasks.block == block)
        ranges = sorted(zip(tasks.begin[mine].tolist(), tasks.end[mine].tolist(), strict=True))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == count
        assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))


def assert_slots_belong_to_split_blocks(tasks: Table, num_blocks: int) -> None:
    counts = np.bincount(tasks.block, minlength=num_blocks)
    assert tasks.split_block.tolist() == np.flatnonzero(counts > 1).tolist()
    assert sorted(tasks.slot[tasks.slot >= 0].tolist()) == list(range(tasks.split_start[-1]))
    assert tasks.split_start[-1] <= tasks.room
    for index, block in enumerate(tasks.split_block):
        mine = np.flatnonzero(tasks.block == block)
        in_order = mine[np.argsort(tasks.slot[mine])]
        want = range(tasks.split_start[index], tasks.split_start[index + 1])
        assert tasks.slot[in_order].tolist() == list(want)
        assert (np.diff(tasks.begin[in_order]) >= 0).all()
    assert (tasks.slot[np.isin(tasks.block, tasks.split_block, invert=True)] == -1).all()


def test_a_whole_model_layer_is_not_split():
    """Causal, 16k tokens, 32 heads on 132 slots: longest first is within 1 % of the mean already."""
    full = list(range(128))
    tasks = table(full, [1] * 128, 32, Split.WHERE_IT_PAYS)
    assert not len(tasks.split_block)


@settings(max_examples=25)
@given(lists, st.integers(1, 40))
def test_cutting_where_it_pays_never_costs_much(tiles, heads):
    """Cuts are chosen by a bound; simulated, the choice is as good as no cut or nearly so."""
    counts = [torch.tensor([pair[i] for pair in tiles], dtype=torch.int32) for i in (0, 1)]
    shape = {"num_heads": heads, "num_slots": SMS}
    whole, cut = (
        modelled_span(make_tasks(*counts, **shape, split=split), *counts, **shape) for split in Split
    )
    assert cut <= 1.1 * whole


def test_modelled_span_is_list_scheduling_with_its_overheads():
    """One slot: the sum of all tasks. Three pieces, three slots: a piece, the combine, what it gathers."""
    full, partial = torch.tensor([4, 0], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    one = {"num_heads": 2, "num_slots": 1}
    whole = make_tasks(full, partial, split=Split.NEVER, **one)
    assert modelled_span(whole, full, partial, **one) == pytest.approx(2 * (4 + 2 * 1.35 + 2 * 1.5))
    three = {"num_heads": 1, "num_slots": 3}
    cut = make_tasks(full[:1] + 2, partial[:1] * 0, split=FixedSplit(2), **three)
    assert modelled_span(cut, full[:1] + 2, partial[:1] * 0, **three) == pytest.approx(
        (2 + 1.5 + 0.65) + 1.5 + 3 * 0.65 / 3
    )


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
