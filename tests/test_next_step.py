"""The per-step part of a plan made anew for another batch, by the code that made it for the first."""

import random
from dataclasses import replace

import pytest

from tests.test_strategies import CLUSTER, cost
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.check import check
from workbench.plan.following import next_plan
from workbench.plan.plan import Plan
from workbench.planner.assembly import scheduled
from workbench.planner.groupings import Grouping, grouped_again, groups_of, replicas_of, round_robin, way_of
from workbench.schedule.choice import ScheduleKind, usual
from workbench.strategies.next_step import next_step
from workbench.strategies.registry import PLANNERS, STRATEGIES

REGROUPING = [spec.name for spec in STRATEGIES if spec.regroup is not None]
NUM_SAMPLES = 8


def batch_of(seed: int) -> tuple[Sample, ...]:
    rng = random.Random(seed)
    return tuple(tiny_batch(*([rng.randrange(3) for _ in range(NUM_SAMPLES)] for _ in range(2))))


def job_of(seed: int, *, pinned: bool = False, replicas: int = 2) -> Job:
    layers = {module.name: len(module.layers) for module in tiny_valm().modules}
    layouts = tuple(
        ModuleLayout(module=name, pp=1, stage_layers=(layers[name],)) if pinned else ModuleLayout(module=name)
        for name in layers
    )
    return Job(
        name="varying",
        model=tiny_valm(),
        cluster=CLUSTER,
        batch=batch_of(seed),
        microbatch_samples=2,
        replicas=replicas,
        layouts=layouts if pinned else (),
        max_ranks=6,
    )


@pytest.mark.parametrize("name", REGROUPING)
def test_the_batch_of_the_plan_gives_the_plan(name: str) -> None:
    made = PLANNERS[name](job_of(0), cost(), lambda *_: None)
    assert next_step(made, made.batch, job_of(0), cost()) == made


@pytest.mark.parametrize("name", REGROUPING)
def test_another_batch_gives_what_the_strategy_makes_of_it_on_these_stages(name: str) -> None:
    first, second = job_of(0, pinned=True), job_of(1, pinned=True)
    made, expected = (PLANNERS[name](each, cost(), lambda *_: None) for each in (first, second))
    assert made.stages == expected.stages
    found = next_step(made, second.batch, first, cost())
    assert found == expected
    assert found.microbatches != made.microbatches


@pytest.mark.parametrize("name", PLANNERS)
def test_every_strategy_plans_further_batches_on_its_stages(name: str) -> None:
    """Those without a grouping of their own by the runtime's rule."""
    job = job_of(0)
    try:
        made = PLANNERS[name](job, cost(), lambda *_: None)
    except ValueError as error:
        pytest.skip(str(error))
    found = next_step(made, batch_of(1), job, cost())
    check(found)
    assert (found.stages, found.settings, found.batch) == (made.stages, made.settings, batch_of(1))


def test_a_regrouped_batch_has_the_schedule_of_the_job() -> None:
    job = replace(job_of(0), schedule=usual(ScheduleKind.GPIPE))
    made = PLANNERS["entrain"](job, cost(), lambda *_: None)
    again = next_step(made, made.batch, job, cost())
    assert again == made
    assert next_step(made, made.batch, job_of(0), cost()).programs != made.programs


def in_a_search(way: Grouping, number: int = 0) -> Plan:
    """A plan of no strategy, its batch grouped by a way."""
    job = job_of(number)
    made = PLANNERS["cornstarch"](job, cost(), lambda *_: None)
    draft = replace(made, strategy="joint", microbatches=grouped_again(job, cost(), way, made.microbatches))
    return scheduled(replace(draft, programs=()), job.schedule, cost())


@pytest.mark.parametrize("way", [way for way in Grouping if way is not Grouping.EVEN])
def test_a_plan_of_no_strategy_is_grouped_again_by_its_way(way: Grouping) -> None:
    first, made = job_of(0), in_a_search(way)
    assert next_step(made, made.batch, first, cost()) == made
    for seed in range(1, 5):
        found = next_step(made, batch_of(seed), first, cost())
        assert found.stages == made.stages
        assert found.microbatches == in_a_search(way, seed).microbatches


def test_a_batch_that_has_no_such_groups_takes_the_places_of_the_first() -> None:
    """Even microbatches, of which replicas want unequal numbers in some batches."""
    first, refused = job_of(0), 0
    made = in_a_search(Grouping.EVEN)
    for seed in range(1, 9):
        found = next_step(made, batch_of(seed), first, cost())
        try:
            assert found.microbatches == in_a_search(Grouping.EVEN, seed).microbatches
        except ValueError:
            refused += 1
            assert found == next_plan(made, batch_of(seed))
    assert 0 < refused < 8


def test_samples_that_no_way_has_put_there_keep_their_places() -> None:
    first, made = job_of(0), in_a_search(Grouping.EVEN_COUNTS)
    groups = groups_of(first, made.microbatches)
    swapped = [(groups[1][0], *groups[0][1:]), (groups[0][0], *groups[1][1:]), *groups[2:]]
    draft = replace(made, microbatches=round_robin(first, swapped, replicas_of(first, made.microbatches)))
    moved = scheduled(replace(draft, programs=()), first.schedule, cost())
    assert way_of(first, cost(), moved.microbatches) is None
    assert next_step(moved, batch_of(1), first, cost()) == next_plan(moved, batch_of(1))
