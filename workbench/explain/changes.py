"""Which changes of a job would make its step shorter: each neighbour planned, checked, priced, simulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workbench.cost.model import CostModel
from workbench.explain.neighbours import Change, ChangeKind, looser
from workbench.explain.plan_as_job import Origin
from workbench.memory.account import check_memory, memory_table, peak_bytes
from workbench.plan.codec import plan_hash
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.planner.chosen_plan import check_chosen
from workbench.planner.strategy_spec import Planner
from workbench.timing.accept import checked

LEAST = 1e-4  # of a step, below which a change does not help
StepSeconds = Callable[[Lowered, CostModel], float]
IsOver = Callable[[], bool]
Told = Callable[[int, int, str], None]


class OutOfTimeError(Exception):
    """The time for changes is over; within a planner's search this ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of a plan.

    Args:
        plan: after every check but that of memory.
        step_s: simulated.
        peak_bytes: of the fullest rank.
        misfit: why it does not fit; "": it does.
    """

    plan: Plan
    step_s: float
    peak_bytes: int
    misfit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a change: a judged plan, or the reason why there is none."""

    change: Change
    judged: Judged | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All that was tried.

    Args:
        base: the plan itself.
        helping: faster by `LEAST` or more, and fitting; fastest first.
        slower: fitting, and no faster; fastest first.
        misfits: with a plan that does not fit; fastest first.
        refused: without a plan.
        num_same: changes whose plan is the base's or another change's.
        num_left: changes that time did not suffice for.
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
        """Changes with a plan of their own."""
        return len(self.helping) + len(self.slower) + len(self.misfits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Plans jobs and judges plans, all on one machine.

    Args:
        planners: by names of strategies.
        cost: the machine.
        step_s: simulates a lowered plan.
        is_over: asked before each change, and by planners as they search; true ends all.
    """

    planners: Mapping[str, Planner]
    cost: CostModel
    step_s: StepSeconds
    is_over: IsOver = lambda: False

    def judged(self, plan: Plan) -> Judged:
        """A plan checked as `accept` does, priced and simulated; one that does not fit is simulated too.

        Raises:
            ValueError: it is unsound, can deadlock, or cannot be priced.
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
        """The change's plan; a strategy that refuses the job's degrees gets looser jobs, the nearest first.

        Raises:
            ValueError: there is none, as the first job is refused.
            OutOfTimeError: time is over.
        """
        self._progress(0, 0, 0.0)
        planner, edited = self.planners[change.strategy or origin.strategy], change.edit(origin.job)
        refusal: ValueError | None = None
        for job in (edited, *(looser(edited) if change.kind is ChangeKind.STRATEGY else ())):
            try:
                plan = planner(job, self.cost, self._progress)
            except ValueError as error:
                refusal = refusal or error
                continue
            check_chosen(origin.job, plan)
            return plan
        assert refusal is not None, "there is a job"
        raise refusal

    def _progress(self, done: int, total: int, best_s: float) -> None:
        if self.is_over():
            raise OutOfTimeError


def try_changes(
    base: Judged,
    origin: Origin,
    changes: Sequence[Change],
    judge: Judge,
    told: Told = lambda done, total, note: None,
) -> Changes:
    """Plans each change of the job by its strategy, judges the plan, and sorts what came of them.

    Args:
        base: the plan that they are held against.
        origin: the job that is changed, and the strategy that plans it where a change names none.
        changes: see `neighbours`.
        judge: plans and judges.
        told: (changes done, of how many, the best so far).

    Complexity: one plan, price and simulation a change.
    """
    found: list[Tried] = []
    seen, num_same, num_left, best = {plan_hash(base.plan)}, 0, 0, base
    for done, change in enumerate(changes):
        told(done, len(changes), f"best so far {best.step_s / base.step_s - 1:+.1%}; {change.about}")
        try:
            tried = _tried(change, origin, judge, seen)
        except OutOfTimeError:
            num_left = len(changes) - done
            break
        if tried is None:
            num_same += 1
            continue
        found.append(tried)
        if tried.judged is not None and not tried.judged.misfit and tried.judged.step_s < best.step_s:
            best = tried.judged
    told(len(changes) - num_left, len(changes), "")
    return _sorted(base, found, num_same, num_left)


def _tried(change: Change, origin: Origin, judge: Judge, seen: set[str]) -> Tried | None:
    """What became of one change; None where its plan was seen before."""
    try:
        plan = judge.planned(change, origin)
        if plan_hash(plan) in seen:
            return None
        seen.add(plan_hash(plan))
        return Tried(change=change, judged=judge.judged(plan))
    except ValueError as error:
        return Tried(change=change, refusal=" ".join(str(error).split()))


def _sorted(base: Judged, found: Sequence[Tried], num_same: int, num_left: int) -> Changes:
    with_plans = sorted(
        ((each, each.judged) for each in found if each.judged is not None), key=lambda pair: pair[1].step_s
    )
    least_s = (1 - LEAST) * base.step_s
    return Changes(
        base=base,
        helping=tuple(each for each, of in with_plans if not of.misfit and of.step_s < least_s),
        slower=tuple(each for each, of in with_plans if not of.misfit and of.step_s >= least_s),
        misfits=tuple(each for each, of in with_plans if of.misfit),
        refused=tuple(each for each in found if each.judged is None),
        num_same=num_same,
        num_left=num_left,
    )
