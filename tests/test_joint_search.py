"""The joint search: never worse than any start, the same whatever the workers, all of it written down."""

import threading
from dataclasses import dataclass, replace
from functools import cache

import pytest

from sim.predict import IterationJudge
from tests.test_strategies import cost, job
from tests.tiny_valm import tiny_batch
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.lower import lower
from workbench.plan.plan import KeyExchange, ModuleSettings, Recompute, Settings, Sharding
from workbench.planner.groupings import Grouping
from workbench.planner.layout_choice import Degrees
from workbench.planner.stage_counts import OUT_OF_TIME
from workbench.schedule.choice import ScheduleKind, usual
from workbench.schedule.sharded import ReshardAfter
from workbench.search.joint.ablation import ablated
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.choice import TokenRule, build
from workbench.search.joint.drive import joint_search
from workbench.search.joint.evaluate import Request, evaluate
from workbench.search.joint.grouping_moves import Exchange, MoveSample, Regroup, Reorder, Resize
from workbench.search.joint.layout_moves import Arrange, CutStages, Reschedule, RunEncodersAhead, ShiftLayer
from workbench.search.joint.log import log_lines, replayed
from workbench.search.joint.move import Space
from workbench.search.joint.move_json import MOVES, move_from_json, move_to_json
from workbench.search.joint.question import Question
from workbench.search.joint.replan import Replan, replan_of
from workbench.search.joint.result import SearchResult, State
from workbench.search.joint.setting_moves import Distribute, ExchangeKeys, Keep, Reshard
from workbench.search.joint.take import Take
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies.registry import PLANNERS

BATCH = tiny_batch(images=(1, 2, 0, 1, 2, 0, 1, 1), clips=(1, 0, 0, 2, 1, 1, 0, 2))
FEW = ("cornstarch", "encoders-colocated", "entrain", "megatron-homogeneous", "dip")


def small():
    return replace(job(batch=BATCH), max_ranks=7)


def searched(job, *, workers=1, candidates=30, **scope) -> SearchResult:
    planners = {name: PLANNERS[name] for name in scope.pop("names", FEW)}
    judge = IterationJudge(cost())
    return joint_search(
        job,
        cost(),
        judge,
        stop=Stop(candidates=candidates),
        scope=Scope(planners=planners, **scope),
        workers=workers,
    )


@cache
def found() -> SearchResult:
    return searched(small())


def test_never_worse_than_any_start_and_the_plan_takes_what_is_said():
    best = found()
    values = [start.value for start in best.starts if start.value is not None]
    assert len(values) >= len(FEW)
    assert best.value <= min(values)
    assert IterationJudge(cost()).value(best.plan) == best.value
    assert best.candidates == 30 == sum(entry.value is not None for entry in best.log)


def test_the_same_seed_gives_the_same_answer_whatever_the_workers():
    one, two = found(), searched(small(), workers=2)
    assert (one.log, one.value, one.plan) == (two.log, two.value, two.plan)


pickled_by: set[str] = set()


@dataclass(frozen=True)
class Watched:
    """A planner that says which thread pickled it."""

    name: str

    def __reduce__(self):
        pickled_by.add(threading.current_thread().name)
        return Watched, (self.name,)

    def __call__(self, *args):
        return PLANNERS[self.name](*args)


def test_what_workers_are_told_is_pickled_by_the_thread_that_changes_it():
    pickled_by.clear()
    scope = Scope(planners={name: Watched(name) for name in FEW[:2]})
    judge = IterationJudge(cost())
    joint_search(small(), cost(), judge, stop=Stop(candidates=4), scope=scope, workers=2)
    assert pickled_by == {threading.main_thread().name}


class FewestCopies:
    """Of plans in which every block of the LLM has a copy of the encoders, likes those with fewest blocks."""

    timeline = IterationJudge(cost()).timeline

    def value(self, plan):
        """A plan of any other kind is refused."""
        blocks = {stage.flat_ranks for stage in plan.stages if stage.module == "llm"}
        copies = {stage.flat_ranks for stage in plan.stages if stage.module == "vision"}
        if blocks != copies or len(blocks) == 1:
            raise ValueError("no copies")
        return IterationJudge(cost()).value(plan) + len(blocks)


def test_a_better_plan_of_a_strategys_own_space_is_found_where_no_placement_says_it():
    planners = {"encoders-replicated": PLANNERS["encoders-replicated"]}

    def run(**scope):
        scope = Scope(planners=planners, **scope)
        return joint_search(small(), cost(), FewestCopies(), stop=Stop(candidates=30), scope=scope)

    one, held = run(), run(fixed={Question.TOKENS: "encoders-replicated"})
    (start,) = one.starts
    assert start.value > 3 > one.value > 2
    assert isinstance(one.path[0].moves[0], Replan)
    assert one.best_from == "encoders-replicated"
    again = replayed(small(), cost(), FewestCopies(), planners, log_lines(small(), Scope(), one))
    assert again == (one.plan, one.value)
    assert held.value > 3
    assert not any(isinstance(move, Replan) for entry in held.log for move in entry.moves)


def test_an_ablation_is_never_worse_than_what_it_is_held_against_nor_together_than_alone():
    starts, judge = found().starts, IterationJudge(cost())
    rows = list(
        ablated(small(), cost(), judge, "entrain", scope=Scope(starts=starts), stop=Stop(candidates=5))
    )
    before = next(start.value for start in starts if start.name == "entrain")
    *alone, together = rows
    assert [row.open for row in alone] == [(question,) for question in Question]
    assert all(row.before == before >= row.found.value for row in rows)
    assert together.factor >= max(row.factor for row in alone)
    for row in alone:
        assert all(move.question in row.open for entry in row.found.log for move in entry.moves)


def test_an_ablation_of_a_strategy_without_a_plan_is_refused():
    judge = IterationJudge(cost())
    scope = Scope(starts=found().starts)
    gains = ablated(small(), cost(), judge, "fsdp", scope=scope, stop=Stop(candidates=1))
    with pytest.raises(ValueError, match="strategy 'fsdp' has no plan of job 'tiny': there is no such"):
        next(gains)


def test_a_log_is_replayed_to_the_same_answer():
    best = found()
    assert best.path, "the search is to find something"
    lines = list(log_lines(small(), Scope(), best))
    assert len(lines) == len(best.log) + 2
    planners = {name: PLANNERS[name] for name in FEW}
    plan, value = replayed(small(), cost(), IterationJudge(cost()), planners, lines)
    assert (plan, value) == (best.plan, best.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: lines[:-1], "no log of a joint search"),
        (lambda lines: [], "no log of a joint search"),
        (lambda lines: [lines[0], *lines[2:]], "candidates are missing"),
        (lambda lines: [lines[0].replace("tiny", "other"), *lines[1:]], "the log is of job 'other'"),
        (lambda lines: [*lines[:-1], lines[-1].replace('"value": ', '"value": 1')], "logged was 1"),
    ],
)
def test_a_log_of_something_else_is_refused(change, reason):
    lines = change(list(log_lines(small(), Scope(), found())))
    planners = {name: PLANNERS[name] for name in FEW}
    with pytest.raises(ValueError, match=reason):
        replayed(small(), cost(), IterationJudge(cost()), planners, lines)


def test_a_start_is_the_same_plan_again():
    for start in found().starts:
        if start.plan is not None:
            again = build(small(), start.choice, cost())
            assert replace(again, strategy=start.plan.strategy) == start.plan


DEGREES = (Degrees(module="vision", tp=2), Degrees(module="llm", pp=2, dp=3))
EVERY_MOVE = (
    Arrange(Arrangement(placement=Placement.ISLANDS, degrees=DEGREES)),
    Reschedule(replace(usual(ScheduleKind.THREE_PHASE), window=2)),
    Reschedule(replace(usual(ScheduleKind.ZB_H1), memory_limit=3)),
    ShiftLayer("llm", 1, -1),
    CutStages(4),
    RunEncodersAhead(2),
    Exchange(1, 5),
    MoveSample(3, 0, 2, deferred=True),
    Reorder(0, 1, 3),
    Resize(4),
    Regroup(Grouping.EVEN),
    Distribute(TokenRule.STRIPE),
    ExchangeKeys("llm", KeyExchange.RING),
    Keep("llm", Recompute.FULL, Sharding.OPTIMIZER, 2, sequence_parallel=True),
    Reshard(None, ReshardAfter.STEP),
    Take(Question.TOKENS, "cornstarch"),
    replan_of("cornstarch", replace(small(), settings=Settings(modules=(ModuleSettings(module="llm"),)))),
)


@pytest.mark.parametrize("move", EVERY_MOVE, ids=lambda move: type(move).__name__)
def test_a_move_is_read_as_it_was_written(move):
    assert {type(each).__name__ for each in EVERY_MOVE} == set(MOVES)
    assert move_from_json(move_to_json(move)) == move


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"move": "Leap"}, "no move 'Leap'"),
        ({"move": "Exchange", "first": 1}, "move Exchange: "),
        ({"move": "Exchange", "first": 1, "second": 2, "third": 3}, "no third"),
    ],
)
def test_what_is_no_move_is_refused(data, reason):
    with pytest.raises(ValueError, match=reason):
        move_from_json(data)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({}, "want an end"),
        ({"seconds": 0.0}, "want seconds > 0"),
        ({"candidates": 0}, "want candidates > 0"),
        ({"gap": 1.5}, "want a gap of 0 to 1"),
    ],
)
def test_an_end_that_is_none_is_refused(limits, reason):
    with pytest.raises(ValueError, match=reason):
        Stop(**limits)


def test_a_fixed_question_keeps_its_answer():
    held = searched(small(), fixed={Question.LAYOUT: "cornstarch"}, candidates=10)
    start = next(each for each in held.starts if each.name == "cornstarch")
    assert {(s.module, s.replica, s.ranks) for s in held.plan.stages} == {
        (s.module, s.replica, s.ranks) for s in start.plan.stages
    }
    assert held.value <= start.value
    assert not any(move.question is Question.LAYOUT for entry in held.log for move in entry.moves)


def test_a_fixed_answer_of_a_strategy_without_a_plan_is_refused():
    with pytest.raises(ValueError, match="layout cannot be fsdp's, it has no plan of the job"):
        searched(small(), fixed={Question.LAYOUT: "fsdp"})


def with_memory(num_bytes):
    nodes = tuple(replace(node, memory_bytes=num_bytes) for node in small().cluster.nodes)
    return replace(small(), cluster=replace(small().cluster, nodes=nodes))


def test_a_job_that_does_not_fit_says_what_it_lacks_and_what_would_do():
    refused = "does not fit: no strategy has a plan for job 'tiny'; .*nearest: .*"
    needs, fits = r"'s plan needs \+[\d.e-]+ GiB on rank \d+; .*needs", "with recomputation of .* fits"
    with pytest.raises(ValueError, match=refused + needs):
        searched(with_memory(1000))
    plan = PLANNERS["cornstarch"](small(), cost(), lambda *_: None)
    lowered = lower(plan)
    most = max(peak_bytes(lowered, memory_table(lowered)).values())
    tight = with_memory(most - 1)
    with pytest.raises(ValueError, match=refused + fits) as error:
        searched(tight, names=["cornstarch"])
    said = str(error.value).split("plan with ")[1].removesuffix(" fits")
    modules = [m.name for m in tight.model.modules] if "all" in said else [said.rsplit(maxsplit=1)[-1]]
    again = tuple(ModuleSettings(module=name, recompute=Recompute.FULL) for name in sorted(modules))
    relaxed = replace(tight, settings=replace(tight.settings, modules=again))
    assert searched(relaxed, names=["cornstarch"], candidates=1).starts[0].value is not None


class Ticks:
    """A clock that goes on by what is done."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_budget_of_time_holds_whatever_the_starts_take():
    ticks, judge = Ticks(), IterationJudge(cost())

    class Slow:
        timeline = judge.timeline

        def value(self, plan):
            ticks.now_s += 0.1
            return judge.value(plan)

    def taking(seconds, name="cornstarch"):
        def planner(job, cost, progress):
            for done in range(round(seconds / 0.5)):
                ticks.now_s += 0.5
                progress(done, 1000, 1.0)
            return PLANNERS[name](job, cost, lambda *_: None)

        return planner

    planners = {
        "again": taking(2.0),
        "endless": taking(1e6),
        "quick": taking(0.5, "dip"),
        "too long": taking(30.0),
    }
    found = joint_search(
        small(), cost(), Slow(), stop=Stop(seconds=20.0, clock=ticks), scope=Scope(planners=planners)
    )
    refusals = {start.name: start.refusal for start in found.starts if start.value is None}
    assert set(refusals.values()) == {OUT_OF_TIME}
    assert found.seconds == ticks.now_s <= 20.0 + 0.5
    assert found.search_s >= 9.0
    assert refusals.keys() == {"endless", "too long"}


@pytest.mark.parametrize("kind", [ScheduleKind.ZB_H1, ScheduleKind.ZB_H2])
def test_keys_that_cannot_be_divided_are_refused_before_an_order_is_made_by_durations(kind):
    degrees = (Degrees(module="vision"), Degrees(module="audio"), Degrees(module="llm", cp=4))
    moves = (
        Arrange(Arrangement(placement=Placement.ISLANDS, degrees=degrees)),
        ExchangeKeys("llm", KeyExchange.ALL_TO_ALL),
        Reschedule(usual(kind)),
    )
    choice = next(each.choice for each in found().starts if each.name == "cornstarch")
    outcome = evaluate(Space(small(), cost(), {}), IterationJudge(cost()), Request(choice, moves))
    assert outcome.value is None
    assert "cp must divide the 2 key/value heads" in outcome.refusal


@pytest.mark.parametrize("seconds", [None, 1e6], ids=["starts whole", "starts in slices"])
@pytest.mark.parametrize("workers", [1, 2])
def test_asked_to_end_it_has_the_best_so_far(workers: int, seconds: float | None):
    seen: list[State] = []
    stop = Stop(candidates=10**6, seconds=seconds, is_asked=lambda: bool(seen) and seen[-1].candidates > 9)
    scope = Scope(planners={name: PLANNERS[name] for name in FEW})
    found = joint_search(
        small(), cost(), IterationJudge(cost()), stop=stop, scope=scope, workers=workers, progress=seen.append
    )
    assert 9 < found.candidates == seen[-1].candidates < 10**6
    assert found.value == seen[-1].best <= found.best_start.value


@pytest.mark.parametrize("seconds", [None, 1e6], ids=["starts whole", "starts in slices"])
def test_asked_to_end_while_it_plans_what_it_starts_from_it_has_the_first_plan(seconds: float | None):
    stop = Stop(candidates=10**6, seconds=seconds, is_asked=lambda: True)
    found = joint_search(small(), cost(), IterationJudge(cost()), stop=stop)
    assert found.candidates == 0
    assert len([start for start in found.starts if start.plan is not None]) == 1
    assert found.value == found.best_start.value
