"""A search's objective as one figure per plan: less is better."""

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
    """The judgement of one plan.

    Args:
        value: less is better.
        times: of its steps.
        figures: further figures behind the value, as JSON data.
        misses: the limit that it misses; empty: none. Among plans that miss it, a smaller value is nearer.
    """

    value: float
    times: StepTimes
    figures: Mapping[str, Any] = field(default_factory=dict)
    misses: str = ""


Measure = Callable[[Plan, StepTimes, Schedule | None], Judged]
"""Maps steps to the objective, monotonic in their duration; ValueError where it does not apply."""


Report = Callable[[str], None]
"""Receives what a judge does at the moment, in a few words."""


def unheard(text: str) -> None:
    """A report that nobody reads."""


@runtime_checkable
class ReportingMeasure(Protocol):
    """A measure that may take minutes, and reports what it does."""

    def reporting(self, plan: Plan, times: StepTimes, schedule: Schedule | None, report: Report) -> Judged:
        """As the measure."""


@runtime_checkable
class LimitedMeasure(Protocol):
    """A measure that can tell at less cost than the value that it is not below a limit."""

    def within(self, plan: Plan, times: StepTimes, limit: float) -> Judged:
        """As the measure; `PassedOverError` if the plan's value is known to be at least the limit."""


class MissesLimitError(ValueError):
    """A valid plan misses a limit; among such plans, a smaller value is nearer."""

    def __init__(self, text: str, value: float) -> None:
        super().__init__(text)
        self.value = value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJudge:
    """An objective: how steps are timed, and how they are measured. Less is better.

    Args:
        times: seconds of a plan's steps.
        measure: maps them to the objective.
        timeline: of a plan's step on the batch that it was made for.
        asked: the objective in terms of its flags, as JSON data: everything that determines it.
    """

    times: StepJudge
    measure: Measure
    timeline: Callable[[Plan], Timeline]
    asked: Mapping[str, Any]

    def judged(self, plan: Plan, schedule: Schedule | None = None, report: Report = unheard) -> Judged:
        """All figures of a plan.

        Args:
            schedule: the plan's, if it is not the job's.
            report: receives what is judged at the moment, from measures that take long.

        Raises:
            ValueError: the plan is refused.
        """
        times = self.times(plan, schedule)
        if isinstance(self.measure, ReportingMeasure):
            return self.measure.reporting(plan, times, schedule, report)
        return self.measure(plan, times, schedule)

    def value(self, plan: Plan, schedule: Schedule | None = None) -> float:
        """The value; ValueError where a plan is refused, `MissesLimitError` where it misses a limit."""
        return _checked(self.judged(plan, schedule)).value

    def within(self, plan: Plan, limit: float, race: Race | None = None) -> Judged:
        """The figures of a plan that is only useful with a value below the limit.

        Args:
            race: predicts the steps of remaining batches from those seen; None: no prediction.

        Raises:
            PassedOverError: the value is known, or by the race likely, to be at least the limit before all
                batches are planned or all failures simulated.
            MissesLimitError: it misses a limit of its own.
            ValueError: it is refused.
        """

        def is_enough(step_s: float) -> bool:
            judged = self.measure(plan, StepTimes(step_s=step_s, batches_s=()), None)
            return bool(judged.misses) or judged.value >= limit

        if limit == inf:
            return _checked(self.judged(plan))
        if isinstance(self.measure, LimitedMeasure):
            return _checked(self.measure.within(plan, self.times(plan), limit))
        return _checked(self.measure(plan, self.times(plan, is_enough=is_enough, race=race), None))


def _checked(judged: Judged) -> Judged:
    if judged.misses:
        raise MissesLimitError(judged.misses, judged.value)
    return judged


def step_seconds(plan: Plan, times: StepTimes, schedule: Schedule | None) -> Judged:
    """Seconds of a step."""
    return Judged(value=times.step_s, times=times)


def rank_seconds(plan: Plan, times: StepTimes, schedule: Schedule | None) -> Judged:
    """Rank-seconds per sample, the inverse of samples per second and rank."""
    return Judged(value=times.step_s * len(plan.ranks) / len(plan.batch), times=times)
