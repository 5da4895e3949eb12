"""The searched strategies: plans are sound, take the layout found, and last as long as believed."""

from dataclasses import replace

import pytest

from sim.step.engine import simulate
from tests.test_layout_search import COST, job_on
from workbench.balance.stages.partition import bottleneck_s
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import TEXT
from workbench.plan.plan import Sharding
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_plan import job_with
from workbench.planner.layout_step import LayoutSteps
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import auto_cornstarch, megatron_heterogeneous, megatron_homogeneous
from workbench.timing.accept import accept
from workbench.timing.price import price

HOMOGENEOUS = megatron_homogeneous.SPEC
COLOCATED = megatron_heterogeneous.SPEC_COLOCATED
ISLANDS = megatron_heterogeneous.SPEC_ISLANDS
STRATEGIES = (HOMOGENEOUS, COLOCATED, ISLANDS)


def iteration_s(plan):
    lowered, _ = accept(plan)
    prices = price(lowered, COST)
    return simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_a_plan_is_accepted_and_takes_all_ranks(strategy):
    plan = strategy.planner(job_on(8, samples=8), COST)
    accept(plan)
    assert plan.strategy == strategy.name
    assert plan.ranks == tuple(range(8))
    assert iteration_s(plan) > 0


def planned(strategy, mode, encoder, llm, **changes):
    """The strategy's plan with all degrees given, and the step that the search believes."""
    job = job_on(8, samples=8, **changes)
    choice = LayoutChoice(
        mode=mode,
        encoders=(ModuleChoice(module="vision", **encoder),),
        llm=ModuleChoice(module="llm", **llm),
    )
    step = LayoutSteps(job, COST).step(choice)
    fixed = replace(job, layouts=job_with(job, choice, step).layouts)
    return strategy.planner(fixed, COST), step


@pytest.mark.parametrize(
    ("strategy", "mode", "encoder", "llm"),
    [
        pytest.param(HOMOGENEOUS, Mode.HOMOGENEOUS, {"tp": 2, "dp": 4}, {"tp": 2, "dp": 4}, id="H-tp2-dp4"),
        pytest.param(
            HOMOGENEOUS,
            Mode.HOMOGENEOUS,
            {"tp": 2, "dp": 2},
            {"tp": 2, "pp": 2, "dp": 2},
            id="H-tp2-pp2-dp2",
        ),
        pytest.param(COLOCATED, Mode.COLOCATED, {"dp": 8}, {"tp": 2, "dp": 4}, id="C-dp8-tp2"),
        pytest.param(COLOCATED, Mode.COLOCATED, {"dp": 8}, {"tp": 2, "pp": 2, "dp": 2}, id="C-dp8-tp2-pp2"),
        pytest.param(ISLANDS, Mode.APART, {"dp": 4}, {"tp": 2, "dp": 2}, id="NC-4-4"),
        pytest.param(ISLANDS, Mode.APART, {"dp": 4}, {"tp": 4, "dp": 1}, id="NC-4-4-in-turn"),
    ],
)
def test_the_step_believed_is_the_step_simulated(strategy, mode, encoder, llm):
    plan, step = planned(strategy, mode, encoder, llm)
    stages = {s.module: s for s in plan.stages}
    assert stages["llm"].tp == llm["tp"]
    assert len(plan.replicas("llm")) == llm["dp"]
    assert len(plan.replicas("vision")) == encoder["dp"]
    assert step.passes_s == pytest.approx(passes_and_step_s(plan), rel=0.03)


def passes_and_step_s(plan):
    """The simulated iteration where reductions cost nothing: what hides them is the step model's own rule."""
    lowered, _ = accept(plan)
    prices = price(lowered, COST)
    trace = simulate(
        lowered,
        lambda action: 0.0 if action.kind is Pass.REDUCE_GRAD else prices.duration_s(action),
        step_s=lambda rank: 0.0,
    )
    return trace.iteration_s


def test_encoders_of_a_homogeneous_plan_share_the_first_stages_ranks():
    plan, _ = planned(HOMOGENEOUS, Mode.HOMOGENEOUS, {"tp": 2, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2})
    for replica in (0, 1):
        (encoder,) = plan.chain["vision", replica]
        first, last = plan.chain["llm", replica]
        assert encoder.ranks == first.ranks != last.ranks
        assert first.layers[1] < last.layers[1] - last.layers[0]  # it makes up for the encoder


def test_optimizer_state_is_sharded_where_there_are_replicas():
    plan = megatron_heterogeneous.plan_colocated(job_on(8, samples=8), COST)
    for module in plan.model.modules:
        replicas = len(plan.replicas(module.name))
        settings = plan.settings.of(module.name)
        assert (settings.sharding is Sharding.OPTIMIZER) == (
            replicas * plan.stages[0].cp > settings.instances
        )


def test_colocated_plans_run_in_three_phases():
    plan, _ = planned(COLOCATED, Mode.COLOCATED, {"dp": 8}, {"tp": 2, "pp": 2, "dp": 2})
    texts = {m.name for m in plan.model.modules if m.modality == TEXT}
    for program in plan.programs:
        modules = [plan.stage[a.stage].module in texts for a in program.actions if a.kind in (Pass.F, Pass.B)]
        first, last = modules.index(True), len(modules) - modules[::-1].index(True)
        assert all(modules[first:last])


def test_other_schedules_are_refused_by_name():
    job = job_on(8, samples=8, schedule=Schedule(kind=ScheduleKind.GPIPE))
    with pytest.raises(ValueError, match="nearest: three-phase"):
        megatron_heterogeneous.plan_colocated(job, COST)


def test_loosely_coupled_encoders_keep_the_llms_pace():
    job = job_on(8, samples=8)
    plan = auto_cornstarch.plan(job, COST)
    accept(plan)
    layers_s = believed_layers_s(job, plan, COST, FROZEN_AWARE.layer_s)

    def slowest_s(module):
        return max(sum(layers_s[module][slice(*stage.layers)]) for stage in plan.chain[module, 0])

    llm_s = slowest_s("llm")
    assert slowest_s("vision") <= llm_s
    if len(plan.chain["vision", 0]) > 1:  # one stage fewer would be slower than the LLM's
        assert bottleneck_s(layers_s["vision"], len(plan.chain["vision", 0]) - 1) > llm_s


def test_loosely_coupled_is_the_best_of_one_plan_per_depth():
    job = job_on(4, samples=8)
    plan = auto_cornstarch.plan(job, COST)
    layers_s = believed_layers_s(job, plan, COST, FROZEN_AWARE.layer_s)
    found = iteration_s(plan)
    num_planned = 0
    for depth in (1, 2, 3):
        fixed = replace(job, layouts=(ModuleLayout(module="llm", pp=depth),))
        pace_s = bottleneck_s(layers_s["llm"], depth)
        if bottleneck_s(layers_s["vision"], 4 - depth) > pace_s:  # what ranks are left cannot keep pace
            with pytest.raises(ValueError, match="no depth of the LLM fits 4 ranks"):
                auto_cornstarch.plan(fixed, COST)
        else:
            num_planned += 1
            assert found <= iteration_s(auto_cornstarch.plan(fixed, COST)) * 1.02
    assert num_planned > 1
