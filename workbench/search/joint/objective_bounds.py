"""Lower bounds on the values of objectives other than the seconds of the job's own step."""

from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.search.joint.bounds import LowerBound, least_rank_s, lower_bound_s, no_bound
from workbench.search.joint.choice import Choice
from workbench.search.joint.least_work import even
from workbench.search.objectives.goodput import Goodput
from workbench.search.objectives.money import DollarsPerSample, TrainingDollars
from workbench.search.objectives.plan_judge import PlanJudge, rank_seconds, step_seconds
from workbench.search.objectives.step_times import OverBatches, summary
from workbench.units import S_PER_HOUR


def bound_for(judge: PlanJudge) -> LowerBound:
    """A lower bound for the judge's measure; `no_bound` if the measure is unknown here.

    Over several batches: the mean, quantile or maximum of their bounds, since each grows with every step,
    and planning only lengthens a step.

    Seconds: see `lower_bound_s`. Dollars and rank-seconds: a plan pays all its ranks for the whole step,
    which is at least each one's busy time, see `least_rank_s`. Goodput: see `_mean_ranks`.
    """
    measure = judge.measure
    if measure is step_seconds:
        return over_batches(judge, lower_bound_s)
    if measure is rank_seconds:
        return over_batches(
            judge, lambda job, cost, layout: least_rank_s(job, cost, layout, even) / len(job.batch)
        )
    if isinstance(measure, DollarsPerSample):
        return over_batches(judge, lambda job, cost, layout: _dollars(job, cost, layout) / len(job.batch))
    if isinstance(measure, TrainingDollars):
        num_steps = measure.num_steps
        return over_batches(judge, lambda job, cost, layout: num_steps * _dollars(job, cost, layout))
    if isinstance(measure, Goodput):
        return over_batches(
            judge,
            lambda job, cost, layout: (
                least_rank_s(job, cost, layout, even) / len(job.batch) / _mean_ranks(job, measure)
            ),
        )
    return no_bound


def over_batches(judge: PlanJudge, bound_of_batch: LowerBound) -> LowerBound:
    """Extend a bound for one batch to the statistic that the judge takes over all its batches."""
    times = judge.times
    if not isinstance(times, OverBatches):
        return bound_of_batch
    batches, over = times.batches, times.over

    def bound(job: Job, cost: CostModel, layout: Choice | None) -> float:
        return summary(
            [bound_of_batch(replace(job, batch=tuple(batch)), cost, layout) for batch in batches], over
        )

    return bound


def _dollars(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Lower bound on a step's dollars; each kind of device costs as much as its cheapest rank."""
    prices: dict[str, float] = {}
    for rank in range(job.cluster.num_ranks):
        device, price = job.cluster.device_of((rank,)), job.dollars_per_hour([rank]) or 0.0
        prices[device] = min(prices.get(device, price), price)
    return least_rank_s(job, cost, layout, lambda device: prices[device] / S_PER_HOUR)


def _mean_ranks(job: Job, goodput: Goodput) -> float:
    """Usable ranks present on average over all traces.

    However a job recovers, it never has more ranks than that, and a whole batch takes at least
    `least_rank_s` rank-seconds on any nodes; so no more samples count than these ranks could process.
    """
    largest = sorted((node.num_ranks for node in job.cluster.nodes), reverse=True)
    most = [float(min(job.usable_ranks, sum(largest[:count]))) for count in range(len(largest) + 1)]
    return goodput.mean_of(most)
