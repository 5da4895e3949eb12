"""Changes of a job that shorten its step: each neighbour is planned, checked, priced and simulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from workbench.cost.model import CostModel
from workbench.explain.neighbours import Change, ChangeKind, looser
from workbench.explain.plan_as_job import Origin
from workbench.memory.account import check_memory, memory_table, peak_bytes
from workbench.plan.codec import plan_hash
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.planner.budget import UNLIMITED, Budget
from workbench.planner.chosen_plan import check_chosen
from workbench.planner.stage_counts import PlannerStopped
from workbench.planner.strategy_spec import Planner
from workbench.timing.accept import checked

LEAST = 1e-4  # smallest relative improvement of a step that counts
MOST_OF_TIME = 0.25  # of the time that is left: more is not spent on planning one change, as others wait
StepSeconds = Callable[[Lowered, CostModel], float]
Told = Callable[[int, int, str], None]


class OutOfTimeError(Exception):
    """The time for changes is over; ends a planner's search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A checked and simulated plan.

    Args:
        plan: passed every check but that of memory.
        step_s: simulated.
        peak_bytes: of the fullest rank.
        misfit: why it does not fit; "": it does.
    """

    plan: Plan
    step_s: float
    peak_bytes: int
    misfit: str = ""


class Described(Protocol):
    """A change of a job or of a plan, for people."""

    @property
    def kind(self) -> StrEnum:
        """What it is about."""

    @property
    def about(self) -> str:
        """The change in words."""


AnyChange = TypeVar("AnyChange", bound=Described)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A change with its judged plan, or the reason why there is none."""

    change: Described
    judged: Judged | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All changes that were tried.

    Args:
        base: the plan itself.
        helping: faster by `LEAST` or more, and fitting; fastest first.
        slower: fitting, but no faster; fastest first.
        misfits: with a plan that does not fit; fastest first.
        refused: without a plan.
        num_same: changes whose plan equals the base's or another change's.
        num_left: changes not tried for lack of time.
    """

    base: Judged
    helping: tuple[Tried, ...]
    slower: tuple[Tried, ...]
    misfits: tuple[Tried, ...]
    refused: tuple[Tried, ...]
    num_same: int = 0
    num_left: int = 0

    @property
    def num_simulated(self) -> int:
        """Number of changes with a plan of their own."""
        return len(self.helping) + len(self.slower) + len(self.misfits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Plans jobs and judges plans, all for one machine.

    Args:
        planners: by name of the strategy.
        cost: model of the machine.
        step_s: simulates a lowered plan.
        budget: of all changes; asked before each, and by planners as they search.
    """

    planners: Mapping[str, Planner]
    cost: CostModel
    step_s: StepSeconds
    budget: Budget = UNLIMITED

    def judged(self, plan: Plan) -> Judged:
        """Check a plan as `accept` does, price and simulate it, even if it does not fit in memory.

        Raises:
            ValueError: it is invalid, can deadlock, or cannot be priced.
        """
        lowered = checked(plan)
        memory = memory_table(lowered)
        misfit = ""
        try:
            check_memory(lowered, memory)
        except ValueError as error:
            misfit = str(error)
        peak = max(peak_bytes(lowered, memory).values())
        return Judged(plan=plan, step_s=self.step_s(lowered, self.cost), peak_bytes=peak, misfit=misfit)

    def planned(self, change: Change, origin: Origin) -> Plan:
        """The change's plan; if a strategy refuses the job's degrees, it gets looser jobs, the nearest first.

        A planner that takes more than its part of the time hands over its best plan so far.

        Raises:
            ValueError: there is none; the reason is that of the first job, or that time did not suffice.
        """
        part = self.budget.part(MOST_OF_TIME)
        given_s, progress = part.left_s, part.watch()
        planner, edited = self.planners[change.strategy or origin.strategy], change.edit(origin.job)
        refusal: ValueError | None = None
        for job in (edited, *(looser(edited) if change.kind is ChangeKind.STRATEGY else ())):
            try:
                plan = planner(job, self.cost, progress)
            except ValueError as error:
                refusal = refusal or error
                continue
            except PlannerStopped:
                raise refusal or ValueError(f"no plan within {given_s:.1f} s, its part of the time") from None
            check_chosen(origin.job, plan)
            return plan
        assert refusal is not None, "there is a job"
        raise refusal

    def check_time(self) -> None:
        """Raise OutOfTimeError if time is over."""
        if self.budget.left_s <= 0:
            raise OutOfTimeError


def try_changes(
    base: Judged,
    changes: Sequence[AnyChange],
    planned: Callable[[AnyChange], Plan],
    judge: Judge,
    told: Told = lambda done, total, note: None,
) -> Changes:
    """Plan each change, judge the plan, and sort the results.

    Args:
        base: the plan that they are compared with.
        changes: of a job, see `neighbours`, or moves of a joint search.
        planned: a change's plan, as `Judge.planned`; ValueError where there is none.
        judge: of plans.
        told: progress: (changes done, number of changes, note on the best so far).

    Complexity: one plan, pricing and simulation per change.
    """
    results: list[Tried] = []
    seen, num_same, num_left, best = {plan_hash(base.plan)}, 0, 0, base
    for done, change in enumerate(changes):
        told(done, len(changes), f"best so far {best.step_s / base.step_s - 1:+.1%}; {change.about}")
        try:
            judge.check_time()
            result = _tried(change, planned, judge, seen)
        except OutOfTimeError:
            num_left = len(changes) - done
            break
        if result is None:
            num_same += 1
            continue
        results.append(result)
        if result.judged is not None and not result.judged.misfit and result.judged.step_s < best.step_s:
            best = result.judged
    told(len(changes) - num_left, len(changes), "")
    return _sorted(base, results, num_same, num_left)


def _tried(
    change: AnyChange, planned: Callable[[AnyChange], Plan], judge: Judge, seen: set[str]
) -> Tried | None:
    """Try one change; None if its plan was seen before."""
    try:
        plan = planned(change)
        if plan_hash(plan) in seen:
            return None
        seen.add(plan_hash(plan))
        return Tried(change=change, judged=judge.judged(plan))
    except ValueError as error:
        return Tried(change=change, refusal=" ".join(str(error).split()))


def _sorted(base: Judged, results: Sequence[Tried], num_same: int, num_left: int) -> Changes:
    with_plans = sorted(
        ((result, result.judged) for result in results if result.judged is not None),
        key=lambda pair: pair[1].step_s,
    )
    limit_s = (1 - LEAST) * base.step_s
    return Changes(
        base=base,
        helping=tuple(r for r, judged in with_plans if not judged.misfit and judged.step_s < limit_s),
        slower=tuple(r for r, judged in with_plans if not judged.misfit and judged.step_s >= limit_s),
        misfits=tuple(r for r, judged in with_plans if judged.misfit),
        refused=tuple(r for r in results if r.judged is None),
        num_same=num_same,
        num_left=num_left,
    )
