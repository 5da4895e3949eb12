"""The next step's batches."""

import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from runtime.data.batches import SyntheticSource
from runtime.launch import RunResult, run_lowered
from runtime.reference import Reference, ReferenceResult
from runtime.run_settings import Collect, RunSettings
from runtime.step.stage_module import StageInput, StageModule, build_stage_module
from runtime.step_plans import NextBatches, batches_after
from runtime.world.pool import Pool, WorldFailed
from tests.test_context_parallel_step import embedded, plan_of, prepended, short, with_owners
from tests.test_parity import SEED, assert_parity, norm_of
from tests.test_strategies import CLUSTER, cost
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.check import check
from workbench.plan.codec import plan_hash
from workbench.plan.following import next_plan
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision
from workbench.plan.stage import Stage
from workbench.planner.assembly import scheduled
from workbench.planner.groupings import Grouping, grouped_again, groups_of, replicas_of, round_robin, way_of
from workbench.schedule.choice import ScheduleKind, usual
from workbench.strategies.next_step import next_step
from workbench.strategies.registry import PLANNERS, STRATEGIES

TEXT = Segment("text", 0, 9, 9)
FIRST = (embedded(0, "causal"), short(1, "causal"), prepended(2, "causal"))
BATCHES = (
    (prepended(10, "multimodal"), embedded(11, "multimodal_items"), short(12, "causal")),
    (Sample(20, (TEXT,)), Sample(21, (TEXT,)), embedded(22, "gemma")),
    (embedded(30, "full"), prepended(31, "gemma"), embedded(32, "causal")),
)
FOLLOWING = NextBatches(batches=BATCHES, rule=partial(next_plan, block_tokens=2))


def settings_of(steps: int, precision: Precision = Precision.FLOAT64, **other: object) -> RunSettings:
    return RunSettings(
        steps=steps,
        seed=SEED,
        precision=precision,
        collect=Collect.STATE,
        timeout_s=30.0,
        **other,  # type: ignore[arg-type]
    )


def plan_with_owners(mix: str, *, cp: int = 2, llm: tuple[int, ...] = (3, 3)) -> Plan:
    """The first batch is what "causal" means in the tests of one step."""
    plan = with_owners(plan_of(mix, "causal", cp=cp, llm=llm), "lpt")
    assert plan.batch == FIRST
    return plan


def one_process(plan: Plan, steps: int) -> list[ReferenceResult]:
    torch.set_num_threads(1)
    reference = Reference(plan, seed=SEED, dtype=torch.float64)
    results = []
    for step in range(steps):
        reference.plan = replace(plan, batch=(FIRST, *BATCHES)[step % 4])
        results.append(reference.step(SyntheticSource(SEED)))
    return results


@pytest.mark.parametrize(
    ("mix", "cp", "llm", "steps"),
    [
        pytest.param("everything", 2, (3, 3), 6, id="two-ranks-twice-round"),
        pytest.param("projectors-and-llm", 2, (6,), 4, id="frozen-encoders"),
        pytest.param("projectors", 4, (6,), 3, id="four-ranks"),
    ],
)
def test_every_step_is_that_of_one_process(
    mix: str, cp: int, llm: tuple[int, ...], steps: int, pool: Pool
) -> None:
    plan = plan_with_owners(mix, cp=cp, llm=llm)
    result = run_lowered(lower(plan), settings_of(steps, following=FOLLOWING), pool=pool)
    references = one_process(plan, steps)
    for loss, reference in zip(result.losses, references, strict=True):
        assert abs(loss - reference.loss) <= 1e-10 * abs(reference.loss)
    last = (FIRST, *BATCHES)[(steps - 1) % 4]
    assert_last_step(replace(plan, batch=last), result, references[-1])


def assert_last_step(plan: Plan, result: RunResult, reference: ReferenceResult) -> None:
    """Gradients and weights; gradients that are rounding on fresh weights are so on trained ones."""
    scale = norm_of(reference.gradients)
    for state in result.states:
        for key, gradient in state.gradients.items():
            assert (gradient - reference.gradients[key]).norm() <= 1e-10 * scale, key
    assert_parity(plan, replace(result, losses=(result.losses[-1],)), reference, Precision.FLOAT64)


def test_traces_are_of_the_plans_that_ran(pool: Pool) -> None:
    """All ranks ran the plan that planning a batch by itself gives; programs differ where they must."""
    plan = plan_with_owners("projectors-and-llm")
    result = run_lowered(lower(plan), settings_of(5, following=FOLLOWING), pool=pool)
    expected = [plan, *(next_plan(plan, batch, block_tokens=2) for batch in BATCHES)]
    expected.append(next_plan(plan, FIRST, block_tokens=2))
    assert [step.plan for step in result.plans] == expected
    assert [trace.plan_hash for trace in result.traces] == [plan_hash(one) for one in expected]
    assert expected[2].programs != plan.programs  # one image instead of two
    assert expected[1].token_shards != plan.token_shards


class Slow(StageModule):
    """A stage that takes its time."""

    def forward(self, inputs: StageInput) -> torch.Tensor:
        time.sleep(0.3)
        return super().forward(inputs)


def slow_stage(plan: Plan, stage: Stage, **settings: object) -> StageModule:
    built = build_stage_module(plan, stage, **settings)  # type: ignore[arg-type]
    built.__class__ = Slow
    return built


def test_planning_hides_behind_the_step(pool: Pool) -> None:
    """From the second step on, when the planner's process has started, no step waits for its plan."""
    plan = plan_with_owners("projectors-and-llm")
    settings = settings_of(4, following=FOLLOWING)
    result = run_lowered(lower(plan), settings, pool=pool, build=slow_stage)
    assert [planning.step for planning in result.plannings] == [1, 2, 3]
    for planning in result.plannings[1:]:
        assert planning.end_s - planning.start_s > 0
        assert planning.waited_s < 0.3


def test_a_batch_that_cannot_follow_ends_the_run_by_name(pool: Pool) -> None:
    plan = plan_with_owners("projectors-and-llm")
    following = replace(FOLLOWING, batches=(BATCHES[0][:2],))
    with pytest.raises((ValueError, WorldFailed), match="step 1: next batch: the plan has places for 3"):
        run_lowered(lower(plan), settings_of(2, following=following), pool=pool)


def test_batches_of_a_folder_are_what_the_plan_left() -> None:
    samples = [partial(short, mask="causal")(index) for index in range(11)]
    following = batches_after(samples[2:5], samples)
    ids = [[sample.id for sample in batch] for batch in following.batches]
    assert ids == [[0, 1, 5], [6, 7, 8]]  # two are left over
    with pytest.raises(ValueError, match="at least 3 samples besides the plan's own 3, got 2"):
        batches_after(samples[:3], samples[:5])


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
