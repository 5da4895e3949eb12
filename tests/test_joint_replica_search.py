"""Searches of jobs whose replicas are joined: sound plans, no worse than any start, never below the bound."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import IterationJudge
from tests.examples import examples
from tests.joint_jobs import joint_job
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.explain.neighbours import ChangeKind, neighbours
from workbench.explain.plan_as_job import origin_of
from workbench.job.job import Job
from workbench.job.other_layouts import apart
from workbench.plan.check import check
from workbench.plan.plan import Plan
from workbench.planner.groupings import groups_of
from workbench.planner.layout_choice import Degrees, degrees_of
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.joint.arrangement import Arrangement, Placement, arrangement_of
from workbench.search.joint.bounds import lower_bound_s
from workbench.search.joint.choice import build, choice_of, draft_of
from workbench.search.joint.drive import joint_search
from workbench.search.joint.grouping_moves import MoveSample, Resize
from workbench.search.joint.layout_moves import Arrange, Reschedule
from workbench.search.joint.layout_neighbours import arrangements_near
from workbench.search.joint.log import log_lines, replayed
from workbench.search.joint.move import Move, Space
from workbench.search.joint.result import SearchResult
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies import megatron_heterogeneous, megatron_homogeneous
from workbench.strategies.registry import PLANNERS

COST = CostModel(load_profile("A40"))
STARTS = ("dip", "entrain-graded", "megatron-heterogeneous", "megatron-homogeneous")
BY_START = {name: PLANNERS[name] for name in STARTS}
SCOPE = Scope(seed=0, planners=BY_START)


def small() -> Job:
    return replace(joint_job(ep=4, dp=4, images=(1, 2, 0, 1, 2, 0, 1, 1), shares_ranks=True), max_ranks=8)


def searched() -> SearchResult:
    return joint_search(small(), COST, IterationJudge(COST), stop=Stop(candidates=40), scope=SCOPE)


@cache
def found() -> SearchResult:
    return searched()


def plan_of(job: Job) -> Plan:
    return megatron_heterogeneous.plan(job, COST)


def space_of(job: Job) -> Space:
    return Space(job, COST, {})


def llm(**degrees: int) -> Degrees:
    return Degrees(module="llm", **degrees)


def alone(**degrees: int) -> Arrangement:
    return Arrangement(placement=Placement.ISLANDS, degrees=(llm(**degrees),))


def test_a_search_is_never_worse_than_any_start_nor_below_its_bound() -> None:
    values = {start.name: start.value for start in found().starts if start.value is not None}
    assert {*STARTS, "megatron-homogeneous, layouts open"} <= set(values)
    assert found().value <= min(values.values())
    assert IterationJudge(COST).value(found().plan) == found().value
    tried = [entry.value for entry in found().log if entry.value is not None]
    assert 0 < found().lower_bound <= min(*tried, *values.values())


def test_the_same_seed_gives_the_same_answer_and_a_log_replays_it() -> None:
    again = searched()
    assert (again.log, again.plan) == (found().log, found().plan)
    lines = list(log_lines(small(), SCOPE, again))
    judge = IterationJudge(COST)
    assert replayed(small(), COST, judge, BY_START, lines) == (again.plan, again.value)


@examples(40)
@given(
    grid=st.sampled_from([(1, 2), (1, 4), (2, 2)]),
    groups=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    microbatch=st.sampled_from([1, 2]),
)
def test_no_plan_is_faster_than_the_bounds(
    grid: tuple[int, int], groups: int, pp: int, microbatch: int
) -> None:
    tp, joint = grid
    job = joint_job(tp=tp, ep=tp * joint, dp=joint * groups, pp=pp, samples=16, microbatch=microbatch)
    plan = plan_of(job)
    value = IterationJudge(COST).value(plan)
    assert value >= lower_bound_s(job, COST, None)
    assert value >= lower_bound_s(job, COST, choice_of(job, plan, COST))


@pytest.mark.parametrize(
    ("arrangement", "samples", "num_groups"),
    [(alone(dp=2, joint_replicas=2, ep=2), 4, 4), (alone(dp=4), 2, 8), (alone(joint_replicas=4, ep=4), 8, 2)],
    ids=str,
)
def test_joined_replicas_merge_microbatches_and_parted_ones_divide_them(
    arrangement: Arrangement, samples: int, num_groups: int
) -> None:
    job = joint_job(ep=2, dp=4, samples=16, microbatch=2)
    choice = choice_of(job, plan_of(job), COST)
    changed = Arrange(arrangement).apply(space_of(job), choice)
    groups = groups_of(job, changed.microbatches)
    assert (len(groups), {len(group) for group in groups}) == (num_groups, {samples})
    plan = build(job, changed, COST)
    check(plan)
    assert degrees_of(plan, "llm") == arrangement.degrees[0]


def test_an_arrangement_with_joint_replicas_is_recognized() -> None:
    for job in (joint_job(ep=2, dp=4, pp=2), joint_job(ep=2, dp=2, images=(1, 0, 2, 1))):
        choice = choice_of(job, plan_of(job), COST)
        draft = draft_of(job, choice)
        arrangement = arrangement_of(job, choice.stages, choice.schedule, draft, COST)
        assert arrangement is not None
        assert "dp 4" in str(arrangement) or "dp 2" in str(arrangement)
        assert Arrange(arrangement).apply(space_of(job), choice) == replace(choice, programs=())


def test_a_schedule_with_virtual_stages_keeps_replicas_joined() -> None:
    job = joint_job(ep=2, dp=2, pp=2, samples=8)
    choice = choice_of(job, plan_of(job), COST)
    changed = Reschedule(usual(ScheduleKind.INTERLEAVED)).apply(space_of(job), choice)
    assert len(changed.stages) > len(choice.stages)
    assert {(stage.joint_replicas, stage.ep) for stage in changed.stages} == {(2, 2)}
    check(build(job, changed, COST))


@pytest.mark.parametrize("move", [Resize(1), MoveSample(0, 0, 1)], ids=str)
def test_a_microbatch_without_a_sample_for_each_joint_replica_is_refused(move: Move) -> None:
    job = joint_job(ep=2, dp=2, samples=4)
    changed = move.apply(space_of(job), choice_of(job, plan_of(job), COST))
    with pytest.raises(ValueError, match=r"each of 2 joint replicas wants a row"):
        build(job, changed, COST)


def edited(job: Job) -> Iterator[tuple[str, Job]]:
    for change in neighbours(job):
        if change.kind in (ChangeKind.LAYOUT, ChangeKind.MICROBATCHES):
            try:
                yield change.about, change.edit(job)
            except ValueError:  # the model does not support these degrees
                continue


def test_neighbours_of_a_job_count_each_replica() -> None:
    jobs = dict(edited(joint_job(ep=2, dp=4, samples=8)))
    ep = {name: (jobs[name].replicas, jobs[name].joint_replicas) for name in jobs if "llm ep" in name}
    assert ep == {"llm ep 2 -> 1": (4, 1), "llm ep 2 -> 4": (1, 4)}
    assert apart(jobs["dp 4 -> 8"]).replicas == 8
    assert jobs["dp 4 -> 2"].replicas == 1
    assert jobs["samples of a microbatch 1 -> 2"].microbatch_samples == 4


def test_neighbours_of_an_arrangement_join_and_part_replicas() -> None:
    job = joint_job(dp=4, samples=8)
    choice = choice_of(job, plan_of(job), COST)
    joined = set(arrangements_near(job, choice, alone(dp=4)))
    assert {alone(dp=2, joint_replicas=2, ep=2), alone(joint_replicas=4, ep=4)} <= joined
    assert alone(dp=4) in set(arrangements_near(job, choice, alone(joint_replicas=4, ep=4)))


def test_the_job_of_a_joint_plan_makes_it_again() -> None:
    job = joint_job(ep=2, dp=4, images=(1, 0, 2, 1, 0, 1, 1, 0), shares_ranks=True)
    plan = megatron_homogeneous.plan(job, COST)
    for known in (job, None):
        origin = origin_of(plan, COST, megatron_homogeneous.plan, known)
        assert origin.is_exact
        assert origin.job.joint_replicas == 2
