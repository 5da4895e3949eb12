"""Strategies that regroup samples: Entrain and DistTrain's reordering train the same, and more evenly."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from runtime.world.pool import Pool
from sim.step.engine import simulate
from tests.plans import cluster
from tests.test_parity import assert_same, mixed
from tests.tiny_valm import tiny_batch
from workbench.balance.microbatches.reorder_interleaved import reorder_in_programs
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.cost.quadratic import Quadratic, fit_quadratic
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.lower import lower
from workbench.plan.plan import Precision, Settings
from workbench.planner.sample_work import sample_work
from workbench.schedule.action import COMPUTE, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.strategies import entrain, reordered
from workbench.timing.critical_path import critical_path_s
from workbench.timing.price import price
from workbench.timing.stage_times import stage_times

COST = CostModel(ideal_profile())
IMAGES = (3, 0, 1, 2, 0, 3, 1, 0, 2, 1, 0, 3)
TEXTS = (5, 60, 8, 90, 4, 40, 7, 30, 6, 75, 20, 11)
CLIPS = (0, 2, 0, 1, 1, 0, 2, 0, 0, 1, 2, 1)


def skewed_batch() -> tuple[Sample, ...]:
    """The tiny samples with a text of very different lengths behind them."""
    return tuple(
        replace(sample, segments=(*sample.segments[:-1], Segment("text", 2, text, text)))
        for sample, text in zip(tiny_batch(IMAGES, CLIPS), TEXTS, strict=True)
    )


def skewed_job(
    mix: str = "projectors-and-llm", *, replicas: int = 1, schedule: Schedule | None = None
) -> Job:
    return Job(
        name="skewed",
        model=mixed(mix),
        cluster=cluster(8),
        batch=skewed_batch(),
        microbatch_samples=3 if replicas == 1 else 2,
        replicas=replicas,
        layouts=tuple(ModuleLayout(module=m, pp=pp) for m, pp in (("vision", 1), ("audio", 1), ("llm", 2))),
        schedule=schedule or Schedule(),
        settings=Settings(precision=Precision.FLOAT64),
    )


def llm_loads(job: Job, microbatches: tuple[tuple[int, ...], ...]) -> list[float]:
    work = sample_work(job, COST)
    return [sum(work.llm_s[index] for index in places) for places in microbatches]


def test_deferral_lightens_the_heaviest_llm_microbatch():
    job = skewed_job()
    (assignment,) = entrain.assign(job, COST)
    assert any(assignment.deferred)
    assert max(llm_loads(job, assignment.llm)) < max(llm_loads(job, assignment.encoder))


def test_encoder_forwards_of_a_cut_microbatch_are_adjacent():
    job = skewed_job()
    plan = entrain.plan(job, COST)
    (assignment,) = entrain.assign(job, COST)
    kept, deferred = next(
        (set(places) - set(late), set(late))
        for places, late in zip(assignment.encoder, assignment.deferred, strict=True)
        if any(IMAGES[p] for p in late) and any(IMAGES[p] for p in set(places) - set(late))
    )
    microbatches = plan.microbatches_of["vision", 0]
    one, other = (
        next(
            m.index
            for m in microbatches
            if {item.sample for item in m.items} == {p for p in places if IMAGES[p]}
        )
        for places in (kept, deferred)
    )
    assert other == one + 1
    (stage,) = plan.chain["vision", 0]
    forwards = [a for a in plan.program[stage.flat_ranks[0]] if a.kind in (Pass.F, Pass.B)]
    at = [str(action) for action in forwards]
    assert at.index(f"{stage.id}F{other}") == at.index(f"{stage.id}F{one}") + 1


def test_every_item_stands_where_it_should():
    plan = entrain.plan(skewed_job(), COST)
    for module in ("vision", "audio"):
        items = [item for m in plan.microbatches_of[module, 0] for item in m.items]
        assert len(items) == len(set(items)) == sum(IMAGES if module == "vision" else CLIPS)


@pytest.mark.parametrize(
    ("mix", "replicas", "kind"),
    [
        ("everything", 1, ScheduleKind.ONE_F_ONE_B),
        ("projectors-and-llm", 2, ScheduleKind.ONE_F_ONE_B),
        ("everything", 1, ScheduleKind.ZB_H1),
        ("encoders", 2, ScheduleKind.ZB_H1),
    ],
)
def test_training_is_the_same_with_deferral(mix: str, replicas: int, kind: ScheduleKind, pool: Pool):
    plan = entrain.plan(skewed_job(mix, replicas=replicas, schedule=usual(kind)), COST)
    assert_same(plan, pool)


def test_encoder_forwards_run_ahead_as_far_as_memory_allows():
    job = skewed_job("encoders")
    in_turn, ahead = entrain.plan_in_turn(job, COST), entrain.plan(job, COST)
    assert ahead.microbatches == in_turn.microbatches
    seconds, peaks = [], []
    for plan in (in_turn, ahead):
        lowered = lower(plan)
        seconds.append(critical_path_s(lowered, price(lowered, COST).duration_s))
        peaks.append(max(peak_bytes(lowered, memory_table(lowered)).values()))
    assert seconds[1] < seconds[0]
    assert peaks[1] > peaks[0]
    for room in peaks[0], peaks[1] - 1, peaks[1]:
        nodes = tuple(replace(node, memory_bytes=room) for node in job.cluster.nodes)
        tight = lower(entrain.plan(replace(job, cluster=replace(job.cluster, nodes=nodes)), COST))
        assert max(peak_bytes(tight, memory_table(tight)).values()) <= room
        assert (tight.plan.programs == ahead.programs) == (room == peaks[1])


@pytest.mark.parametrize("planner", [reordered.plan, reordered.plan_by_exchanges])
@pytest.mark.parametrize("replicas", [1, 2])
def test_reordered_microbatches_train_the_same(planner, replicas: int, pool: Pool):
    plan = planner(skewed_job(replicas=replicas), COST)
    sizes = [len(plan.microbatches_of["llm", replica]) for replica in range(replicas)]
    assert len(set(sizes)) == 1
    assert_same(plan, pool)


@pytest.mark.parametrize("replicas", [1, 2])
def test_reordered_microbatches_train_the_same_under_an_interleaved_schedule(replicas: int, pool: Pool):
    """Two stages of the LLM on each rank."""
    plan = reordered.plan(skewed_job(replicas=replicas, schedule=usual(ScheduleKind.INTERLEAVED)), COST)
    assert all(len(plan.chain["llm", replica]) == 4 for replica in range(replicas))
    assert_same(plan, pool)


def test_an_interleaved_schedule_is_reordered_in_its_own_programs():
    """The chain's programs are the plan's, and the order is what they make of its times, not plain 1F1B's."""
    job = skewed_job(schedule=usual(ScheduleKind.INTERLEAVED))
    plan = reordered.plan(job, COST)
    encoders = max(len(plan.chain[name, 0]) for name in ("vision", "audio"))
    num = len(plan.microbatches_of["llm", 0])
    has = [True] * (encoders + len(plan.chain["llm", 0]))
    programs = reordered.chain_programs(job.schedule, encoders, has, num)
    for block, program in enumerate(programs[encoders:]):
        stages = [stage.id for stage in plan.chain["llm", 0][block :: len(programs) - encoders]]
        rank = plan.stage[stages[0]].flat_ranks[0]
        own = [(a.kind, a.microbatch) for a in plan.program[rank] if a.stage in stages and a.kind in COMPUTE]
        assert own == [(a.kind, a.microbatch) for a in program]
    places = {item.sample: m.index for m in plan.microbatches_of["llm", 0] for item in m.items}
    times = stage_times(plan, COST, 0, produced=places, consumed=places)
    order = reorder_in_programs(times.forward_s, times.backward_s, programs)
    shortest = [int(index) for index in np.argsort(times.forward_s[:, 0], kind="stable")]
    assert sorted(order) == list(range(num))
    assert (
        order[0] == shortest[0] == 0
    )  # the plan has the order already: its first microbatch is the smallest
    ending = range(num - len(programs) + 1, num)
    assert {times.forward_s[position, 0] for position in ending} == {
        times.forward_s[position, 0] for position in shortest[1 : len(programs)]
    }


def test_without_backwards_of_the_encoders_the_llms_first_rank_is_filled():
    """Frozen encoders run on; the first rank whose passes wait for each other is the LLM's, of two stages."""
    num, has = 6, [False, True, True, True, True]
    programs = reordered.chain_programs(usual(ScheduleKind.INTERLEAVED), 1, has, num)
    assert [len(program) for program in programs] == [num, 4 * num, 4 * num]
    rng = np.random.default_rng(0)
    forward = rng.lognormal(0, 0.5, (num, 5))
    backward = 2 * forward * np.array(has)
    order = reorder_in_programs(forward, backward, programs, 1)
    own = forward[:, [1, 3]].sum(axis=1)
    smallest = [int(index) for index in np.argsort(own, kind="stable")]
    assert sorted(order) == list(range(num))
    assert order[0] == smallest[0]
    assert order[-1] == smallest[1]  # p - 1 = 1 of the LLM's two ranks


def test_exchanges_are_never_slower_than_the_printed_order():
    job = skewed_job()
    times_s = [
        simulate(lowered, price(lowered, COST).duration_s).iteration_s
        for lowered in (
            lower(planner(job, COST)) for planner in (reordered.plan, reordered.plan_by_exchanges)
        )
    ]
    assert times_s[1] <= times_s[0] * (1 + 1e-9)


def test_fewer_samples_than_replicas_are_refused():
    job = skewed_job()
    with pytest.raises(ValueError, match=r"1\.\.12 replicas|multiple of microbatch"):
        entrain.plan(replace(job, replicas=13), COST)


@given(st.floats(0, 1e-9), st.floats(1e-9, 1e-4), st.floats(1e-9, 1e-3))
def test_a_quadratic_is_found_again(square: float, linear: float, constant: float):
    exact = Quadratic(square, linear, constant)
    tokens = (64, 256, 1024, 4096, 16384)
    found = fit_quadratic(tokens, [exact.seconds(x) for x in tokens])
    for x in (100, 3000, 12000):
        assert found.seconds(x) == pytest.approx(exact.seconds(x), rel=1e-4)
    assert found.seconds(0) == 0.0


TIMES_S = st.lists(st.floats(1e-9, 1e3), min_size=5, max_size=5)


@given(TIMES_S)
def test_no_quadratic_fits_better(seconds: list[float]):
    tokens = np.array((64.0, 256, 1024, 4096, 16384))
    terms = np.stack([(tokens / 16384) ** 2, tokens / 16384, np.ones(5)], axis=1) / np.array(seconds)[:, None]
    _, least = nnls(terms, np.ones(5))
    found = fit_quadratic(tokens.tolist(), seconds)
    errors = [found.seconds(x) / y - 1 for x, y in zip(tokens, seconds, strict=True)]
    assert math.hypot(*errors) <= least + 1e-9
    assert min(found.square_s, found.linear_s, found.constant_s) >= 0


@given(TIMES_S, st.permutations(range(5)))
def test_a_fit_is_the_same_in_any_order_of_sums(seconds: list[float], order: list[int]):
    """Sums that round would differ, as they do between processors."""
    tokens = (64, 256, 1024, 4096, 16384)
    shuffled = fit_quadratic([tokens[at] for at in order], [seconds[at] for at in order])
    assert shuffled == fit_quadratic(tokens, seconds)


def test_a_quadratic_wants_three_points():
    with pytest.raises(ValueError, match=">= 3 different token counts"):
        fit_quadratic([1, 2, 2], [1, 1, 1])
    with pytest.raises(ValueError, match="must be > 0"):
        fit_quadratic([1, 2, 3], [1, 0, 1])
