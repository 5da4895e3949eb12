"""Cuts whose stages share blocks of ranks."""

from hypothesis import given
from hypothesis import strategies as st

from workbench.balance.stages.partition import partition
from workbench.planner.block_cuts import even_blocks
from workbench.schedule.choice import ScheduleKind, rank_block, usual


def slowest(cost_s, cuts, block_of):
    blocks = [block_of(index) for index in range(len(cuts))]
    return max(
        sum(sum(cost_s[first:last]) for (first, last), b in zip(cuts, blocks, strict=True) if b == block)
        for block in blocks
    )


@given(
    kind=st.sampled_from([ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V]),
    num_blocks=st.integers(1, 4),
    costs=st.lists(st.floats(0.01, 10.0), min_size=8, max_size=20),
)
def test_layers_stay_covered_and_no_block_gets_slower(kind, num_blocks, costs):
    def block_of(place):
        return rank_block(usual(kind), place, 2 * num_blocks)

    start = partition(costs, 2 * num_blocks)
    cuts = even_blocks(costs, start, block_of)
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
    assert cuts[-1][1] == len(costs)
    assert all(first < last for first, last in cuts)
    assert slowest(costs, cuts, block_of) <= slowest(costs, start, block_of)


def test_a_heavy_head_is_made_up_for_on_its_block():
    """A V on two blocks: the head weighs five layers, so the first stage, beside it, gives one away."""
    costs = [1.0] * 9 + [5.0]
    vee = (0, 1, 1, 0)
    cuts = even_blocks(costs, ((0, 3), (3, 6), (6, 9), (9, 10)), lambda index: vee[index])
    assert slowest(costs, cuts, lambda index: vee[index]) == 7.0
    assert cuts[0] == (0, 2)
    assert cuts[-1] == (9, 10)
