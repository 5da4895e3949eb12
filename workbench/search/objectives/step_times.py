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
"""The plan of another batch with a plan's stages, under its schedule; ValueError where there is none."""

TAIL = 0.95


class Over(StrEnum):
    """What is made of the steps of several batches."""

    MEAN = "mean"
    P95 = "p95"
    WORST = "worst"


class Planning(StrEnum):
    """Whether a step is planned beside the step before, or between the two."""

    HIDDEN = "hidden"
    CHARGED = "charged"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps of one plan.

    Args:
        step_s: what counts.
        batches_s: of every batch, planning included as it was asked for.
        planning_s: to plan a batch; None where nothing is planned anew.
        late: batches whose plan was not there when the step before had ended.
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
        """Of the mean; None of a single batch."""
        return standard_error(self.batches_s)


class PassedOverError(ValueError):
    """A plan that is known not to be better than what is held, before its value is."""

    def __init__(self) -> None:
        super().__init__("not better than what is held, as far as it was looked at")


def never(step_s: float) -> bool:
    """Every plan is looked at as a whole."""
    return False


class StepJudge(Protocol):
    """What says how long a plan's steps are."""

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
            schedule: of the plan, where it is not the job's.
            is_enough: whether a plan is passed over whose `step_s` is no less; it holds for all above.
            race: what steps of some batches say about those of others; None: nothing.

        Raises:
            ValueError: a batch has no plan on the stages, or one that does not fit.
            PassedOverError: `is_enough`, by some of the batches.
        """


def standard_error(values: Sequence[float]) -> float | None:
    """Of a mean of independent values; None of a single one."""
    return None if len(values) < 2 else statistics.stdev(values) / sqrt(len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """With straight lines between the values in order (Hyndman and Fan 1996, type 7).

    Example:
        >>> quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.95)
        4.8
    """
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low, high = ordered[floor(position)], ordered[ceil(position)]
    return low + (position - floor(position)) * (high - low)


def summary(values: Sequence[float], over: Over) -> float:
    """One figure of many."""
    if over is Over.MEAN:
        return statistics.fmean(values)
    return max(values) if over is Over.WORST else quantile(values, TAIL)


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """Steps of the batch that a plan was made for."""

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
    """Steps over the same batches for every plan, each planned anew on the plan's stages.

    Planning is timed: seconds of a plan and its checks, the median of the batches, since a clock beside
    other work is noisy. Hidden, planning goes on beside the step before, and a step takes as long as the
    longer of the two, as in the runtime; the batches go round, so the last one's step hides the first one's
    plan. Charged, every step has it on top.

    Args:
        batches: of as many samples as the job's, one at least.
        replan: the per-step part of a plan.
        seconds: simulates a step.
        over: what is made of the steps.
        planning: whether it is hidden.
        clock: seconds, for planning.
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
        took_s: list[float] = []
        steps_s: list[float] = []
        for number, batch in enumerate(self.batches, 1):
            start_s = self.clock()
            try:
                lowered, _ = accept(self.replan(plan, batch, schedule))
            except ValueError as error:
                raise ValueError(f"batch {number} of {len(self.batches)}: {error}") from None
            took_s.append(self.clock() - start_s)
            steps_s.append(self.seconds(lowered))
            if number < len(self.batches) and is_enough(self._least_s(steps_s, race)):
                raise PassedOverError
        planning_s = statistics.median_low(took_s)
        charged = self.planning is Planning.CHARGED
        batches_s = [step_s + planning_s if charged else max(step_s, planning_s) for step_s in steps_s]
        return StepTimes(
            step_s=summary(batches_s, self.over),
            batches_s=tuple(batches_s),
            planning_s=planning_s,
            late=0 if charged else sum(step_s < planning_s for step_s in steps_s),
        )

    def _least_s(self, seen_s: Sequence[float], race: Race | None) -> float:
        """What it comes to at least: planning only adds, and all three figures grow with every step."""
        others = [0.0] * (len(self.batches) - len(seen_s)) if race is None else race.others_s(seen_s)
        return summary([*seen_s, *others], self.over)
