"""Changes of a plan: the job that is told from it, and what `plan` and `simulate` say of each change."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sim.predict import predict, step_s
from tests.vlm_job import H100, planned, vlm_job
from workbench.cost.model import CostModel
from workbench.explain.applicable import is_followed
from workbench.explain.changes import Changes, Judge, try_changes
from workbench.explain.neighbours import Change, ChangeKind, neighbours
from workbench.explain.plan_as_job import Origin, job_of, origin_of
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import peak_bytes
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.planner.budget import Budget
from workbench.planner.plan_layouts import Placing
from workbench.planner.stage_counts import PlannerStopped, Progress, silent
from workbench.report.joint_tables import move_text
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.joint.choice import NAME as JOINT
from workbench.search.joint.plan_changes import MoveChange, move_origin_of
from workbench.search.joint.question import Question
from workbench.strategies import cornstarch
from workbench.strategies.registry import BY_NAME, PLANNERS
from workbench.timing.accept import accept

UNTOLD = "entrain-graded"  # where single samples are heavy it makes fewer microbatches than were asked for


@pytest.fixture(scope="module")
def job() -> Job:
    return vlm_job()


def judge(**changes: object) -> Judge:
    return replace(Judge(planners=PLANNERS, cost=H100, step_s=step_s), **changes)  # type: ignore[arg-type]


def tried(plan: Plan, origin: Origin, changes: Sequence[Change], by: Judge) -> Changes:
    return try_changes(by.judged(plan), changes, lambda change: by.planned(change, origin), by)


@pytest.mark.parametrize("name", PLANNERS)
def test_a_strategy_makes_the_plan_again_of_the_job_that_the_plan_tells(job: Job, name: str) -> None:
    degrees = () if name in ("fsdp", "hsdp") else job.layouts
    plan = planned(replace(job, layouts=degrees), name)
    origin = origin_of(plan, H100, PLANNERS[name])
    assert origin.is_exact or name == UNTOLD
    again = PLANNERS[name](origin.job, H100, silent)
    assert (plan_hash(again) == plan_hash(plan)) == origin.is_exact


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_schedule_is_told_from_the_programs(job: Job, kind: ScheduleKind) -> None:
    plan = planned(replace(job, schedule=usual(kind)))
    assert origin_of(plan, H100, PLANNERS["cornstarch"]).job.schedule == usual(kind)


def test_changes_are_what_plan_and_simulate_say_of_them(job: Job) -> None:
    """Every change that was simulated, planned by hand as a user would, and simulated with its trace."""
    plan, origin = planned(job), Origin(job, "cornstarch", is_exact=True)
    changes = {change.about: change for change in neighbours(job)}
    found = tried(plan, origin, tuple(changes.values()), judge())
    assert found.num_simulated > 15
    assert {each.change.kind for each in (*found.helping, *found.slower)} >= {
        ChangeKind.LAYOUT,
        ChangeKind.MICROBATCHES,
        ChangeKind.SCHEDULE,
        ChangeKind.ACTIVATIONS,
        ChangeKind.SHARDING,
    }
    for each in (*found.helping, *found.slower):
        assert each.judged is not None
        lowered, memory = accept(cornstarch.plan(changes[each.change.about].edit(job), H100))
        trace = predict(lowered, memory, H100)
        assert each.judged.step_s == trace.iteration_s
        assert each.judged.peak_bytes == max(peak_bytes(lowered, memory).values())
    steps = [each.judged.step_s for each in found.helping if each.judged]
    assert steps == sorted(steps)
    assert all(seconds < found.base.step_s for seconds in steps)


def test_a_change_says_what_is_changed(job: Job) -> None:
    by_name = {change.about: change for change in neighbours(job, ["dip"])}
    edited = by_name["llm tp 1 -> 2, pp 2 -> 1"].edit(job)
    assert edited.layouts == (ModuleLayout(module="vision", pp=1), ModuleLayout(module="llm", pp=1, tp=2))
    both = by_name["dp 2 -> 1, vision tp 1 -> 2, llm tp 1 -> 2"].edit(job)
    assert (both.replicas, [layout.tp for layout in both.layouts]) == (1, [2, 2])
    moved = by_name["vision pp 1 -> 2, llm pp 2 -> 1"].edit(job)
    assert [layout.pp for layout in moved.layouts] == [2, 1]
    assert by_name["samples of a microbatch 1 -> 2"].edit(job).microbatch_samples == 2
    assert by_name["schedule 1f1b -> gpipe"].edit(job).schedule == usual(ScheduleKind.GPIPE)
    recomputed = by_name["llm recompute none -> full"].edit(job).settings
    assert (
        by_name["llm recompute none -> full"].edit(replace(job, settings=recomputed)).settings == recomputed
    )
    assert by_name["strategy dip"].strategy == "dip"
    assert "llm ep 1 -> 2" not in by_name, "it has no experts"


def test_a_change_that_does_not_fit_stands_apart(job: Job) -> None:
    """Of a cluster whose memory is what the plan holds, all that holds more does not fit."""
    held = judge().judged(planned(job)).peak_bytes
    nodes = tuple(replace(node, memory_bytes=held) for node in job.cluster.nodes)
    tight = replace(job, cluster=replace(job.cluster, nodes=nodes))
    base = judge().judged(planned(tight))
    found = tried(
        planned(tight), Origin(tight, "cornstarch", is_exact=True), tuple(neighbours(tight)), judge()
    )
    assert base.misfit == ""
    assert found.misfits
    for each in found.misfits:
        assert each.judged is not None
        assert each.judged.peak_bytes > held
        assert "does not fit" in each.judged.misfit
    for each in (*found.helping, *found.slower):
        assert each.judged is not None
        assert each.judged.peak_bytes <= held


def test_time_ends_the_changes_also_within_a_planner(job: Job) -> None:
    """The clock runs out at its seventh reading; the rest is counted and not tried."""
    plan, todo, readings = planned(job), tuple(neighbours(job)), iter(range(1000))
    hurried = judge(budget=Budget(6.0, lambda: next(readings)))
    found = tried(plan, Origin(job, "cornstarch", is_exact=True), todo, hurried)
    done = found.num_simulated + found.num_same + len(found.refused)
    assert 0 < done < len(todo)
    assert done + found.num_left == len(todo)


def test_a_planner_that_takes_long_leaves_time_to_others(job: Job) -> None:
    """One that never ends has no plan, or the best that it found; the changes behind it are tried."""
    plan, left_s = planned(job), [60.0]

    def endless(job: Job, cost: CostModel, progress: Progress) -> Plan:
        while True:
            left_s[0] -= 1.0
            progress(1, 2, 0.0)

    def handing_over(job: Job, cost: CostModel, progress: Progress) -> Plan:
        try:
            return endless(job, cost, progress)
        except PlannerStopped:
            return PLANNERS["encoders-replicated"](job, cost, silent)

    planners = {"dip": endless, "entrain": handing_over, "cornstarch": PLANNERS["cornstarch"]}
    hurried = replace(judge(budget=Budget(60.0, lambda: 60.0 - left_s[0])), planners=planners)
    cheap, *_ = changes = tuple(neighbours(job, ["dip", "entrain"]))
    todo = (*(each for each in changes if each.strategy is not None), cheap)
    found = tried(plan, Origin(job, "cornstarch", is_exact=True), todo, hurried)
    refused = {each.change.about: each.refusal for each in found.refused}
    assert refused.pop("strategy dip") == "no plan within 15.0 s, its part of the time"
    assert not refused
    assert found.num_simulated + found.num_same == 2
    assert found.num_left == 0
    assert 30.0 < left_s[0] < 45.0


def test_what_no_strategy_plans_has_its_reason(job: Job) -> None:
    plan = planned(job)
    found = tried(plan, Origin(job, "cornstarch", is_exact=True), tuple(neighbours(job)), judge())
    refusals = {each.change.about: each.refusal for each in found.refused}
    assert "tp of module 'llm' must divide its 8 key/value heads" not in refusals["llm pp 2 -> 4"]
    assert "the layout needs 10 ranks" in refusals["llm pp 2 -> 4"]


@pytest.mark.parametrize(("name", "num_followed"), [("fsdp", 20), ("megatron-homogeneous", 30)])
def test_a_change_that_is_not_followed_has_the_same_plan_or_none(
    job: Job, name: str, num_followed: int
) -> None:
    plan = planned(replace(job, layouts=()), name)
    origin = origin_of(plan, H100, PLANNERS[name])
    changes = [*neighbours(origin.job)]
    followed = [change for change in changes if is_followed(change, origin.job, BY_NAME[name])]
    assert len(followed) == num_followed
    found = tried(plan, origin, [change for change in changes if change not in followed], judge())
    assert found.num_simulated == found.num_left == 0
    assert found.num_same >= 4


def test_strategies_follow_recomputation_and_microbatches_that_are_requested(job: Job) -> None:
    changes = tuple(neighbours(job))
    assert all(is_followed(change, job, cornstarch.SPEC) for change in changes)


def test_a_plan_of_a_joint_search_is_changed_by_single_moves(job: Job) -> None:
    """Each simulated move is planned and simulated by hand, too."""
    plan = replace(planned(replace(job, layouts=()), "megatron-colocated"), strategy=JOINT)
    origin = move_origin_of(plan, job_of(plan, H100, Placing.LEFT), H100)
    changes = [MoveChange(move.question, move_text(move), move) for move in origin.moves()]
    assert {change.kind for change in changes} >= {Question.LAYOUT, Question.ORDER, Question.MEMORY}
    found = try_changes(judge().judged(plan), changes, origin.planned, judge())
    assert found.num_simulated > 15
    by_words = {change.about: change for change in changes}
    for each in (*found.helping, *found.slower):
        assert each.judged is not None
        lowered, memory = accept(origin.planned(by_words[each.change.about]))
        assert each.judged.step_s == predict(lowered, memory, H100).iteration_s
