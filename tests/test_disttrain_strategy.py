"""DistTrain's degrees become a plan that is sound, fits, and is what the formula chose."""

from dataclasses import replace

import pytest

from tests.layout_jobs import layout_job, vision_language
from workbench.balance.orchestration.exact import orchestrate
from workbench.balance.orchestration.task import Degrees, Orchestration
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.strategies import disttrain
from workbench.timing.accept import accept

COST = CostModel(load_profile("A40"))


def vision_job(num_ranks: int) -> Job:
    return layout_job(
        vision_language(), {}, microbatch=1, images=(1, 2, 1, 1, 2, 1, 1, 1), num_ranks=num_ranks
    )


def degrees_of(plan: Plan) -> tuple[tuple[int, int, int], ...]:
    """(tp, dp, pp) of every module."""
    found = []
    for module in plan.model.modules:
        stages = [stage for stage in plan.stages if stage.module == module.name]
        replicas = {stage.replica for stage in stages}
        found.append((stages[0].tp, len(replicas), len(stages) // len(replicas)))
    return tuple(found)


@pytest.mark.parametrize("num_ranks", [2, 5, 8, 16])
def test_the_plan_has_the_degrees_that_the_formula_chose(num_ranks: int):
    job = vision_job(num_ranks)
    chosen = orchestrate(disttrain.task_of(job, COST))
    plan = disttrain.plan(job, COST)
    accept(plan)
    assert plan.strategy == "disttrain"
    assert degrees_of(plan) == tuple((d.tp, d.dp, d.pp) for d in chosen.degrees)
    assert len(plan.ranks) == chosen.num_gpus <= num_ranks


def test_more_ranks_are_never_slower():
    times_s = [orchestrate(disttrain.task_of(vision_job(n), COST)).iteration_s for n in (2, 4, 8, 16)]
    assert times_s == sorted(times_s, reverse=True)


def test_memory_and_state_follow_the_job():
    task = disttrain.task_of(vision_job(4), COST)
    vision, llm = task.units
    weights = sum(
        p.num_elements for layer in vision_language().module("llm").layers for p in layer.parameters()
    )
    assert llm.weight_bytes == weights * 8 * 4  # float64: weight, gradient, two moments, not shared
    assert llm.optimizer_bytes == 0
    assert llm.reduction_bytes == weights * 8 * 2
    assert vision.activation_bytes > 0
    assert [tp for tp, _ in llm.sample_s] == [1, 2]  # two key/value heads


def test_what_does_not_fit_is_named():
    job = vision_job(4)
    node = replace(job.cluster.nodes[0], memory_bytes=2**18)
    small = replace(job, cluster=replace(job.cluster, nodes=(node,) * len(job.cluster.nodes)))
    with pytest.raises(ValueError, match=r"unit 'vision' does not fit on 4 GPUs of 0\.000244 GiB"):
        disttrain.plan(small, COST)


def test_wider_groups_stand_in_front_so_that_none_leaves_its_node():
    """An encoder of one rank in front would push every pair of the LLM across a border of nodes of two."""
    job = vision_job(8)
    found = Orchestration(
        degrees=(Degrees(tp=1, dp=1, pp=1), Degrees(tp=2, dp=1, pp=2)),
        warmup_s=0.0,
        steady_s=0.0,
        reduction_s=0.0,
    )
    placed = disttrain.with_degrees(job, found)
    assert {layout.module: layout.rank_offset for layout in placed.layouts} == {"vision": 4, "llm": 0}
