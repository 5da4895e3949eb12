"""Rows that recompute some layers or shard experts."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import iteration_s
from sim.step.sweep import Sweep
from tests.examples import examples
from tests.test_predict import of_all_replicas, row
from tests.test_row_vocabulary import MIXTURE, sharded
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.replicas import with_replicas
from workbench.llm_table.row_bytes import activation_bytes, held_bytes
from workbench.llm_table.row_model import model_of
from workbench.llm_table.row_plan import plan_of
from workbench.memory.stage import state_of
from workbench.model.experts import is_of_expert
from workbench.model.layer import Shard
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Plan, Recompute
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


FEW = MIXTURE | {"layers": 2, "zero_stage": 3, "gpus_per_node": 16}
LAYOUTS = [
    {"dp": 4, "tp": 2, "ep": 2},
    {"dp": 2, "cp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2, "shard_group": 2},
    {"dp": 2, "tp": 2, "ep": 4},
]


def of_joint_replicas(llm: LlmRow) -> Plan:
    """The plan of every replica, those that distribute experts among them joined, with a row for each."""
    apart, num = of_all_replicas(replace(llm, ep=1)), max(1, llm.ep // (llm.tp * llm.cp))
    stages, microbatches = {}, {}
    for stage in apart.stages:
        key = stage.replica // num, stage.layers
        joined = stages.get(key)
        stages[key] = (
            replace(stage, id=len(stages), replica=key[0], ep=llm.ep, joint_replicas=num)
            if joined is None
            else replace(joined, ranks=(*joined.ranks, *stage.ranks))
        )
    for each in apart.microbatches:
        key = each.replica // num, each.index
        rows = (*(microbatches[key].rows if key in microbatches else ()), *each.rows)
        microbatches[key] = replace(each, replica=key[0], rows=rows)
    return replace(
        apart, stages=tuple(stages.values()), microbatches=tuple(microbatches.values()), programs=()
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_replica_gathers_for_all(layout: dict[str, int]):
    """The iteration time and the shards of the plan in which every replica is written out."""
    llm = row(**FEW | layout)
    cost = CostModel(load_profile(llm.gpu))
    whole = lower(sharded(of_joint_replicas(llm), llm.data_ranks // llm.sharing_ranks))
    alone = with_replicas(lower(plan_of(llm, cost.profile)), llm)
    (unit,) = (each for each in shard_units(alone.plan) if 1 in each.stages)
    full = next(each for each in shard_units(whole.plan) if set(unit.stages) & set(each.stages))
    for experts in (False, True):
        assert unit.groups(experts=experts)[0] == full.groups(experts=experts)[0]
    assert sum(map(unit.part, unit.trained)) == sum(map(full.part, full.trained))
    expected, found = (
        Sweep(each).iteration_s(prices.duration_s, prices.step_s)
        for each in (whole, alone)
        for prices in [price(each, cost)]
    )
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "holders", "gathers_experts"),
    [
        ({"dp": 4}, 4, True),
        ({"dp": 4, "ep": 2}, 2, True),
        ({"dp": 4, "ep": 4}, 1, False),
        ({"dp": 4, "ep": 2, "shard_group": 2}, 1, False),
        ({"dp": 4, "tp": 2, "ep": 2}, 4, True),
    ],
    ids=str,
)
def test_experts_are_held_by_those_who_share_them(layout, holders: int, gathers_experts: bool):
    """18 bytes of state an element, over its ranks; two whole units of two bytes, a gradient of four."""
    llm = row(**FEW | layout)
    layers = model_of(llm).modules[0].layers
    others, experts = (
        [
            sum(
                each.num_elements / (1 if is_expert or each.shard is Shard.REPLICATED else llm.tp)
                for each in layer.parameters()
                if is_of_expert(each) is is_expert
            )
            for layer in layers
        ]
        for is_expert in (False, True)
    )
    cut = llm.ep if llm.ep > 1 else llm.tp
    unit = max(a + (b / cut if gathers_experts else 0) for a, b in zip(others, experts, strict=True))
    expected = 18 * (sum(others) / llm.sharing_ranks + sum(experts) / cut / holders) + 8 * unit
    found = held_bytes(lower(plan_of(llm, load_profile(llm.gpu))), llm, 0)
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("layout", [*LAYOUTS, {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}, {"dp": 4}], ids=str)
def test_sharded_state_is_that_of_the_plan_of_all_replicas(layout: dict[str, int], zero_stage: int):
    """Gradients and optimizer state of experts are in as many shards as ranks hold the same ones."""
    llm = row(**FEW | layout | {"zero_stage": zero_stage})
    alone, whole = plan_of(llm, load_profile(llm.gpu)), of_joint_replicas(llm)
    instances = llm.data_ranks // llm.sharing_ranks
    modules = tuple(replace(each, instances=instances) for each in whole.settings.modules)
    whole = replace(whole, settings=replace(whole.settings, modules=modules))
    expected = sum(num_bytes for _, _, num_bytes in state_of(whole, 0))
    assert held_bytes(lower(alone), llm, 0) == pytest.approx(expected, rel=1e-4)


def test_experts_with_one_holder_do_not_travel():
    rounds = {}
    for ep in (1, 4):
        llm = row(**FEW, dp=4, ep=ep)
        cost = CostModel(load_profile(llm.gpu))
        whole = with_replicas(lower(plan_of(llm, cost.profile)), llm)
        prices = price(whole, cost).durations_s
        rounds[ep] = sum(s for action, s in prices.items() if action.kind is Pass.ALL_GATHER)
    assert rounds[4] < rounds[1]


def test_copies_of_experts_are_whole_copies():
    for stage in (1, 2, 3):
        rule = rf"ep: must divide shard_group x tp \(with zero_stage {stage}\) = 2, got 4"
        with pytest.raises(ValueError, match=rule):
            row(**FEW | {"zero_stage": stage}, dp=4, ep=4, shard_group=2)
    assert RowPredictor(iteration_s).predict(row(**FEW, dp=4, ep=4)).iteration_s > 0
