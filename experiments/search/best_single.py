"""Every registered strategy with the search space of its own paper, each as long as the joint search."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from workbench.cost.model import CostModel
from workbench.job.device_pools import check_taken
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.own_spaces import OWN_SPACES, Draws

NEAR_SHARE = 0.6  # of the draws: next to the best so far
REPEATED = 50  # draws one after the other that were tried before: the space counts as searched
ONE_PLAN_SHARE = 0.5  # of the budget that a planner may take for a drawn job


class Values(Protocol):
    """The judge of all plans."""

    def value(self, plan: Plan) -> float:
        """The value of a plan, to be minimised; ValueError where the plan is refused."""


class OutOfTime(Exception):  # noqa: N818  (no error: it stops the planner)
    """A planner's own search was stopped."""


def stopper(end_s: float, clock: Callable[[], float]) -> Progress:
    """A progress callback that stops a planner at a time, between two of its candidates."""

    def report(done: int, total: int, best_s: float) -> None:
        if clock() > end_s:
            raise OutOfTime

    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBest:
    """The result of one strategy's own search.

    Args:
        strategy: its name.
        value: of the best plan; None: there is none.
        plan: the best plan.
        unsearched: the value of its plan for the unchanged job; None where there is none.
        tried: number of jobs that were planned.
        planned: number of accepted plans.
        refusal: the reason of the last refused plan.
        seconds: duration of the search.
    """

    strategy: str
    value: float | None
    plan: Plan | None
    unsearched: float | None
    tried: int
    planned: int
    refusal: str
    seconds: float


def own_searches(
    job: Job,
    cost: CostModel,
    judge: Values,
    planners: Mapping[str, Planner],
    *,
    budget_s: float,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OwnBest]:
    """Yield the results of all strategies' searches, each with the whole budget or its whole space.

    The plan of the unchanged job comes first, and may take all of the time.

    Args:
        job: with open layouts.
        judge: of all plans, as in the joint search.
        budget_s: for every strategy.
        seed: of the draws.
    """
    for name, planner in planners.items():
        search = _OwnSearch(name, planner, cost, judge, budget_s=budget_s, clock=clock)
        yield search.best_of(job, random.Random(f"{seed} {name}"))


def best_of(results: Mapping[str, OwnBest]) -> OwnBest:
    """The best strategy's result; ValueError where no strategy has a plan."""
    planned = [result for result in results.values() if result.value is not None]
    if not planned:
        raise ValueError(f"no strategy has a plan; the first: {next(iter(results.values())).refusal}")
    return min(planned, key=lambda result: result.value or 0.0)


class _OwnSearch:
    """One strategy's search: the unchanged job, then drawn jobs, most of them next to the best."""

    def __init__(
        self,
        name: str,
        planner: Planner,
        cost: CostModel,
        judge: Values,
        *,
        budget_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._planner, self._cost, self._judge = name, planner, cost, judge
        self._clock, self._start_s, self._budget_s = clock, clock(), budget_s
        self._best: tuple[float, Plan, Job] | None = None
        self._seen: set[str] = set()
        self._planned = 0
        self._refusal = ""

    def best_of(self, job: Job, rng: random.Random) -> OwnBest:
        draws = Draws(job, OWN_SPACES[self._name])
        unsearched = self._tried(job, self._stopper(1.0))
        repeated = 0
        while repeated < REPEATED and self._clock() - self._start_s < self._budget_s:
            job_draw = self._drawn(draws, rng)
            if job_draw is None or repr(_varied(job_draw)) in self._seen:
                repeated += 1
                continue
            repeated = 0
            self._tried(job_draw, self._stopper(ONE_PLAN_SHARE))
        return OwnBest(
            strategy=self._name,
            value=None if self._best is None else self._best[0],
            plan=None if self._best is None else self._best[1],
            unsearched=unsearched,
            tried=len(self._seen),
            planned=self._planned,
            refusal=self._refusal,
            seconds=self._clock() - self._start_s,
        )

    def _drawn(self, draws: Draws, rng: random.Random) -> Job | None:
        """A drawn job; None where layouts and batch do not fit together."""
        try:
            if self._best is not None and rng.random() < NEAR_SHARE:
                return draws.near(self._best[2], rng)
            return draws.fresh(rng)
        except ValueError as error:
            self._refusal = str(error)
            return None

    def _tried(self, job: Job, progress: Progress) -> float | None:
        self._seen.add(repr(_varied(job)))
        try:
            plan = self._planner(job, self._cost, progress)
            for stage in plan.stages:
                check_taken(job.pools, stage.module, stage.flat_ranks)
            value = self._judge.value(plan)
        except ValueError as error:
            self._refusal = str(error)
            return None
        except OutOfTime:
            self._refusal = f"one plan takes more than its part of {self._budget_s:g} s"
            return None
        self._planned += 1
        if self._best is None or value < self._best[0]:
            self._best = value, plan, job
        return value

    def _stopper(self, share: float) -> Progress:
        """A progress callback that stops a planner after a share of the time."""
        return stopper(self._clock() + share * self._budget_s, self._clock)


def _varied(job: Job) -> tuple[object, ...]:
    """The job with what the draws change."""
    return job.layouts, job.replicas, job.microbatch_samples, job.schedule, job.settings.modules
