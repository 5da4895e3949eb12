"""What becomes of a candidate: its choice, its plan, and its value by a judge."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol, runtime_checkable

from workbench.collector import collector_paused
from workbench.explain.timeline import Timeline
from workbench.job.job import Job
from workbench.memory.account import fullest_bytes
from workbench.plan.folded import checked_part
from workbench.plan.lru_cache import Identity, LruCache, clear_caches
from workbench.plan.plan import Plan
from workbench.planner.chosen_plan import check_chosen
from workbench.planner.groupings import way_of
from workbench.search.joint.choice import Choice, build
from workbench.search.joint.grouping_moves import Regroup, Resize
from workbench.search.joint.layout_moves import Arrange
from workbench.search.joint.move import Move, Space
from workbench.search.joint.replan import Replan
from workbench.search.objectives.pareto import Point
from workbench.search.objectives.plan_judge import Judged
from workbench.search.objectives.race import Race
from workbench.units import S_PER_HOUR

UNCHANGED = "it changes nothing"
MANY_RANKS = 4096  # what is cached of one plan of so many takes a gigabyte, and serves few others
_CHANGED: LruCache[Choice] = LruCache(256)  # by candidate: incumbents are asked for again


class Judge(Protocol):
    """What says how good a plan is; it has to be picklable for a search by several workers."""

    def value(self, plan: Plan) -> float:
        """Lower is better, of a plan that is accepted; ValueError with the reason where it is refused."""

    def timeline(self, plan: Plan) -> Timeline:
        """When the plan's step does what; ValueError where it is refused."""


@runtime_checkable
class LimitedJudge(Judge, Protocol):
    """A judge that tells for less than their value takes which plans are of no use."""

    def within(self, plan: Plan, limit: float, race: Race | None) -> Judged:
        """The value with steps; ValueError with the reason where a plan is refused.

        Args:
            limit: a plan that has no value below is refused as soon as that is known.
            race: by which it may be refused as soon as that is likely; None: only when it is known.
        """


class Asked(NamedTuple):
    """A candidate: moves from a choice.

    Args:
        limit: the value above which it may be passed over.
        race: by which it may be passed over when that is likely; None: only when it is known.
    """

    base: Choice
    moves: tuple[Move, ...]
    limit: float = inf
    race: Race | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one candidate: a value, or why there is none.

    Args:
        costs: as of a `Point`, where the search keeps a front.
        batches_s: steps of the batches that it was judged by.
    """

    value: float | None
    refusal: str = ""
    costs: tuple[float, ...] = ()
    batches_s: tuple[float, ...] = ()


@collector_paused()
def evaluated(space: Space, judge: Judge, asked: Asked) -> Outcome:
    """A choice after some moves: built, and held against the judge. What a strategy plans anew is a plan."""
    base, moves, limit, race = asked
    try:
        if isinstance(moves[0], Replan) and len(moves) == 1:
            plan = _checked(space.job, moves[0].plan(space))
        else:
            choice = changed(space, base, moves)
            if choice == base:
                return Outcome(None, UNCHANGED)
            plan = plan_of(space, choice)
        front_of = space.job if space.keeps_front else None
        return outcome_of(plan, judge, limit, race, front_of=front_of)
    except ValueError as error:
        return Outcome(None, str(error))
    finally:
        if space.job.cluster.num_ranks > MANY_RANKS:
            clear_caches()


def outcome_of(
    plan: Plan,
    judge: Judge,
    limit: float = inf,
    race: Race | None = None,
    *,
    front_of: Job | None = None,
) -> Outcome:
    """A plan's value, as `LimitedJudge.within`; ValueError where it is refused.

    Args:
        front_of: the job, where its front is kept.
    """
    if isinstance(judge, LimitedJudge):
        found = judge.within(plan, limit, race)
        value, step_s, batches_s = found.value, found.times.step_s, found.times.batches_s
    else:
        value = step_s = judge.value(plan)
        batches_s = ()
    costs = () if front_of is None else _costs(front_of, plan, step_s)
    return Outcome(value, costs=costs, batches_s=batches_s)


def _costs(job: Job, plan: Plan, step_s: float) -> tuple[float, ...]:
    """What the judge made of the plan holds its memory already, but where it judged other batches."""
    per_hour = job.dollars_per_hour(plan.ranks)
    point = Point(
        name=plan.strategy,
        time_s=step_s,
        memory_bytes=fullest_bytes(checked_part(plan)),
        gpus=len(plan.ranks),
        dollars=None if per_hour is None else per_hour / S_PER_HOUR * step_s,
    )
    return point.costs


def changed(space: Space, base: Choice, moves: Sequence[Move]) -> Choice:
    """The choice after some moves, one after the other; ValueError where one cannot be."""

    def derive() -> Choice:
        choice = base
        for move in moves:
            choice = _as_ruled(space, choice, move.apply(space, choice), move)
        return choice

    return _CHANGED.get_or((Identity(space), Identity(base), tuple(moves)), derive)


def _as_ruled(space: Space, was: Choice, choice: Choice, move: Move) -> Choice:
    """A choice with other numbers of microbatches or replicas, grouped by the same way as before.

    Else samples would only keep their order, and the groups of the judged batch would follow from no rule.
    """
    if choice.microbatches == was.microbatches or not isinstance(move, (Arrange, Resize)):
        return choice
    way = way_of(space.job, space.cost, was.microbatches)
    try:
        return choice if way is None else Regroup(way).apply(space, choice)
    except ValueError:  # so many cannot be grouped so
        return choice


def plan_of(space: Space, choice: Choice) -> Plan:
    """Its plan; ValueError as `build`, and for a module in a pool that does not take it."""
    return _checked(space.job, build(space.job, choice, space.cost))


def _checked(job: Job, plan: Plan) -> Plan:
    check_chosen(job, plan)
    return plan
