"""Searches propose experts over data-parallel replicas: exactly, as starts, for models with experts alone."""

from dataclasses import replace

import pytest

from sim.predict import IterationJudge
from tests.joint_jobs import joint_job
from tests.test_strategies import job
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.other_layouts import with_layouts
from workbench.plan.plan import Sharding
from workbench.planner.expert_choices import joint_choices
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice, degrees_of
from workbench.planner.layout_plan import job_with
from workbench.planner.layout_search import exhaustive_layout, fastest_layout
from workbench.planner.layout_space import LayoutSpace
from workbench.planner.layout_step import LayoutSteps
from workbench.search.joint.drive import joint_search
from workbench.search.joint.expert_starts import expert_jobs
from workbench.search.joint.starts import start_tasks
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies import fsdp, megatron_heterogeneous, megatron_homogeneous
from workbench.strategies.registry import PLANNERS

COST = CostModel(load_profile("H100"))
JOINT_MODES = (Mode.HOMOGENEOUS, Mode.APART, Mode.SHARDED, Mode.HYBRID)


def open_job(num_ranks: int = 8) -> Job:
    images = (1, 2, 0, 1, 2, 0, 1, 1)
    return replace(with_layouts(joint_job(images=images, dp=2), ()), max_ranks=num_ranks)


def layouts(mode: Mode) -> list[tuple[float, LayoutChoice]]:
    steps = LayoutSteps(open_job(), COST)
    return list(LayoutSpace(steps, 8).layouts(mode))


@pytest.mark.parametrize("mode", JOINT_MODES)
def test_the_search_is_exact_where_experts_are_over_replicas(mode: Mode) -> None:
    fastest = fastest_layout(open_job(), COST, mode)
    assert fastest.step == exhaustive_layout(open_job(), COST, mode).step
    steps = LayoutSteps(open_job(), COST)
    for bound_s, choice in layouts(mode):
        assert bound_s <= steps.step(choice).step_s * (1 + 1e-9)


@pytest.mark.parametrize("mode", list(Mode))
def test_all_modes_but_one_distribute_experts_over_replicas(mode: Mode) -> None:
    joint = {choice.llm.ep for _, choice in layouts(mode) if choice.llm.joint_replicas > 1}
    assert bool(joint) is (mode in JOINT_MODES)
    assert joint <= {2, 4}  # divisors of the four experts


def test_a_joint_choice_costs_what_its_share_of_the_samples_does() -> None:
    """Prices are those of one replica, however many join it; the experts of a rank are those of its ep."""
    steps = LayoutSteps(open_job(), COST)
    joint = ModuleChoice(module="llm", ep=4, joint_replicas=4, dp=2)
    within = ModuleChoice(module="llm", cp=4, ep=4, dp=2)
    assert joint.num_holders == within.num_holders == 8
    assert joint.num_expert_holders == within.num_expert_holders == 2
    assert steps.state_bytes(joint) == steps.state_bytes(within)
    assert steps.passes_s(joint) == steps.passes_s(replace(joint, dp=1))


@pytest.mark.parametrize("mode", JOINT_MODES)
def test_the_plan_of_a_joint_choice_has_its_degrees(mode: Mode) -> None:
    steps = LayoutSteps(open_job(), COST)
    joint = [choice for _, choice in layouts(mode) if choice.llm.joint_replicas > 1]
    for choice in joint[:: max(1, len(joint) // 12)]:
        laid_out = job_with(open_job(), choice, steps.step(choice))
        if mode in (Mode.SHARDED, Mode.HYBRID):
            plan = fsdp.sharded_plan(laid_out, COST, choice.llm.instances)
        elif mode is Mode.HOMOGENEOUS:
            plan = megatron_homogeneous.of_layout(laid_out, choice, COST)
        else:
            plan = megatron_heterogeneous.plan(laid_out, COST)
        assert degrees_of(plan, "llm") == choice.llm.degrees
        assert len(plan.ranks) == 8
    assert len(joint) > 3


def test_a_dense_model_has_no_degrees_beyond_a_stage() -> None:
    assert joint_choices((), 2, 8) == ()
    assert joint_choices((8,), 2, 8) == (4, 8)
    assert list(expert_jobs(job())) == []


def test_starts_have_experts_over_the_replicas_of_a_node() -> None:
    names = {task.name: task.job for task in start_tasks(open_job(), PLANNERS)}
    expert = names["megatron-homogeneous, ep 4, dp 4, pp 2"]
    assert (expert.replicas, expert.joint_replicas, expert.microbatch_samples) == (1, 4, 4)
    assert {each.sharding for each in expert.settings.modules} == {Sharding.OPTIMIZER}
    dense = {task.name for task in start_tasks(job(), PLANNERS)}
    assert not [name for name in dense if " ep " in name]


def test_a_joint_search_starts_with_experts_over_replicas_and_is_no_worse() -> None:
    scope = Scope(planners={name: PLANNERS[name] for name in ("megatron-homogeneous", "dip")})
    found = joint_search(open_job(), COST, IterationJudge(COST), stop=Stop(candidates=8), scope=scope)
    values = {start.name: start.value for start in found.starts if start.value is not None}
    assert any(" ep " in name for name in values)
    assert found.lower_bound <= found.value <= min(values.values())
