"""Evaluate a candidate: build its choice and its plan, and judge the plan."""

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
from workbench.search.joint.choice import Choice, build, num_actions
from workbench.search.joint.grouping_moves import Regroup, Resize
from workbench.search.joint.layout_moves import Arrange
from workbench.search.joint.move import Move, Space
from workbench.search.joint.replan import Replan
from workbench.search.objectives.pareto import Point
from workbench.search.objectives.plan_judge import Judged
from workbench.search.objectives.race import Race
from workbench.units import S_PER_HOUR

UNCHANGED = "it changes nothing"
ACTIONS_PER_EFFORT = 360  # judged in as much time as every candidate takes besides; see the decisions
MANY_RANKS = 4096  # a plan of so many ranks caches a gigabyte, little of which others reuse
_CHANGED: LruCache[Choice] = LruCache(256)  # by candidate: those that become incumbents are built again


class Judge(Protocol):
    """Evaluates plans; picklable for a search with several workers."""

    def value(self, plan: Plan) -> float:
        """Lower is better; ValueError with the reason where the plan is refused."""

    def timeline(self, plan: Plan) -> Timeline:
        """Timeline of the plan's step; ValueError where the plan is refused."""


@runtime_checkable
class LimitedJudge(Judge, Protocol):
    """A judge that can reject a plan above a limit at less cost than its exact value."""

    def within(self, plan: Plan, limit: float, race: Race | None) -> Judged:
        """The plan's value with its steps; ValueError with the reason where it is refused.

        Args:
            limit: refuse the plan as soon as its value is known not to be below.
            race: also refuse it as soon as that is likely; None: only when it is known.
        """


class Request(NamedTuple):
    """A candidate to evaluate: moves applied to a choice.

    Args:
        limit: the value above which the candidate may be skipped.
        race: statistics by which it may be skipped when that is likely; None: only when it is known.
    """

    base: Choice
    moves: tuple[Move, ...]
    limit: float = inf
    race: Race | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate's value, or why there is none.

    Args:
        costs: those of a `Point`, if the search keeps a Pareto front.
        batches_s: steps on the batches that the judge used.
        effort: of judging it, in the smallest plans; by counts, so that it does not depend on the machine.
    """

    value: float | None
    refusal: str = ""
    costs: tuple[float, ...] = ()
    batches_s: tuple[float, ...] = ()
    effort: float = 1.0


@collector_paused()
def evaluate(space: Space, judge: Judge, request: Request) -> Outcome:
    """Apply the moves, build the plan and judge it; a lone `Replan` yields a plan directly."""
    base, moves, limit, race = request
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
    """Judge a plan as `LimitedJudge.within` does; ValueError where it is refused.

    Args:
        front_of: the job, if the search keeps a Pareto front.
    """
    if isinstance(judge, LimitedJudge):
        judged = judge.within(plan, limit, race)
        value, step_s, batches_s = judged.value, judged.times.step_s, judged.times.batches_s
    else:
        value = step_s = judge.value(plan)
        batches_s = ()
    costs = () if front_of is None else _costs(front_of, plan, step_s)
    return Outcome(value, costs=costs, batches_s=batches_s, effort=_effort_of(plan))


def _effort_of(plan: Plan) -> float:
    """Effort of judging a plan: of equal replicas, one is judged."""
    return 1 + num_actions(checked_part(plan)) / ACTIONS_PER_EFFORT


def _costs(job: Job, plan: Plan, step_s: float) -> tuple[float, ...]:
    """Coordinates of the plan on the Pareto front; memory is cached unless the judge used other batches."""
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
    """Apply moves one after the other; ValueError where one is impossible."""

    def derive() -> Choice:
        choice = base
        for move in moves:
            choice = _regrouped_by_rule(space, choice, move.apply(space, choice), move)
        return choice

    return _CHANGED.get_or((Identity(space), Identity(base), tuple(moves)), derive)


def _regrouped_by_rule(space: Space, before: Choice, choice: Choice, move: Move) -> Choice:
    """Restore the grouping rule after a move that changes the number of microbatches or replicas.

    Otherwise samples would only keep their order, and the grouping of the judged batch would follow from no
    rule.
    """
    if choice.microbatches == before.microbatches or not isinstance(move, (Arrange, Resize)):
        return choice
    grouping = way_of(space.job, space.cost, before.microbatches)
    try:
        return choice if grouping is None else Regroup(grouping).apply(space, choice)
    except ValueError:  # the rule does not support this number
        return choice


def plan_of(space: Space, choice: Choice) -> Plan:
    """Build and check the plan; ValueError as `build`, or for a module in a pool that does not take it."""
    return _checked(space.job, build(space.job, choice, space.cost))


def _checked(job: Job, plan: Plan) -> Plan:
    check_chosen(job, plan)
    return plan
