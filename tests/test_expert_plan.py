"""Plans with expert parallelism, and the experiments on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench.expert_parallel import DEGREES, busiest, routing
from runtime.launch import run_local
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from tests import paper_models, tiny_models
from tests.plans import cluster
from tests.test_adapters_llama4 import LLAMA4
from tests.test_composites_weights import tensors_of
from workbench.balance.orchestration.expert_degrees import expert_degrees, nearest_expert_degree
from workbench.cost.expert_parallel import on_rank
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.stage import state_of, updated_elements
from workbench.model.experts import expert_index, is_of_expert, num_experts
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.check import check
from workbench.plan.codec import dumps, loads
from workbench.plan.gradient_groups import gradient_groups
from workbench.plan.plan import ModuleSettings, Plan, Precision, Settings, Sharding
from workbench.report.tables import stage_cells
from workbench.strategies import cornstarch, megatron_heterogeneous

MIXTRAL = paper_models.DECODERS["mixtral"] | {
    "num_local_experts": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
QWEN3_MOE = paper_models.DECODERS["qwen3_moe"]
EXAMPLE = Path(__file__).parents[1] / "examples" / "experts.yaml"
SIZE = Precision.FLOAT64.num_bytes


def moe_plan(
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    dp: int = 1,
    pp: int = 1,
    config: dict[str, Any] = MIXTRAL,
    tokens: int = 5,
    **settings: Any,
) -> Plan:
    """A language model alone."""
    llm = tiny_models.llm(config)
    batch = tuple(Sample(i, (Segment(TEXT, 0, tokens + i, tokens + i),)) for i in range(2 * dp))
    job = Job(
        name="moe",
        model=ModelGraph(name="moe", modules=(llm,), edges=()),
        cluster=cluster(8),
        batch=batch,
        layouts=(ModuleLayout(module="llm", tp=tp, cp=cp, ep=ep, dp=dp, pp=pp),),
        settings=Settings(precision=Precision.FLOAT64, **settings),
        profile="A40",
    )
    return megatron_heterogeneous.plan(job, CostModel(load_profile("A40")))


def changed_by_a_step(
    theirs: Any, config: dict[str, Any], folder: Path, pool: Pool
) -> tuple[set[str], set[str]]:
    """Names of a transformers model's weights without experts', and of those that a step changes.

    Experts are one tensor a layer in what is written.
    """
    torch.manual_seed(0)
    theirs(theirs.config_class.from_dict(config)).save_pretrained(folder / "theirs" / "llm")
    settings = RunSettings(
        steps=1,
        warmup=0,
        weights=folder / "theirs",
        export=folder / "ours",
        precision=Precision.FLOAT64,
    )
    run_local(moe_plan(tp=2, config=config), settings, pool=pool)
    before, after = (tensors_of(folder / name / "llm") for name in ("theirs", "ours"))
    read, written = ({name for name in held if ".experts." not in name} for held in (before, after))
    assert read == written
    return read, {name for name in read if not torch.equal(before[name].double(), after[name].double())}


@given(st.integers(1, 64), st.integers(0, 64))
def test_degrees_divide_both(num_ranks: int, num_experts: int) -> None:
    both = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0 and num_experts % d == 0]
    assert list(expert_degrees(num_ranks, num_experts)) == (both if num_experts else [1])


@given(st.integers(1, 40), st.integers(1, 32), st.integers(0, 32))
def test_the_nearest_degree_is_valid_and_none_is_closer(
    wanted: int, num_ranks: int, num_experts: int
) -> None:
    nearest = nearest_expert_degree(wanted, num_ranks, num_experts)
    valid = expert_degrees(num_ranks, num_experts)
    assert nearest in valid
    assert all(abs(nearest - wanted) <= abs(other - wanted) for other in valid)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 2, "ep": 4}, r"ep must divide its tp x cp = 2 ranks, got 4; nearest: 2"),
        ({"cp": 6, "ep": 6}, r"ep must divide the 4 experts, got 6; nearest: 2"),
        ({"cp": 2, "ep": 2, "config": tiny_models.LLAMA}, r"no experts to distribute, got ep 2; nearest: 1"),
        ({"ep": 0}, r"ep must be >= 1, got 0"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_plan(**degrees)


def test_a_plan_file_keeps_the_degree_and_a_bad_one_is_refused() -> None:
    plan = moe_plan(cp=2, ep=2)
    assert loads(dumps(plan)).stages[0].ep == 2
    (stage,) = plan.stages
    with pytest.raises(ValueError, match=r"stage 0: ep must divide its tp x cp = 2 ranks, got 3; nearest: 2"):
        check(replace(plan, stages=(replace(stage, ep=3),)))


def test_replicas_of_different_degrees_are_refused() -> None:
    plan = moe_plan(cp=2, ep=2, dp=2)
    first, second = plan.stages
    with pytest.raises(ValueError, match=r"different degrees of expert parallelism \[1, 2\]"):
        gradient_groups(replace(plan, stages=(first, replace(second, ep=1))))
    with pytest.raises(ValueError, match=r"different degrees of expert parallelism \[1, 2\]"):
        gradient_groups(replace(plan, stages=(replace(first, ep=1), second)))


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "dp"),
    [(2, 1, 2, 1), (1, 2, 2, 2), (2, 2, 2, 1), (2, 2, 4, 2), (1, 4, 2, 2), (4, 1, 4, 1)],
)
def test_every_expert_is_held_once_per_copy(tp: int, cp: int, ep: int, dp: int) -> None:
    """Groups of a layer's experts: disjoint, of all ranks, `ep` of them; elements add up to the experts."""
    plan = moe_plan(tp=tp, cp=cp, ep=ep, dp=dp)
    groups = gradient_groups(plan)
    for index, layer in enumerate(plan.model.module("llm").layers):
        mine = [g for g in groups if g.weights[0].layer == index and g.weights[0].experts]
        if num_experts(layer) == 0:
            assert mine == []
            continue
        assert len(mine) == ep
        assert sorted(rank for group in mine for rank in group.ranks) == list(plan.ranks)
        dealt = sum(p.num_elements for p in layer.parameters() if is_of_expert(p))
        assert sum(group.num_elements for group in mine) == dealt
        for ranks in (ranks for stage in plan.stages for ranks in stage.expert_ranks):
            assert [position for r in ranks for position, g in enumerate(mine) if r in g.ranks] == list(
                range(ep)
            )
        own = [g for g in groups if g.weights[0] == ("llm", index, None, False)]
        assert len(own) == tp
        assert {len(group.ranks) for group in own} == {cp * dp}


@pytest.mark.parametrize(("tp", "cp", "ep"), [(2, 1, 2), (2, 2, 4), (2, 2, 2)])
def test_state_is_that_of_experts_held(tp: int, cp: int, ep: int) -> None:
    """Weights on a rank: experts over ep, the rest as tensor parallelism cuts it."""
    plan, whole = moe_plan(tp=tp, cp=cp, ep=ep), moe_plan(tp=tp, cp=cp)
    layers = plan.model.module("llm").layers
    experts = sum(p.num_elements for layer in layers for p in layer.parameters() if is_of_expert(p))
    held, cut = (
        sum(size for _, kind, size in state_of(each, 0) if kind.part == "parameters")
        for each in (plan, whole)
    )
    assert held - cut == experts * SIZE // ep - experts * SIZE // tp


def test_a_sharded_optimizer_counts_each_expert_once() -> None:
    """Over all ranks, the parts that they update are the model's trained elements."""
    sharded = (ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER),)
    plan = moe_plan(tp=2, cp=2, ep=2, dp=2, modules=sharded)
    layer = plan.model.module("llm").layers[1]
    own, dealt = updated_elements(plan, plan.stages[0], 1)
    experts = sum(p.num_elements for p in layer.parameters() if is_of_expert(p))
    assert dealt * len(plan.ranks) == experts
    groups = [g for g in gradient_groups(plan) if g.weights[0].layer == 1 and not g.weights[0].experts]
    assert own * len(plan.ranks) == sum(group.num_elements for group in groups)


def test_the_plan_table_shows_the_degree() -> None:
    dealt, cut = moe_plan(tp=2, cp=2, ep=4), moe_plan(tp=2, cp=2)
    assert "2 x 2, ep 4" in stage_cells(dealt, dealt.stages[0])
    assert "2 x 2" in stage_cells(cut, cut.stages[0])


def test_llama4_distributes_its_routed_experts_alone() -> None:
    plan = moe_plan(cp=2, ep=2, config=LLAMA4 | {"num_local_experts": 4})
    layers = plan.model.module("llm").layers
    assert {num_experts(layer) for layer in layers} == {0, 4}
    shared = [p for layer in layers for p in layer.parameters() if ".mlp.shared" in p.name]
    assert shared
    assert not any(is_of_expert(p) for p in shared)


def test_the_example_distributes_eight_experts_over_four_ranks() -> None:
    job = load_job(EXAMPLE)
    plan = cornstarch.plan(job, CostModel(load_profile("A40")))
    (stage,) = (stage for stage in plan.stages if stage.module == "llm")
    assert (stage.cp, stage.tp, stage.ep) == (2, 2, 4)
    dealt = [g for g in gradient_groups(plan) if g.weights[0].experts]
    assert {group.ranks for group in dealt} == {(rank,) for rank in stage.flat_ranks}


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE, LLAMA4], ids=["mixtral", "qwen3", "llama4"])
def test_experts_are_numbered_in_order(config: dict[str, Any]) -> None:
    """So their number follows from the last one's, in whole layers and in what a rank runs of them."""
    for layer in tiny_models.llm(config).layers:
        indices = [expert_index(each) for each in layer.operators if is_of_expert(each)]
        assert list(dict.fromkeys(indices)) == list(range(num_experts(layer)))
        if indices and num_experts(layer) % 2 == 0:
            part = on_rank(layer, Work((RowWork(4, 4, 10),)), Grid(1, 2, 2))
            assert 2 * num_experts(part) == num_experts(layer)


def test_the_busiest_rank_is_counted_over_neighbours() -> None:
    choices = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 0]])  # experts 0 to 3: 4, 2, 1, 1 rows
    assert busiest(choices, 4, 4) == pytest.approx(4 / 2)
    assert busiest(choices, 4, 2) == pytest.approx(6 / 4)
    assert busiest(torch.full((3, 2), 3), 4, 2) == pytest.approx(2.0)


def test_rows_of_a_fresh_router_are_counted_and_assumed() -> None:
    found = routing()
    for ep in DEGREES:
        assert 1.0 <= found[f"busiest.ep{ep}.counted"] <= ep
        assert 1.0 < found[f"busiest.ep{ep}.assumed"] <= ep
