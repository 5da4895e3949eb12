"""Dollars per sample, or of a whole training that may have a deadline."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.schedule.choice import Schedule
from workbench.search.objectives.plan_judge import Judged
from workbench.search.objectives.step_times import StepTimes
from workbench.units import S_PER_HOUR, duration_text


@dataclass(frozen=True, slots=True)
class DollarsPerSample:
    """Price of the ranks that a plan uses; idle ranks cost nothing."""

    job: Job

    def __call__(self, plan: Plan, times: StepTimes, schedule: Schedule | None) -> Judged:
        dollars = dollars_per_s(self.job, plan) * times.step_s / len(plan.batch)
        return Judged(value=dollars, times=times, figures={"dollars_per_sample": dollars})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDollars:
    """Price of a training, on the ranks that a plan uses.

    Args:
        num_steps: of the training.
        deadline_s: maximum duration; None: unlimited.

    Raises:
        ValueError: no step, or a deadline that is not positive.
    """

    job: Job
    num_steps: int
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"dollars of a training: want >= 1 step, got {self.num_steps}")
        if self.deadline_s is not None and not (isfinite(self.deadline_s) and self.deadline_s > 0):
            raise ValueError(f"deadline: want > 0 s, got {self.deadline_s}")

    def __call__(self, plan: Plan, times: StepTimes, schedule: Schedule | None) -> Judged:
        """Dollars; if the plan misses the deadline, the duration, so that sooner is nearer."""
        training_s = self.num_steps * times.step_s
        dollars = dollars_per_s(self.job, plan) * training_s
        figures = {
            "training_s": training_s,
            "dollars": dollars,
            "idle_gpus": self.job.cluster.num_ranks - len(plan.ranks),
        }
        if self.deadline_s is None or training_s <= self.deadline_s:
            return Judged(value=dollars, times=times, figures=figures)
        misses = (
            f"{self.num_steps:,} steps take {_longer_text(training_s, self.deadline_s)} and {dollars:,.2f} "
            f"dollars, the deadline is {duration_text(self.deadline_s)}"
        )
        return Judged(value=training_s, times=times, figures=figures, misses=misses)


def _longer_text(training_s: float, deadline_s: float) -> str:
    """A duration that differs from the deadline in text, even where both round to the same."""
    text, deadline = duration_text(training_s), duration_text(deadline_s)
    return text if text != deadline else f"{duration_text(training_s - deadline_s)} more than {deadline}"


def dollars_per_s(job: Job, plan: Plan) -> float:
    """Price of the plan's ranks per second.

    Raises:
        ValueError: a rank has no price.
    """
    per_hour = job.dollars_per_hour(plan.ranks)
    if per_hour is None:
        raise ValueError(
            f"job {job.name!r}: dollars want cluster.dollars_per_gpu_hour, or cluster.pools, each with "
            "dollars_per_hour"
        )
    return per_hour / S_PER_HOUR


def steps_for(num_tokens: float, batches: Sequence[Sequence[Sample]]) -> int:
    """Optimizer steps until `num_tokens` of the LLM's sequence are consumed, at the mean of the batches.

    Raises:
        ValueError: no tokens.
    """
    if not (isfinite(num_tokens) and num_tokens > 0):
        raise ValueError(f"tokens of a training: want > 0 and finite, got {num_tokens}")
    total = sum(sample.num_tokens for batch in batches for sample in batch)
    return ceil(num_tokens * len(batches) / total)
