"""What cross-attention layers read is part of what searches count, as the plan has it: seconds and bytes."""

from dataclasses import replace

import pytest

from tests import cross_models
from tests.plans import cluster
from workbench.balance.stages.partition import partition
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.frozen import FrozenRule
from workbench.model.layer import TokenCount
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, Route
from workbench.plan.plan import Precision, Settings
from workbench.planner.assembly import draft_plan
from workbench.planner.boundary_price import crossing_bytes, crossing_tokens, num_readers
from workbench.planner.layer_cost import layer_costs
from workbench.planner.layer_totals import total_of
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_plan import job_with
from workbench.planner.layout_search import exhaustive_layout, fastest_layout
from workbench.planner.layout_space import Freedom
from workbench.planner.layout_step import LayoutSteps
from workbench.planner.sample_work import sample_work
from workbench.schedule.action import Action, Pass
from workbench.strategies import entrain_search, megatron_heterogeneous
from workbench.timing.price import price

COST = CostModel(ideal_profile())


def cross_job(num_ranks: int = 4) -> Job:
    return Job(
        name="cross",
        model=cross_models.model(),
        cluster=cluster(num_ranks),
        batch=cross_models.batch()[:4],
        settings=Settings(precision=Precision.FLOAT64),
    )


def apart(llm_pp: int) -> LayoutChoice:
    encoder = ModuleChoice(module="vision")
    return LayoutChoice(mode=Mode.APART, encoders=(encoder,), llm=ModuleChoice(module="llm", pp=llm_pp))


@pytest.mark.parametrize("llm_pp", [1, 2, 3, 4, 6])
def test_an_estimate_has_the_bytes_and_seconds_of_the_plan(llm_pp: int):
    """One stage reads, or several: features cross to each of them once; stages take what they take there."""
    job = cross_job(1 + llm_pp)
    steps = LayoutSteps(job, COST)
    choice = apart(llm_pp)
    step = steps.step(choice)
    plan = megatron_heterogeneous.plan(job_with(job, choice, step), COST)
    lowered = lower(plan)
    crossed = [
        row.num_bytes
        for row in lowered.transfers
        if row.edge == "vision>llm"
        and row.direction is Direction.FORWARD
        and row.route is not Route.BROADCAST
    ]
    readers = num_readers(job.model.edges[0], step.llm_layers)
    assert readers == len({row.consumer.stage for row in lowered.transfers if row.edge == "vision>llm"
                           and row.direction is Direction.FORWARD})  # fmt: skip
    once_bytes = crossing_bytes(job, job.model.edges[0], len(job.batch))
    assert readers * once_bytes == pytest.approx(sum(crossed), rel=1e-12)
    prices = price(lowered, COST)
    layers = steps.prices.layers(choice.llm, 1)
    for stage in plan.chain["llm", 0]:
        total = total_of(layers[slice(*stage.layers)])
        microbatches = range(len(job.batch))
        for kind, estimated_s in ((Pass.F, total.forward_s), (Pass.B, total.backward_s)):
            planned_s = sum(prices.duration_s(Action(stage.id, kind, index)) for index in microbatches)
            assert estimated_s == pytest.approx(planned_s / len(microbatches), rel=1e-9)


def test_images_that_are_read_make_a_step_longer():
    job = cross_job()
    bare = replace(job, batch=tuple(replace(s, segments=s.segments[-1:]) for s in job.batch))
    assert crossing_tokens(job, job.model.edges[0]) == 5 * cross_models.TOKENS / len(job.batch)
    assert crossing_tokens(bare, job.model.edges[0]) == 0
    one, several = (LayoutSteps(job, COST).step(apart(pp)) for pp in (1, 3))
    assert several.boundary_s == pytest.approx(3 * one.boundary_s)


def test_messages_inside_an_encoder_have_its_own_tokens():
    prices = LayoutSteps(cross_job(), COST).prices
    assert prices.sample_tokens("vision", TokenCount.IN) == 5 * cross_models.TOKENS / 4
    assert prices.sample_tokens("vision", TokenCount.OUT) == 5 / 4


@pytest.mark.parametrize("mode", [Mode.HOMOGENEOUS, Mode.COLOCATED, Mode.APART])
def test_the_search_is_still_exact(mode: Mode):
    job, freedom = cross_job(), Freedom(instances=(1, 2))
    found = fastest_layout(job, COST, mode, freedom=freedom)
    oracle = exhaustive_layout(job, COST, mode, freedom=freedom)
    assert found.step.step_s == oracle.step.step_s


def test_entrain_weighs_samples_as_the_plan_prices_them():
    """Two samples of equal length, one with images: they differ by what the plan's passes differ."""
    job = replace(
        cross_job(2), layouts=(ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=1))
    )
    with_image = job.batch[0]
    length = with_image.num_tokens
    without = replace(job.batch[2], segments=(cross_models.words(0, length),))
    job = replace(job, batch=(with_image, without))
    first_s, second_s = sample_work(job, COST).llm_s
    plan = megatron_heterogeneous.plan(job, COST)
    prices = price(lower(plan), COST)
    stage = plan.chain["llm", 0][0].id
    planned_s = [
        sum(prices.duration_s(Action(stage, kind, index)) for kind in (Pass.F, Pass.B)) for index in (0, 1)
    ]
    assert planned_s[0] > planned_s[1]
    assert first_s - second_s == pytest.approx(planned_s[0] - planned_s[1], rel=1e-9)


def test_entrains_formula_counts_every_stage_that_reads():
    """Of the stages that its dynamic program cuts."""
    job, machine = replace(cross_job(8), layouts=()), CostModel(load_profile("A40"))
    edge, link = job.model.edges[0], job.cluster.inter
    width = job.model.module("vision").layers[edge.after_layer].out_width
    once_s = 5 * cross_models.TOKENS / len(job.batch) * width * 8 / link.bytes_per_s + link.latency_s
    seen = set()
    for found in entrain_search.configurations(job, machine):
        vision, llm = found.layouts
        if vision.tp == llm.tp:
            continue
        costs = layer_costs(job, draft_plan(job, "test"), llm, machine, FrozenRule.EXACT)
        cuts = partition(tuple(each.total_s for each in costs), llm.pp)
        readers = sum(any(first <= layer < last for layer in cross_models.CROSS) for first, last in cuts)
        rounds = len(job.batch) // found.replicas
        assert found.reshard_s == pytest.approx(2 * rounds * readers * once_s)
        seen.add(readers)
    assert max(seen) > 1
