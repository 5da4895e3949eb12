"""What no plan of a job beats by other objectives than the seconds of its own step."""

from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.planner.layout_search import usable_ranks
from workbench.search.joint.bounds import LowerBound, least_rank_s, lower_bound_s, no_bound
from workbench.search.joint.choice import Choice
from workbench.search.joint.least_work import even
from workbench.search.objectives.goodput import Goodput
from workbench.search.objectives.money import DollarsPerSample, TrainingDollars
from workbench.search.objectives.plan_judge import PlanJudge, rank_seconds, step_seconds
from workbench.search.objectives.step_times import OverBatches, summary
from workbench.units import S_PER_HOUR


def bound_for(judge: PlanJudge) -> LowerBound:
    """A bound of the judge's values; `no_bound` for a measure that is not known here.

    Over several batches the mean, the quantile or the worst of their bounds: each of these grows with every
    step, and a step with its planning is no shorter than without.

    Seconds: see `lower_bound_s`. Dollars and seconds of ranks: a plan pays all ranks for the whole step,
    which is no less than what each is busy, see `least_rank_s`. Goodput: see `_most_useful`.
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


def over_batches(judge: PlanJudge, one: LowerBound) -> LowerBound:
    """A bound of one batch as one of what the judge makes of all its batches."""
    times = judge.times
    if not isinstance(times, OverBatches):
        return one
    batches, over = times.batches, times.over

    def bound(job: Job, cost: CostModel, layout: Choice | None) -> float:
        return summary([one(replace(job, batch=tuple(batch)), cost, layout) for batch in batches], over)

    return bound


def _dollars(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Of a step; a device costs what the cheapest of its kind does."""
    prices: dict[str, float] = {}
    for rank in range(job.cluster.num_ranks):
        device, price = job.cluster.device_of((rank,)), job.dollars_per_hour([rank]) or 0.0
        prices[device] = min(prices.get(device, price), price)
    return least_rank_s(job, cost, layout, lambda device: prices[device] / S_PER_HOUR)


def _mean_ranks(job: Job, goodput: Goodput) -> float:
    """Ranks that are there in the mean of all traces, of those that may be used.

    A job has no more of them at any time, however it goes on, and a whole batch on any nodes takes its ranks
    together no less than `least_rank_s`; so no more samples count than in that time on these.
    """
    largest = sorted((node.num_ranks for node in job.cluster.nodes), reverse=True)
    most = [float(min(usable_ranks(job), sum(largest[:count]))) for count in range(len(largest) + 1)]
    return goodput.mean_of(most)
