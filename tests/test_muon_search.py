"""Layouts searched for Muon: its step and state are those of the plan, and no listed layout is faster."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from runtime.world.pool import Pool
from sim.predict import candidate_s
from tests.layout_jobs import layout_job, vision_language
from tests.test_expert_search import MIXTRAL
from tests.test_expert_search import job_on as expert_job
from tests.test_fsdp import assert_trains_as_one
from tests.test_fsdp_instances import MODES, job_of, simulated_s, steps_of_all
from tests.test_fsdp_plan import fsdp_job
from tests.test_layout_search import COST, LEAST, WIDE, assert_state_is_that_of_its_plan, text_job
from tests.test_layout_search import job_on as vision_job
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import peak_bytes
from workbench.memory.stage import state_of
from workbench.model.model_graph import connect
from workbench.model.muon import muon_matrices
from workbench.model.zoo import from_shape
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.optimizer import Optimizer
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.plan import ModuleSettings, Plan, Precision, Settings, Sharding
from workbench.planner.judged import MOST_JUDGED
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_search import exhaustive_layout, fastest_layout
from workbench.planner.layout_space import LayoutSpace
from workbench.planner.layout_step import LayoutSteps
from workbench.planner.stage_counts import PlannerStopped, silent
from workbench.strategies import disttrain, entrain_search, fsdp
from workbench.strategies.elastic_templates import elastic_templates
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.timing.muon import MuonPrices
from workbench.timing.price import update_bytes
from workbench.timing.weights import WeightPrices

A40 = CostModel(load_profile("A40"))
SEARCHING = {
    "megatron-homogeneous": Mode.HOMOGENEOUS,
    "megatron-colocated": Mode.COLOCATED,
    "megatron-islands": Mode.APART,
}


def by_muon(job: Job) -> Job:
    return replace(job, settings=replace(job.settings, optimizer=Optimizer.MUON))


def updates_s(plan: Plan, cost: CostModel) -> dict[int, float]:
    """By rank, the seconds of the plan's updates and of their exchanges with owners."""
    lowered = lower(plan)
    updated = [group.num_elements / optimizer_shards(plan, group).num_shards for group in lowered.groups]
    muon = MuonPrices(plan, lambda _: cost, WeightPrices(lowered, lambda _: cost)).seconds(
        lowered.groups, updated
    )
    found = {}
    for rank, products_s, exchanges_s in zip(plan.ranks, muon.updates, muon.exchanges, strict=True):
        elements = sum(n for n, group in zip(updated, lowered.groups, strict=True) if rank in group.ranks)
        adamw_s = cost.update_s(elements * update_bytes(plan.settings, cost))
        found[rank] = adamw_s + products_s + exchanges_s
    return found


def untied_job(**changes: Any) -> Job:
    """Embedding and head are two tables."""
    llm = from_shape("llama-3.1-8b", module="llm")
    vision = from_shape("siglip-so400m-14-384", module="vision", llm_width=llm.layers[0].out_width)
    return vision_job(8, model=connect("vlm", (vision, llm)), **changes)


def with_layouts(job: Job, **degrees: int) -> Job:
    layouts = tuple(ModuleLayout(module=module.name, **degrees) for module in job.model.modules)
    return replace(job, layouts=layouts)


def sharded(mode: Mode) -> Callable[[Job], Plan]:
    def build(job: Job) -> Plan:
        return fsdp.fastest_of_size(job, COST, mode)[1]

    return build


def planned(name: str) -> Callable[[Job], Plan]:
    def build(job: Job) -> Plan:
        return PLANNERS[name](job, COST)

    return build


@pytest.mark.parametrize(
    ("mode", "plan_of", "job"),
    [
        pytest.param(Mode.SHARDED, sharded(Mode.SHARDED), untied_job(), id="fsdp"),
        pytest.param(Mode.HYBRID, sharded(Mode.HYBRID), untied_job(), id="hsdp"),
        pytest.param(
            Mode.SHARDED,
            sharded(Mode.SHARDED),
            with_layouts(expert_job(8), cp=2, dp=4, ep=2),
            id="fsdp-experts",
        ),
        pytest.param(Mode.HYBRID, sharded(Mode.HYBRID), expert_job(8), id="hsdp-experts-of-replicas"),
        pytest.param(
            Mode.HOMOGENEOUS,
            planned("megatron-homogeneous"),
            with_layouts(untied_job(), tp=2, dp=4, pp=1),
            id="homogeneous",
        ),
        pytest.param(
            Mode.COLOCATED,
            planned("megatron-colocated"),
            with_layouts(untied_job(), tp=4, dp=2, pp=1),
            id="colocated",
        ),
        pytest.param(
            Mode.COLOCATED,
            planned("megatron-colocated"),
            with_layouts(expert_job(8), tp=2, cp=2, dp=2, pp=1, ep=4),
            id="experts",
        ),
        pytest.param(
            Mode.APART,
            planned("megatron-islands"),
            with_layouts(untied_job(), tp=2, dp=2, pp=1),
            id="islands",
        ),
    ],
)
def test_an_update_is_priced_as_that_of_the_plan(
    mode: Mode, plan_of: Callable[[Job], Plan], job: Job
) -> None:
    """Owners, products, gathers over tp ranks and exchanges: the busiest rank's are those of the plan."""
    job = by_muon(job)
    step = fastest_layout(job, COST, mode).step
    plan = plan_of(job)
    assert plan.settings.optimizer is Optimizer.MUON
    found = max(updates_s(plan, COST).values())
    assert step.update_s == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_best_layout_is_that_of_pricing_all_and_none_beats_its_bound(mode: Mode) -> None:
    job = by_muon(vision_job(8, memory_gb=30.0, samples=8))
    found = fastest_layout(job, COST, mode, freedom=LEAST)
    oracle = exhaustive_layout(job, COST, mode, freedom=LEAST)
    assert found.step.step_s == oracle.step.step_s
    steps = LayoutSteps(job, COST)
    for bound_s, choice in LayoutSpace(steps, 8, LEAST).layouts(mode):
        assert steps.step(choice).step_s >= bound_s * (1 - 1e-9), choice


@pytest.mark.parametrize("config", [None, MIXTRAL])
def test_more_owners_have_less_to_do(config: dict[str, Any] | None) -> None:
    """Ranks that cut a matrix repeat its products, so that replicas in their place shorten the update."""
    steps = LayoutSteps(by_muon(expert_job(8, config)), COST)
    updates = [
        steps.step(
            LayoutChoice(mode=Mode.COLOCATED, encoders=(), llm=ModuleChoice(module="llm", tp=tp, dp=8 // tp))
        ).update_s
        for tp in (1, 2, 4)
    ]
    assert 1.5 * updates[0] < updates[1] < updates[2] / 1.5


@pytest.mark.parametrize("wide", WIDE)
def test_state_of_a_layout_is_that_of_its_plan(wide: Precision | None) -> None:
    """One momentum of matrices, shared among four replicas."""
    assert_state_is_that_of_its_plan(by_muon(text_job(wide)))


def test_state_of_sharded_parameters_is_less_by_one_moment_of_matrices() -> None:
    job, choice = text_job(None), ModuleChoice(module="llm", dp=4)
    layout = LayoutChoice(mode=Mode.SHARDED, encoders=(), llm=choice)
    peaks = [LayoutSteps(each, COST).step(layout).peak_bytes for each in (job, by_muon(job))]
    elements = sum(m.num_elements for layer in job.model.llm.layers for m in muon_matrices(layer))
    assert peaks[0] - peaks[1] == pytest.approx(elements * 4 / 4, rel=1e-9)


@pytest.mark.parametrize("grid", [(4, 1, 2, 2), (2, 2, 2, 4)])
def test_state_of_experts_is_that_of_the_plan(grid: tuple[int, ...]) -> None:
    """Experts with more holders than other weights, and with fewer."""
    tp, cp, dp, ep = grid
    num_ranks = tp * cp * dp
    job = by_muon(expert_job(num_ranks))
    laid_out = with_layouts(job, tp=tp, cp=cp, dp=dp, ep=ep, pp=1)
    choice = fastest_layout(laid_out, COST, Mode.COLOCATED).choice.llm
    plan = PLANNERS["megatron-colocated"](laid_out, COST)
    held = [sum(size for _, _, size in state_of(plan, rank)) for rank in plan.ranks]
    assert LayoutSteps(job, COST).state_bytes(choice) == pytest.approx(sum(held) / num_ranks, rel=1e-6)


@pytest.mark.parametrize("strategy", SEARCHING)
def test_no_layout_of_the_list_is_faster_in_simulation(strategy: str) -> None:
    """Every plan that a layout of the mode gives, simulated: the estimate chooses the fastest."""
    job = by_muon(layout_job(vision_language(), {}, microbatch=1, images=(1,) * 4, num_ranks=4))
    plan = PLANNERS[strategy](job, A40)
    accept(plan)
    assert plan.settings.optimizer is Optimizer.MUON
    layouts = {
        tuple(replace(each.layout, rank_offset=None) for each in (*choice.encoders, choice.llm))
        for _, choice in LayoutSpace(LayoutSteps(job, A40), 4, LEAST).layouts(SEARCHING[strategy])
    }
    listed_s = [simulated_s(PLANNERS[strategy](replace(job, layouts=given), A40)) for given in layouts]
    assert len(listed_s) >= 9
    assert simulated_s(plan) <= min(listed_s) * (1 + 1e-9)


@pytest.mark.parametrize("strategy", MODES)
def test_no_microbatch_and_no_part_of_the_ranks_is_faster(strategy: str) -> None:
    """10 samples on 8 ranks: every size and every number of ranks, by the estimate and in simulation."""
    job = by_muon(job_of(10, 8))
    plan = PLANNERS[strategy](job, A40)
    least_s = min(steps_of_all(job, strategy))
    assert simulated_s(plan) == pytest.approx(least_s, rel=0.05)
    samples = max(len(m.items) for m in plan.microbatches if m.module == "llm")
    ours_s, _ = fsdp.fastest_of_size(
        replace(job, microbatch_samples=samples), A40, MODES[strategy], num_ranks=len(plan.ranks)
    )
    assert ours_s == least_s


def test_the_plans_memory_decides_which_layout_fits() -> None:
    """Also that of the orthogonalisation, which the estimate leaves out."""
    job = by_muon(fsdp_job(2))
    ample, memory = accept(fsdp.plan(job, A40))
    most = max(peak_bytes(ample, memory).values())
    lowered, memory = accept(fsdp.plan(by_muon(fsdp_job(2, memory_bytes=most - 1)), A40))
    assert max(peak_bytes(lowered, memory).values()) < most


def test_disttrain_counts_one_momentum_of_matrices_and_its_plan_is_sound() -> None:
    job = layout_job(vision_language(), {}, microbatch=1, images=(1, 2, 1, 1), num_ranks=4)
    elements = sum(m.num_elements for layer in job.model.llm.layers for m in muon_matrices(layer))
    for sharding in (Sharding.NONE, Sharding.OPTIMIZER):
        own = tuple(ModuleSettings(module=m.name, sharding=sharding) for m in job.model.modules)
        by_adamw = replace(job, settings=replace(job.settings, modules=own))
        tasks = [disttrain.task_of(each, A40).units[1] for each in (by_adamw, by_muon(by_adamw))]
        weights, state = (
            getattr(tasks[0], part) - getattr(tasks[1], part) for part in ("weight_bytes", "optimizer_bytes")
        )
        saved = 8 * elements  # float64
        assert (weights, state) == ((saved, 0) if sharding is Sharding.NONE else (0, saved))
        plan = PLANNERS["disttrain"](by_muon(by_adamw), A40)
        assert plan.settings.optimizer is Optimizer.MUON
        assert simulated_s(plan) > 0


@pytest.mark.parametrize(("strategy", "num_by_formula"), [(disttrain, 1), (entrain_search, MOST_JUDGED)])
def test_the_simulator_chooses_among_plans_by_formulas_with_the_update_too(
    strategy: ModuleType, num_by_formula: int
) -> None:
    """The sources' formulas leave it out, and take replicas that all update every matrix whole."""
    job = by_muon(vision_job(8, samples=8, memory_gb=140.0, settings=Settings(kernels=Kernels.FUSED)))
    published = strategy.plan(job, COST)
    plans = strategy.shortlist(job, COST, silent, MOST_JUDGED)
    assert plans[0] == published
    seconds = [candidate_s(plan, COST) for plan in plans]
    assert min(seconds) < 0.95 * min(seconds[:num_by_formula])
    assert min(seconds) < 0.7 * seconds[0]


@pytest.mark.parametrize("error", [ValueError("nothing fits"), PlannerStopped()], ids=repr)
def test_published_plans_are_kept_where_the_formula_with_the_update_has_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = by_muon(vision_job(8, samples=8, memory_gb=140.0, settings=Settings(kernels=Kernels.FUSED)))
    published, best_placed = disttrain.plan(job, COST), disttrain.best_placed

    def placed(*given: Any, counts_updates: bool = False) -> Job:
        if counts_updates:
            raise error
        return best_placed(*given)

    monkeypatch.setattr(disttrain, "best_placed", placed)
    assert disttrain.shortlist(job, COST, silent, MOST_JUDGED)[0] == published


def test_entrains_formula_adds_the_step_of_the_slowest_module() -> None:
    """Of one rank: each of two stages has half of the module, and replicas share sharded state."""
    for sharding, sharing in ((Sharding.NONE, 1), (Sharding.OPTIMIZER, 2)):
        job = vision_job(8, samples=8)
        own = tuple(ModuleSettings(module=module.name, sharding=sharding) for module in job.model.modules)
        job = replace(job, settings=replace(job.settings, modules=own))
        found = next(
            each
            for each in entrain_search.configurations(job, COST)
            if each.replicas == 2 and {(x.tp, x.pp) for x in each.layouts if x.module == "llm"} == {(1, 2)}
        )
        elements = job.model.llm.num_trained
        expected = COST.update_s(elements * update_bytes(job.settings, COST)) / (2 * sharing)
        assert found.updated_s - found.formula_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("strategy", MODES)
def test_a_searched_plan_trains_as_one_process(strategy: str, pool: Pool) -> None:
    layouts = tuple(ModuleLayout(module=name, dp=4) for name in ("vision", "llm"))
    job = by_muon(replace(job_of(4, 4), layouts=layouts))
    job = replace(job, settings=replace(job.settings, precision=Precision.FLOAT64))
    plan = PLANNERS[strategy](job, A40)
    assert len(plan.ranks) == 4
    assert_trains_as_one(plan, pool)


def test_templates_of_elastic_training_refuse_it() -> None:
    job = by_muon(vision_job(8))
    with pytest.raises(ValueError, match="templates count the state of optimizer 'adamw', got 'muon'"):
        elastic_templates(job, COST, num_nodes=1, num_faults=0)
