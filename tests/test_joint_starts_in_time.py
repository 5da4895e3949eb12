"""Starts of a joint search whose time is too short for all of them: the best so far of each counts."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import pytest

from sim.predict import IterationJudge
from tests.test_joint_search import Ticks, small
from tests.test_strategies import cost
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.judged import judged_plan
from workbench.planner.stage_counts import OUT_OF_TIME, Progress
from workbench.planner.strategy_spec import Planner
from workbench.search.joint import replan
from workbench.search.joint.drive import joint_search
from workbench.search.joint.log import log_lines, replayed
from workbench.search.joint.move import Space
from workbench.search.joint.replan import replan_of
from workbench.search.joint.result import SearchResult
from workbench.search.joint.starting import waiting_tasks
from workbench.search.joint.starts import Start, Task, start_of
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies.registry import BY_NAME, PLANNERS
from workbench.timing.accept import accept

SEARCHING = [name for name, spec in BY_NAME.items() if spec.searches_layouts and not spec.wants_prices]
STOPPABLE = ["megatron-homogeneous", "megatron-colocated", "megatron-islands", "fsdp", "hsdp"]


def open_job() -> Job:
    return replace(small(), layouts=())


def simulated(name: str, ticks: Ticks, report_s: float, before_s: float = 0.0) -> Planner:
    """A strategy whose planner takes so long before its search, and for every report of progress."""

    def planner(job: Job, cost, progress: Progress):
        def slow(done: int, total: int, best_s: float) -> None:
            ticks.now_s += report_s
            progress(done, total, best_s)

        ticks.now_s += before_s
        judge = IterationJudge(cost)
        return judged_plan(BY_NAME[name], lambda plan, _: judge.value(plan), job, cost, slow)

    return planner


def searched(
    planners: Mapping[str, Planner], ticks: Ticks, seconds: float, job: Job | None = None
) -> SearchResult:
    judge = IterationJudge(cost())
    stop, scope = Stop(seconds=seconds, candidates=1, clock=ticks), Scope(planners=planners)
    return joint_search(job or open_job(), cost(), judge, stop=stop, scope=scope)


@pytest.mark.parametrize("name", STOPPABLE)
def test_a_planner_that_is_stopped_has_its_best_plan_so_far(name: str) -> None:
    whole = Task(name, BY_NAME[name].planner, open_job())
    starts = [
        start_of(whole._replace(reports=reports), cost(), IterationJudge(cost())) for reports in (3, 10**9)
    ]
    assert [start.stopped_at for start in starts] == [3, None]
    assert [start.is_late for start in starts] == [True, False]
    assert all(start.value is not None for start in starts)


def test_a_planner_is_stopped_while_nothing_fits_too() -> None:
    cluster = open_job().cluster
    nodes = tuple(replace(node, memory_bytes=2**16) for node in cluster.nodes)
    tight = replace(open_job(), cluster=replace(cluster, nodes=nodes))
    task = Task("cornstarch", BY_NAME["cornstarch"].planner, tight)
    whole = start_of(task, cost(), IterationJudge(cost()))
    assert "does not fit" in whole.refusal
    stopped = start_of(task._replace(reports=2), cost(), IterationJudge(cost()))
    assert (stopped.refusal, stopped.stopped_at) == (OUT_OF_TIME, 2)


@pytest.mark.parametrize("name", STOPPABLE)
def test_a_strategy_that_plans_anew_is_stopped_after_so_many_of_its_own_candidates(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[int] = []

    def planner(job: Job, cost: CostModel, progress: Progress) -> Plan:
        def counted(done: int, total: int, best_s: float) -> None:
            reports.append(done)
            progress(done, total, best_s)

        return PLANNERS[name](job, cost, counted)

    def planned(most: int) -> Plan:
        reports.clear()
        monkeypatch.setattr(replan, "MOST_CANDIDATES", most)
        return replan_of(name, open_job()).plan(Space(open_job(), cost(), {}, {name: planner}))

    planned(10**9)
    num = len(reports)
    stopped = planned(num // 3)
    assert num // 3 < len(reports) < num
    accept(stopped)  # by a simulator, it may even be better than the best by the strategy's own estimate


def test_a_strategy_that_plans_anew_and_has_no_plan_when_it_is_stopped_is_refused() -> None:
    def planner(job: Job, cost: CostModel, progress: Progress) -> Plan:
        while True:
            progress(0, 1, inf)

    with pytest.raises(ValueError, match="fsdp has no plan among the first 100 candidates of its own"):
        replan_of("fsdp", open_job()).plan(Space(open_job(), cost(), {}, {"fsdp": planner}))


def test_every_strategy_that_chooses_degrees_is_judged_even_if_the_first_takes_the_starts_share() -> None:
    ticks = Ticks()
    planners = {name: simulated(name, ticks, report_s=0.01) for name in SEARCHING}
    planners["entrain-search"] = simulated("entrain-search", ticks, report_s=0.01, before_s=9.0)
    found = searched(planners, ticks, seconds=20.0)
    assert {start.name for start in found.starts if start.value is None} <= {"entrain-search"}
    assert found.value <= min(start.value for start in found.starts if start.value is not None)


def test_slow_strategies_that_take_the_job_s_layouts_leave_the_time_of_those_that_choose_them() -> None:
    ticks = Ticks()
    slow = ("cornstarch", "cornstarch-frozen-unaware", "entrain", "disttrain-reordered")
    planners = {name: simulated(name, ticks, report_s=0.01, before_s=4.0) for name in slow}
    planners |= {name: simulated(name, ticks, report_s=0.01) for name in STOPPABLE}
    found = searched(planners, ticks, seconds=10.0, job=small())
    planned = {start.name for start in found.starts if start.value is not None}
    assert {f"{name}, layouts open" for name in STOPPABLE} <= planned
    assert found.seconds <= 10.0
    assert planned & set(slow) == {"cornstarch-frozen-unaware"}, "the one of least effort"


def test_of_stopped_starts_the_one_with_the_best_plan_so_far_restarts_first_and_finished_ones_never() -> None:
    planner = BY_NAME["fsdp"].planner
    tasks = [
        Task(name, planner, open_job(), effort=effort)
        for name, effort in zip("abcd", (1, 9, 5, 2), strict=True)
    ]
    values = {"a": None, "b": 1.0, "c": 2.0, "d": 0.5}
    starts = {name: Start(name=name, value=value, stopped_at=1) for name, value in values.items()}
    waiting = waiting_tasks(tasks, starts, {"a": 0.0, "b": 1.0, "c": 1.0, "d": inf})
    assert [task.name for task in waiting] == ["b", "c", "a"]
    untried = {name: Start(name=name) for name in values}
    waiting = waiting_tasks(tasks, untried, dict.fromkeys(values, 0.0))
    assert [task.name for task in waiting] == ["a", "d", "c", "b"]


def test_a_log_with_a_stopped_start_replays_to_the_same_plan() -> None:
    ticks = Ticks()
    planners = {"hsdp": simulated("hsdp", ticks, report_s=1.0)}
    found = searched(planners, ticks, seconds=10.0)
    assert found.starts[0].stopped_at is not None
    lines = list(log_lines(open_job(), Scope(), found))
    assert replayed(open_job(), cost(), IterationJudge(cost()), planners, lines) == (found.plan, found.value)
