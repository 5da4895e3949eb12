"""Bounds on stages hold for every plan built on them; searches that trust them find the brute-force best."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from tests.examples import examples
from tests.test_disttrain_pools import machines, mixed_cluster
from tests.test_strategies import CLUSTER, cost, counts_of_items, job
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.job.device_pools import Aim, Pool, dollars_per_hour
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import check_memory, memory_table, peak_bytes
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Recompute, Sharding
from workbench.plan.routing import routing_of
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_space import LayoutSpace
from workbench.planner.layout_step import LayoutSteps
from workbench.planner.planner_cost import FROZEN_AWARE, FROZEN_UNAWARE, PlannerCost
from workbench.planner.stage_bounds import StageBounds
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.strategies import (
    cornstarch,
    encoders_colocated,
    encoders_replicated,
    entrain,
    megatron_heterogeneous,
)

PLANNER_COSTS = {
    cornstarch.plan: FROZEN_AWARE,
    cornstarch.plan_frozen_unaware: FROZEN_UNAWARE,
    encoders_colocated.plan: FROZEN_UNAWARE,
    encoders_colocated.plan_frozen_aware: FROZEN_AWARE,
    encoders_replicated.plan: FROZEN_UNAWARE,
    megatron_heterogeneous.plan: FROZEN_AWARE,
    entrain.plan_in_turn: FROZEN_AWARE,
}
SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED, ScheduleKind.ZB_H1)
SETTINGS = (
    ModuleSettings(module="llm"),
    ModuleSettings(module="llm", recompute=Recompute.FULL, sharding=Sharding.OPTIMIZER),
    ModuleSettings(module="llm", sequence_parallel=True),
)


def drafted(plan: Plan) -> Plan:
    """What the bound is asked about: stages and microbatches, nothing else."""
    return replace(plan, programs=(), token_shards=())


def bounds_of(plan: Plan, machine: CostModel, planner_cost: PlannerCost, schedule: Schedule) -> StageBounds:
    return StageBounds(replace(drafted(plan), stages=()), machine, planner_cost, schedule)


@examples(60)
@given(
    images=counts_of_items,
    clips=counts_of_items,
    replicas=st.sampled_from([1, 2]),
    stages=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    frozen=st.tuples(
        st.sampled_from(Trainable), st.sampled_from(Trainable), st.sampled_from(["all", "none"])
    ),
    grid=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    setting=st.sampled_from(SETTINGS),
    kind=st.sampled_from(SCHEDULES),
    strategy=st.sampled_from(list(PLANNER_COSTS)),
)
def test_no_plan_is_believed_faster_or_holds_less(
    *, images, clips, replicas, stages, frozen, grid, setting, kind, strategy
):
    vision, audio, llm = frozen
    encoder_pp, llm_pp = stages
    tp, cp = (1, 1) if strategy is entrain.plan_in_turn else grid
    tiny = job(
        *(encoder_pp, encoder_pp, 2 if kind is ScheduleKind.INTERLEAVED else llm_pp),
        batch=tiny_batch(images, clips),
        replicas=replicas,
        vision=vision,
        audio=audio,
        llm=Trainable(llm),
    )
    layouts = (*tiny.layouts[:2], replace(tiny.layouts[2], tp=tp, cp=cp))
    schedule = usual(kind)
    tiny = replace(
        tiny, layouts=layouts, schedule=schedule, settings=replace(tiny.settings, modules=(setting,))
    )
    try:
        built = strategy(tiny, cost())
    except ValueError:
        assume(kind is not ScheduleKind.ONE_F_ONE_B)  # others refuse some batches
        reject()
    planner_cost, plan = PLANNER_COSTS[strategy], drafted(built)
    bounds = bounds_of(plan, cost(), planner_cost, schedule)
    lowered = lower(
        replace(built, token_shards=())
    )  # distributed after the search, which believes in equal shares
    assert bounds.seconds(plan) <= planner_cost.plan_s(lowered, cost()) * (1 + 1e-9)
    peaks = peak_bytes(lowered, memory_table(lowered))
    for rank in plan.ranks:
        assert bounds.held_bytes(routing_of(plan), rank) <= peaks[rank]


@pytest.mark.parametrize("strategy", [cornstarch.plan, cornstarch.plan_frozen_unaware])
def test_gaps_of_1f1b_and_microbatches_in_flight_are_no_more_than_there_are(strategy):
    """All modules have all microbatches: stages wait for the first one to come back, and hold several."""
    waits, planner_cost = 0, PLANNER_COSTS[strategy]
    for encoder_pp, llm_pp, num in product((1, 2), (1, 2, 4), (4, 12)):
        batch = tiny_batch([1] * num, [1] * num)
        tiny = job(encoder_pp, encoder_pp, llm_pp, batch=batch, llm=Trainable.ALL)
        lowered = lower(strategy(tiny, cost()))
        plan = drafted(lowered.plan)
        bounds = bounds_of(plan, cost(), planner_cost, tiny.schedule)
        found_s = bounds.seconds(plan)
        assert found_s <= planner_cost.plan_s(lowered, cost()) * (1 + 1e-9)
        gpipe = bounds_of(plan, cost(), planner_cost, usual(ScheduleKind.GPIPE))  # which promises no gaps
        waits += found_s > gpipe.seconds(plan) * (1 + 1e-9)
        peaks = peak_bytes(lowered, memory_table(lowered))
        for rank in plan.ranks:
            held = bounds.held_bytes(routing_of(plan), rank)
            assert gpipe.held_bytes(routing_of(plan), rank) <= held <= peaks[rank]
    assert (
        waits or planner_cost is FROZEN_AWARE
    )  # whose stages are so even that the last one's passes bound them


@pytest.mark.parametrize("planner_cost", [FROZEN_AWARE, FROZEN_UNAWARE])
def test_equal_stages_of_a_chain_are_bounded_by_what_1f1b_takes(planner_cost):
    """A chain of equal microbatches without messages: (m + p - 1) (f + b) where stages are equal."""
    tiny = job(1, 1, 4, batch=tiny_batch([0] * 4, [0] * 4), llm=Trainable.ALL)
    plan = cornstarch.plan(tiny, cost())
    found = bounds_of(plan, cost(), planner_cost, tiny.schedule).seconds(drafted(plan))
    assert found == pytest.approx(planner_cost.plan_s(lower(plan), cost()), rel=0.1)


def worth(job_: Job, seconds: float, plan: Plan) -> float:
    return seconds if job_.aim is Aim.SECONDS else seconds * dollars_per_hour(job_.pools, plan.ranks)


def priced(open_job: Job) -> Job:
    """Three slow ranks at a dollar, three quick ones at three, which take no audio; cheapest first."""
    modules = ("vision", "llm")
    pools = (
        Pool(name="slow", first_rank=0, num_ranks=3, profile="slow", device="slow", dollars_per_hour=1.0),
        Pool(name="quick", first_rank=3, num_ranks=3, profile="quick", device="quick", dollars_per_hour=3.0,
             modules=modules),
    )  # fmt: skip
    cluster = mixed_cluster(cheap=3, fast=3)
    return replace(open_job, cluster=cluster, pools=pools, aim=Aim.DOLLARS)


@pytest.mark.parametrize("strategy", [cornstarch.plan, entrain.plan_in_turn, megatron_heterogeneous.plan])
def test_the_cheapest_counts_are_those_of_brute_force(strategy):
    open_job = priced(replace(job(), layouts=(), max_ranks=6))
    wanted = exhaustive(strategy, open_job, machines(), FROZEN_AWARE, ("vision", "audio", "llm"))
    found = strategy(open_job, machines())
    assert worth(open_job, FROZEN_AWARE.plan_s(lower(found), machines()), found) == wanted[0]
    fastest = strategy(replace(open_job, aim=Aim.SECONDS), machines())
    assert FROZEN_AWARE.plan_s(lower(fastest), machines()) < FROZEN_AWARE.plan_s(lower(found), machines())


def test_modules_stay_off_pools_that_do_not_take_them():
    audio_last = (ModuleLayout(module="vision", pp=3), ModuleLayout(module="audio", pp=1))
    with pytest.raises(
        ValueError, match=r"module 'audio' lies on pool 'quick', which takes vision, llm alone"
    ):
        cornstarch.plan(priced(replace(job(), layouts=audio_last, max_ranks=6)), machines())


def test_islands_lie_in_pools_that_take_them():
    """Sound may not use the quick ranks 3 to 5, which the LLM takes with some of the slow ones."""
    open_job = priced(replace(job(), layouts=()))
    slow, quick = mixed_cluster(cheap=1, fast=1).nodes
    cluster = replace(
        open_job.cluster, nodes=(slow,) * 3 + (quick,) * 3
    )  # any number of ranks is whole nodes
    open_job = replace(open_job, cluster=cluster)
    free = replace(open_job, pools=tuple(replace(pool, modules=()) for pool in open_job.pools))
    layouts = [
        [choice for _, choice in LayoutSpace(LayoutSteps(each, machines()), 6).layouts(Mode.APART)]
        for each in (open_job, free)
    ]
    reach = [{sum(e.num_ranks for e in choice.encoders) for choice in found} for found in layouts]
    assert max(reach[0]) == 3 < max(reach[1])
    assert layouts[0] == [c for c in layouts[1] if sum(e.num_ranks for e in c.encoders) <= 3]


def exhaustive(
    strategy, open_job: Job, machine: CostModel, planner_cost: PlannerCost, names: tuple[str, ...]
):
    """The best key over all counts within the ranks, every plan built."""
    best = None
    ranges = [range(1, min(len(open_job.model.module(n).layers), open_job.max_ranks) + 1) for n in names]
    for counts in product(*ranges):
        layouts = tuple(ModuleLayout(module=n, pp=count) for n, count in zip(names, counts, strict=True))
        try:
            plan = strategy(replace(open_job, layouts=layouts), machine)
            lowered = lower(plan)
            if len(plan.ranks) > open_job.max_ranks:
                continue
            check_memory(lowered, memory_table(lowered))
            key = (worth(open_job, planner_cost.plan_s(lowered, machine), plan), len(plan.ranks), counts)
        except ValueError:
            continue
        best = key if best is None or key < best else best
    return best


@pytest.mark.parametrize("strategy", [cornstarch.plan, cornstarch.plan_frozen_unaware, entrain.plan_in_turn])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("room", [1.0, 0.6])
def test_the_counts_found_are_those_of_brute_force(strategy, is_mixed, room):
    """On one kind of device and on two, with memory for all plans and for some."""
    planner_cost, names = PLANNER_COSTS[strategy], ("vision", "audio", "llm")
    machine = machines() if is_mixed else cost()
    cluster = mixed_cluster(cheap=2, fast=4) if is_mixed else CLUSTER
    open_job = replace(job(), layouts=(), max_ranks=6, cluster=cluster)
    lowered = lower(strategy(open_job, machine))
    most = max(peak_bytes(lowered, memory_table(lowered)).values())
    nodes = tuple(replace(node, memory_bytes=round(most * room) + 1) for node in cluster.nodes)
    open_job = replace(open_job, cluster=replace(cluster, nodes=nodes))
    wanted = exhaustive(strategy, open_job, machine, planner_cost, names)
    if wanted is None:
        with pytest.raises(ValueError, match="does not fit"):
            strategy(open_job, machine)
        return
    found = strategy(open_job, machine)
    counts = tuple(len(found.chain[name, 0]) for name in names)
    assert (planner_cost.plan_s(lower(found), machine), len(found.ranks), counts) == wanted
