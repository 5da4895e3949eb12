"""Accuracy of predictions: errors compared with spreads, sign, ranking. Plain numbers in and out."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from workbench.drift import Drifted, Run, drifted


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One plan's predicted time and its timed steps.

    Args:
        job: plans of one job are ranked against each other.
        executed_s: [steps] seconds, at least one.
        runs: the same steps run by run, each with the prediction valid then; empty: one valid for all.
    """

    job: str
    predicted_s: float
    executed_s: tuple[float, ...]
    runs: tuple[Run, ...] = ()

    @property
    def median_s(self) -> float:
        return float(statistics.median(self.executed_s))

    @property
    def drifted(self) -> Drifted:
        """Errors with and without drift."""
        return drifted(self.runs or (Run(self.predicted_s, self.executed_s),))

    @property
    def error(self) -> float:
        """Predicted over the executed median, minus 1."""
        return self.drifted.error

    @property
    def spread(self) -> float:
        """(Slowest - fastest) / median of the steps."""
        return (max(self.executed_s) - min(self.executed_s)) / self.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Statistics of the iteration-time errors of several plans.

    Args:
        mean_error: with its sign.
        spread: median over the plans.
        num_beyond: plans whose error is above both the limit and their own spread.
        num_too_slow: plans predicted slower than they ran.
        sign_p: probability that errors without a systematic sign fall at least as unevenly.
    """

    num_plans: int
    mean_abs_error: float
    mean_error: float
    worst_abs_error: float
    spread: float
    num_beyond: int
    num_too_slow: int
    sign_p: float


def accuracy(plans: Sequence[Timed], *, limit: float) -> Accuracy:
    """Compute the errors of all plans; ValueError for none."""
    if not plans:
        raise ValueError("accuracy: want at least one plan, got none")
    errors = [plan.error for plan in plans]
    return Accuracy(
        num_plans=len(plans),
        mean_abs_error=statistics.fmean(map(abs, errors)),
        mean_error=statistics.fmean(errors),
        worst_abs_error=max(map(abs, errors)),
        spread=statistics.median(plan.spread for plan in plans),
        num_beyond=sum(abs(plan.error) > max(limit, plan.spread) for plan in plans),
        num_too_slow=sum(error > 0 for error in errors),
        sign_p=sign_test(sum(error > 0 for error in errors), sum(error < 0 for error in errors)),
    )


def sign_test(num_positive: int, num_negative: int) -> float:
    """Two-sided sign test: probability of a split at least as uneven if both signs are equally likely.

    Source: Conover 1999, "Practical Nonparametric Statistics", section 3.4. Complexity: O(n).
    """
    if min(num_positive, num_negative) < 0:
        raise ValueError(f"sign test: want counts >= 0, got {num_positive} and {num_negative}")
    count, fewer = num_positive + num_negative, min(num_positive, num_negative)
    tail = sum(math.comb(count, k) for k in range(fewer + 1)) / 2.0**count
    return min(1.0, 2 * tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Rank statistics over all pairs of plans of one job.

    Args:
        kendall_tau: (pairs in the right order - pairs in the wrong one) / pairs; None without pairs.
        num_clear: pairs whose executed ranges do not overlap, so that a run can distinguish them.
        clear_tau: tau of those alone.
        regret: maximum over the jobs: executed time of the plan predicted fastest over that of the
            fastest, minus 1. None without pairs.
        mean_regret: mean over the jobs.
    """

    num_pairs: int
    kendall_tau: float | None
    num_clear: int
    clear_tau: float | None
    regret: float | None
    mean_regret: float | None


def ranking(plans: Sequence[Timed]) -> Ranking:
    """Kendall 1938, "A New Measure of Rank Correlation", tau-a, with pairs taken within jobs.

    Complexity: O(n^2).
    """
    signs, clear = [], []
    for first, second in combinations(plans, 2):
        if first.job != second.job:
            continue
        sign = _sign(first.predicted_s - second.predicted_s) * _sign(first.median_s - second.median_s)
        signs.append(sign)
        if _apart(first, second):
            clear.append(sign)
    regrets = job_regrets(plans)
    return Ranking(
        num_pairs=len(signs),
        kendall_tau=statistics.fmean(signs) if signs else None,
        num_clear=len(clear),
        clear_tau=statistics.fmean(clear) if clear else None,
        regret=max(regrets.values(), default=None),
        mean_regret=statistics.fmean(regrets.values()) if regrets else None,
    )


def job_regrets(plans: Sequence[Timed]) -> dict[str, float]:
    """Return job -> regret, for jobs of at least two plans; the first of equal predictions is chosen."""
    by_job: dict[str, list[Timed]] = {}
    for plan in plans:
        by_job.setdefault(plan.job, []).append(plan)
    return {
        job: min(group, key=lambda plan: plan.predicted_s).median_s / min(p.median_s for p in group) - 1
        for job, group in by_job.items()
        if len(group) > 1
    }


def _apart(first: Timed, second: Timed) -> bool:
    return max(first.executed_s) < min(second.executed_s) or max(second.executed_s) < min(first.executed_s)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
