"""What a search makes small, as one figure of a plan: less is better, whatever it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, runtime_checkable

from workbench.explain.timeline import Timeline
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule
from workbench.search.objectives.race import Race
from workbench.search.objectives.step_times import StepJudge, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of one plan.

    Args:
        value: less is better.
        times: of its steps.
        figures: what else it was judged by, as JSON data.
        misses: which limit it misses; empty: none. Among plans that miss it, a smaller value is nearer.
    """

    value: float
    times: StepTimes
    figures: Mapping[str, Any] = field(default_factory=dict)
    misses: str = ""


Measure = Callable[[Plan, StepTimes, Schedule | None], Judged]
"""From steps to what counts, no less for longer steps; ValueError where the plan cannot be judged so."""


@runtime_checkable
class LimitedMeasure(Protocol):
    """A measure that tells itself, for less than the value takes, that it is not below a limit."""

    def within(self, plan: Plan, times: StepTimes, limit: float) -> Judged:
        """As the measure; `PassedOverError` where the plan's value is known to be at least the limit."""


class MissesLimitError(ValueError):
    """A plan that is sound and misses a limit; among such plans, one with a smaller value is nearer."""

    def __init__(self, text: str, value: float) -> None:
        super().__init__(text)
        self.value = value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJudge:
    """An objective: how long steps are, and what is made of them. Less is better.

    Args:
        times: seconds of a plan's steps.
        measure: what counts.
        timeline: of a plan's step on the batch that it was made for.
        asked: the objective in the words of its flags, as JSON data: what decides it.
    """

    times: StepJudge
    measure: Measure
    timeline: Callable[[Plan], Timeline]
    asked: Mapping[str, Any]

    def judged(self, plan: Plan, schedule: Schedule | None = None) -> Judged:
        """All figures of a plan.

        Args:
            schedule: of the plan, where it is not the job's.

        Raises:
            ValueError: the plan is refused.
        """
        return self.measure(plan, self.times(plan, schedule), schedule)

    def value(self, plan: Plan, schedule: Schedule | None = None) -> float:
        """The figure; ValueError where a plan is refused, `MissesLimitError` where it misses a limit."""
        return _met(self.judged(plan, schedule)).value

    def within(self, plan: Plan, limit: float, race: Race | None = None) -> Judged:
        """The figures of a plan that has to have a value below the limit to be of use.

        Args:
            race: what the steps of some batches say about those of others; None: nothing.

        Raises:
            PassedOverError: the value is known, or by the race likely, to be no less than the limit before
                all batches are planned or all failures are followed.
            MissesLimitError: it misses a limit of its own.
            ValueError: it is refused.
        """

        def is_enough(step_s: float) -> bool:
            found = self.measure(plan, StepTimes(step_s=step_s, batches_s=()), None)
            return bool(found.misses) or found.value >= limit

        if limit == inf:
            return _met(self.judged(plan))
        if isinstance(self.measure, LimitedMeasure):
            return _met(self.measure.within(plan, self.times(plan), limit))
        return _met(self.measure(plan, self.times(plan, is_enough=is_enough, race=race), None))


def _met(found: Judged) -> Judged:
    if found.misses:
        raise MissesLimitError(found.misses, found.value)
    return found


def step_seconds(plan: Plan, times: StepTimes, schedule: Schedule | None) -> Judged:
    """Seconds of a step."""
    return Judged(value=times.step_s, times=times)


def rank_seconds(plan: Plan, times: StepTimes, schedule: Schedule | None) -> Judged:
    """Seconds of a rank for each sample: least where most samples a second and rank are done."""
    return Judged(value=times.step_s * len(plan.ranks) / len(plan.batch), times=times)
