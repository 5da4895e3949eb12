"""Rows that recompute some blocks of every stage: how many, their seconds and bytes, what is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import iteration_s
from tests.examples import examples
from tests.test_predict import row
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_bytes import activation_bytes
from workbench.llm_table.row_plan import plan_of
from workbench.plan.lower import lower
from workbench.plan.plan import Recompute
from workbench.plan.recomputed_layers import recomputed_in, recomputed_of
from workbench.schedule.action import Pass
from workbench.timing.price import price

BIG = {"hidden": 512, "heads": 8, "layers": 12, "sequence": 256, "global_batch": 2}


def numbers(llm: LlmRow) -> list[int]:
    """[stages] recomputed layers; neither embedding nor head is one of them."""
    plan = plan_of(llm, load_profile(llm.gpu))
    first, *_, last = recomputed_of(plan, plan.model.modules[0].name)
    assert not first | last
    return [sum(recomputed_in(plan, each)) for each in plan.stages]


@given(pp=st.integers(1, 4), virtual=st.integers(1, 2), layers=st.integers(8, 24), data=st.data())
@examples(40)
def test_no_stage_recomputes_fewer_blocks_than_the_row_says_and_none_more_than_one_more(
    pp, virtual, layers, data
):
    virtual = virtual if pp > 1 else 1
    smallest, largest = layers // (pp * virtual), -(-layers // (pp * virtual))
    count = data.draw(st.integers(1, max(1, largest - 1)))
    if count >= largest:
        return
    cells = {"layers": layers, "pp": pp, "virtual_stages": virtual, "global_batch": 2 * pp}
    found = numbers(row(**cells, recompute="full", recompute_layers=count))
    assert min(found) >= min(count, smallest)
    assert max(found) <= count + 1


def test_equal_stages_recompute_equally_many():
    assert numbers(row(layers=16, pp=4, recompute="full", recompute_layers=2)) == [2, 2, 2, 2]
    assert numbers(row(layers=16, pp=4, recompute="full")) == [4, 4, 4, 4]
    assert numbers(row(layers=16, pp=4)) == [0, 0, 0, 0]


def test_a_recomputed_block_takes_its_forward_again_and_keeps_its_input():
    """34 s b h bytes a block (Korthikanti et al. 2022, equation 2 with selective recomputation) and the
    denominators of FlashAttention's softmax, or 2 s b h.
    """
    cells = BIG | {"dropout": "yes", "micro_batch": 2}
    profile = load_profile(row(**cells).gpu)
    backward_s, kept = [], []
    for count in (1, 2, 3):
        lowered = lower(plan_of(row(**cells, recompute="full", recompute_layers=count), profile))
        prices = price(lowered, CostModel(profile)).durations_s
        (block_s,) = (s for a, s in prices.items() if a.kind is Pass.B)
        backward_s.append(block_s)
        kept.append(activation_bytes(lowered)[0])
    empty, longer = (lower(plan_of(row(**cells | {"layers": n}), profile)) for n in (12, 13))
    forward_s = [
        next(s for a, s in price(each, CostModel(profile)).durations_s.items() if a.kind is Pass.F)
        for each in (empty, longer)
    ]
    assert [b - a for a, b in pairwise(backward_s)] == pytest.approx(2 * [forward_s[1] - forward_s[0]])
    assert [a - b for a, b in pairwise(kept)] == 2 * [256 * 2 * ((34 - 2) * 512 + 4 * 8)]


@pytest.mark.parametrize(
    "layout", [{}, {"dp": 2, "zero_stage": 3}, {"pp": 2, "global_batch": 4}, {"lora_rank": 4}]
)
def test_more_recomputed_blocks_take_longer_and_hold_less(layout):
    found = [
        RowPredictor(iteration_s).predict(row(**BIG | layout, recompute="full", recompute_layers=count))
        for count in (1, 3, 5, 0)
    ]
    assert all(a.iteration_s < b.iteration_s and a.peak_bytes > b.peak_bytes for a, b in pairwise(found))


def test_none_of_them_are_all_of_them_but_embedding_and_head():
    plan = plan_of(row(recompute="full"), load_profile("A100-80GB"))
    (settings_of_module,) = plan.settings.modules
    assert (settings_of_module.recompute, settings_of_module.recompute_layers) == (Recompute.BLOCKS, None)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({}, "recompute_layers: want 0 without recompute full, got 1; nearest: 0"),
        ({"recompute": "norm+act"}, "recompute_layers: want 0 without recompute full, got 1; nearest: 0"),
        ({"recompute": "full", "pp": 4}, "want fewer than the 1 blocks of a stage, or 0 for all, got"),
    ],
)
def test_contradictions_name_the_nearest_choice(cells, said):
    with pytest.raises(ValueError) as error:
        row(**cells, recompute_layers=1)
    assert said in str(error.value)
