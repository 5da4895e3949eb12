"""Seconds of a plan's step: on the job's own batch, or over several batches drawn from its data."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor, sqrt
from typing import Protocol

from workbench.data.sample import Sample
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule
from workbench.search.objectives.race import Race
from workbench.timing.accept import accept, judged

Replan = Callable[[Plan, Sequence[Sample], Schedule | None], Plan]
"""Plans another batch on a plan's stages, under its schedule; ValueError where there is no plan."""

TAIL = 0.95


class Over(StrEnum):
    """Statistic of the steps of several batches."""

    MEAN = "mean"
    P95 = "p95"
    WORST = "worst"


class Planning(StrEnum):
    """Whether a step is planned during the step before, or between the two."""

    HIDDEN = "hidden"
    CHARGED = "charged"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Durations of a plan's steps.

    Args:
        step_s: the statistic that is judged.
        batches_s: of every batch, with planning as chosen.
        planning_s: to plan a batch; None if nothing is planned anew.
        late: batches whose plan was not ready when the step before ended.
    """

    step_s: float
    batches_s: tuple[float, ...]
    planning_s: float | None = None
    late: int = 0

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.batches_s)

    @property
    def standard_error_s(self) -> float | None:
        """Standard error of the mean; None for a single batch."""
        return standard_error(self.batches_s)


class PassedOverError(ValueError):
    """A plan is known not to be better than the incumbents, before its exact value is."""

    def __init__(self) -> None:
        super().__init__("not better than what is held, as far as it was looked at")


def never(step_s: float) -> bool:
    """Evaluate every plan in full."""
    return False


class StepJudge(Protocol):
    """Times a plan's steps."""

    def __call__(
        self,
        plan: Plan,
        schedule: Schedule | None = None,
        *,
        is_enough: Callable[[float], bool] = never,
        race: Race | None = None,
    ) -> StepTimes:
        """All steps of a plan.

        Args:
            schedule: the plan's, if it is not the job's.
            is_enough: whether a plan with at least this `step_s` can be skipped; monotonic.
            race: predicts the steps of remaining batches from those seen; None: no prediction.

        Raises:
            ValueError: a batch has no plan on the stages, or one that does not fit.
            PassedOverError: `is_enough` holds after some of the batches.
        """


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of a mean of independent values; None for a single one."""
    return None if len(values) < 2 else statistics.stdev(values) / sqrt(len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile with linear interpolation between the ordered values (Hyndman and Fan 1996, type 7).

    Example:
        >>> quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.95)
        4.8
    """
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low, high = ordered[floor(position)], ordered[ceil(position)]
    return low + (position - floor(position)) * (high - low)


def summary(values: Sequence[float], over: Over) -> float:
    """The chosen statistic of some values."""
    if over is Over.MEAN:
        return statistics.fmean(values)
    return max(values) if over is Over.WORST else quantile(values, TAIL)


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """The step on the batch that a plan was made for."""

    seconds: Callable[[Lowered], float]

    def __call__(
        self,
        plan: Plan,
        schedule: Schedule | None = None,
        *,
        is_enough: Callable[[float], bool] = never,
        race: Race | None = None,
    ) -> StepTimes:
        lowered, _ = judged(plan)
        step_s = self.seconds(lowered)
        return StepTimes(step_s=step_s, batches_s=(step_s,))


@dataclass(frozen=True, kw_only=True)
class OverBatches:
    """Steps on the same batches for every plan, each batch planned anew on the plan's stages.

    Planning is timed: seconds of a plan and its checks, the median over batches, since clocks are noisy
    beside other work. Hidden, planning overlaps the step before, and a step takes as long as the longer of
    the two, as in the runtime; batches are cyclic, so the last one's step hides the first one's planning.
    Charged, planning is added to every step.

    Args:
        batches: of as many samples as the job's, at least one.
        replan: the per-step part of a plan.
        seconds: simulates a step.
        over: statistic of the steps.
        planning: whether planning is hidden.
        clock: measures planning, in seconds.
    """

    batches: Sequence[Sequence[Sample]]
    replan: Replan
    seconds: Callable[[Lowered], float]
    over: Over
    planning: Planning
    clock: Callable[[], float]

    def __call__(
        self,
        plan: Plan,
        schedule: Schedule | None = None,
        *,
        is_enough: Callable[[float], bool] = never,
        race: Race | None = None,
    ) -> StepTimes:
        planning_times_s: list[float] = []
        steps_s: list[float] = []
        for number, batch in enumerate(self.batches, 1):
            start_s = self.clock()
            try:
                lowered, _ = accept(self.replan(plan, batch, schedule))
            except ValueError as error:
                raise ValueError(f"batch {number} of {len(self.batches)}: {error}") from None
            planning_times_s.append(self.clock() - start_s)
            steps_s.append(self.seconds(lowered))
            if number < len(self.batches) and is_enough(self._least_s(steps_s, race)):
                raise PassedOverError
        planning_s = statistics.median_low(planning_times_s)
        charged = self.planning is Planning.CHARGED
        batches_s = [step_s + planning_s if charged else max(step_s, planning_s) for step_s in steps_s]
        return StepTimes(
            step_s=summary(batches_s, self.over),
            batches_s=tuple(batches_s),
            planning_s=planning_s,
            late=0 if charged else sum(step_s < planning_s for step_s in steps_s),
        )

    def _least_s(self, seen_s: Sequence[float], race: Race | None) -> float:
        """Lower bound on the statistic: planning only adds, and all three statistics grow with every step."""
        others = [0.0] * (len(self.batches) - len(seen_s)) if race is None else race.others_s(seen_s)
        return summary([*seen_s, *others], self.over)
