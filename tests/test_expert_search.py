"""Searches over tensor and expert parallelism of experts, whichever is faster."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.predict import candidate_s
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.corpus import fixed_samples
from workbench.job.draft import Train, draft, machines_of
from workbench.job.job import Job, job_from_spec
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.job.module_layout import ModuleLayout
from workbench.memory.stage import state_of
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.model.zoo import from_shape
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import Settings
from workbench.planner.expert_choices import expert_choices, fastest_degree, with_fastest_degrees
from workbench.planner.judged import MOST_JUDGED, judged
from workbench.planner.layer_totals import total_of
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_plan import job_with
from workbench.planner.layout_search import exhaustive_layout, fastest_layout
from workbench.planner.layout_space import Freedom, LayoutSpace
from workbench.planner.layout_step import LayoutSteps
from workbench.planner.module_price import ModulePrices
from workbench.planner.stage_counts import silent
from workbench.schedule.action import Action, Pass
from workbench.strategies import disttrain, megatron_heterogeneous, megatron_homogeneous
from workbench.timing.price import price
from workbench.units import GB

EXAMPLES = Path(__file__).parents[1] / "examples"
COST = CostModel(load_profile("H100"))
LEAST = Freedom(instances=(1,))
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
FAST = Link(name="nvlink", bytes_per_s=300 * GB, latency_s=2e-6)


def job_on(num_ranks: int, config: dict[str, Any] | None = MIXTRAL, **changes: Any) -> Job:
    node = Node(device="H100", num_ranks=num_ranks, memory_bytes=round(80 * GB))
    llm = from_shape("llama-3.2-3b", module="llm")
    if config is not None:
        llm = module_from_config(config, name="llm", modality=TEXT)
    job = Job(
        name="moe",
        model=ModelGraph(name="moe", modules=(llm,), edges=()),
        cluster=uniform("c", node, num_nodes=1, intra=FAST, inter=FAST),
        batch=fixed_samples(8, text_tokens=2048, items={}),
        settings=Settings(kernels=Kernels.FUSED),
        profile="H100",
    )
    return replace(job, **changes)


def test_degrees_that_are_tried() -> None:
    assert expert_choices((4,), 1) == (1,)
    assert expert_choices((4,), 4) == (1, 2, 4)
    assert expert_choices((4,), 8) == (1, 2, 4)
    assert expert_choices((4, 6), 2) == (1, 2)
    assert expert_choices((4, 6), 4) == (1, 2)
    assert expert_choices((), 4) == (1,)


def llm_grids(job: Job, num_ranks: int) -> set[tuple[int, int, int, int, int]]:
    space = LayoutSpace(LayoutSteps(job, COST), num_ranks, LEAST)
    choices = [choice.llm for _, choice in space.layouts(Mode.COLOCATED)]
    return {(c.tp, c.cp, c.pp, c.dp, c.ep) for c in choices}


def test_the_space_has_every_degree_that_divides_a_stages_ranks_and_the_experts() -> None:
    found = llm_grids(job_on(8), 8)
    for tp, cp, pp, dp, ep in found:
        assert ep in expert_choices((4,), tp * cp)
        assert {(tp, cp, pp, dp, each) for each in expert_choices((4,), tp * cp)} <= found
    assert {ep for *_, ep in found} == {1, 2, 4}
    assert {(tp, ep) for tp, *_, ep in found} >= {(1, 2), (1, 4), (2, 4), (4, 2), (8, 4)}
    assert {ep for *_, ep in llm_grids(job_on(8, None), 8)} == {1}


@pytest.mark.parametrize("freedom", [LEAST, Freedom(instances=(1, 2, 4))])
@pytest.mark.parametrize("chosen", [1, 2])
def test_the_best_layout_is_that_of_pricing_all(freedom: Freedom, chosen: int) -> None:
    job = job_on(8, MIXTRAL | {"num_experts_per_tok": chosen})
    ours = fastest_layout(job, COST, Mode.COLOCATED, freedom=freedom)
    oracle = exhaustive_layout(job, COST, Mode.COLOCATED, freedom=freedom)
    assert ours.step.step_s == oracle.step.step_s
    laid_out = job_with(job, ours.choice, ours.step)
    assert [layout.ep for layout in laid_out.layouts] == [ours.choice.llm.ep]


@pytest.mark.parametrize(
    ("grid", "instances"),
    [((4, 1, 2, 2), 1), ((4, 1, 2, 2), 2), ((2, 2, 2, 4), 1), ((2, 2, 2, 4), 2), ((1, 4, 2, 2), 4)],
)
def test_a_rank_holds_and_takes_what_the_plan_says(grid: tuple[int, ...], instances: int) -> None:
    """Experts with more holders than other weights, and with fewer: state and passes of every stage."""
    tp, cp, dp, ep = grid
    job = job_on(8)
    choice = ModuleChoice(module="llm", tp=tp, cp=cp, dp=dp, ep=ep, instances=instances)
    assert (choice.num_holders, choice.num_expert_holders) == (dp * cp, dp * tp * cp // ep)
    steps = LayoutSteps(job, COST)
    layout = LayoutChoice(mode=Mode.COLOCATED, encoders=(), llm=choice)
    plan = megatron_heterogeneous.plan(job_with(job, layout, steps.step(layout)), COST)
    held = [sum(size for *_, size in state_of(plan, rank)) for rank in plan.ranks]
    assert steps.state_bytes(choice) == pytest.approx(sum(held) / len(held), rel=1e-6)
    prices = price(lower(plan), COST)
    layers = total_of(steps.prices.layers(choice, 1))
    assert prices.duration_s(Action(0, Pass.F, 0)) == pytest.approx(layers.forward_s, rel=1e-9)
    assert prices.duration_s(Action(0, Pass.B, 0)) == pytest.approx(layers.backward_s, rel=1e-9)


def test_what_a_rank_holds_is_known_without_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts whose state does not fit are left out, and pricing them would take most of a search."""
    job = job_on(8)
    choices = [choice.llm for _, choice in LayoutSpace(LayoutSteps(job, COST), 8).layouts(Mode.COLOCATED)]
    assert any(choice.ep > 1 for choice in choices)
    priced = {choice: ModulePrices(job, COST).total(choice, 1) for choice in choices[::7]}
    monkeypatch.setattr(ModulePrices, "_layer", None)
    prices = ModulePrices(job, COST)
    for choice, total in priced.items():
        held = prices.elements(choice)
        assert held == total.held
    assert any(LayoutSteps(job, COST).state_fits(choice) for choice in choices)


def test_instances_divide_the_holders_of_experts_too() -> None:
    with pytest.raises(ValueError, match=r"must divide dp x cp = 4 and, of experts, 2, got 4"):
        ModuleChoice(module="llm", tp=2, cp=2, dp=2, ep=4, instances=4)


def test_a_job_keeps_the_degree_that_it_gives() -> None:
    for ep in (1, 2):
        job = job_on(8, layouts=(ModuleLayout(module="llm", tp=2, cp=1, ep=ep),))
        assert {grid[0] for grid in llm_grids(job, 8)} == {2}
        assert {grid[-1] for grid in llm_grids(job, 8)} == {ep}
    job = job_on(8, layouts=(ModuleLayout(module="llm", tp=2, cp=2, ep=4),))
    assert {(tp, cp, ep) for tp, cp, *_, ep in llm_grids(job, 8)} == {(2, 2, 4)}
    with pytest.raises(ValueError, match=r"over a divisor of tp x cp = 4 ranks, got ep 3; nearest: 2"):
        ModuleChoice(module="llm", tp=4, ep=3)


def test_orchestration_takes_the_faster_of_both() -> None:
    job = job_on(8)
    prices = ModulePrices(job, COST)
    for tp in (1, 2, 4, 8):
        choice = ModuleChoice(module="llm", tp=tp)
        degrees = {1, tp} & set(expert_choices((4,), tp))
        least = min(prices.passes_s(replace(choice, ep=ep), 1) for ep in degrees)
        assert prices.passes_s(replace(choice, ep=fastest_degree(prices, choice)), 1) == least
        (unit,) = disttrain.task_of(job, COST).units
        assert dict(unit.sample_s)[tp] == pytest.approx(least)
    built = disttrain.plan(job, COST)
    (layout,) = with_fastest_degrees(
        replace(job, layouts=(ModuleLayout(module="llm", tp=built.stages[0].tp),)), COST
    ).layouts
    assert {stage.ep for stage in built.stages} == {layout.ep}


@pytest.mark.parametrize(("chosen", "faster"), [(1, 4), (4, 1)])
def test_either_way_can_be_the_faster_one(chosen: int, faster: int) -> None:
    """Over a slow link bytes decide: sums of all tokens, or rows of each one's experts and a gather."""
    job = job_on(4, MIXTRAL | {"num_experts_per_tok": chosen})
    slow = replace(FAST, bytes_per_s=1 * GB)
    job = replace(job, cluster=replace(job.cluster, intra=slow, inter=slow))
    assert fastest_degree(ModulePrices(job, COST), ModuleChoice(module="llm", tp=4)) == faster


def test_the_simulator_chooses_among_layouts_by_both_estimates() -> None:
    """Of experts on 32 GPUs the exchange between replicas decides, which the published estimate hides."""
    drafted = draft(
        str(EXAMPLES / "moe-vlm-64-h100" / "config.json"),
        machines_of("32xH200", None),
        train=Train.LLM,
    )
    job = job_from_spec(parse_spec(drafted.text, where="job.yaml"), folder=EXAMPLES)
    job = replace(job, batch=job.batch[:32])  # one sample a GPU: of more, passes decide
    cost, spec = cost_of(job, None, None), megatron_homogeneous.SPEC
    published = megatron_homogeneous.plan(job, cost)
    chosen = judged(spec, candidate_s)(job, cost, silent)
    assert published in spec.shortlist(job, cost, silent, MOST_JUDGED)
    assert candidate_s(chosen, cost) < 0.9 * candidate_s(published, cost)
