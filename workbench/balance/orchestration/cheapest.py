"""The cheapest orchestration: dollars per sample on GPUs that are paid by the hour."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

from workbench.balance.orchestration.exact import (
    CHEAPEST,
    Option,
    evaluated,
    fronts_under,
    options_of,
    paces,
    suffices,
    why_nothing_fits,
    worth_it,
)
from workbench.balance.orchestration.task import Orchestration, Task, Unit
from workbench.float_sum import float_sum
from workbench.units import S_PER_HOUR


def dollars_per_sample(task: Task, orchestration: Orchestration) -> float:
    """Return the price of the GPUs in use during an iteration, per sample; unused GPUs cost nothing."""
    rates = (
        task.pool(unit).dollars_per_hour * degrees.num_gpus
        for unit, degrees in zip(task.units, orchestration.degrees, strict=True)
    )
    return float_sum(rates) / S_PER_HOUR * orchestration.iteration_s / task.batch_samples


def orchestrate_cheapest(task: Task) -> Orchestration:
    """Return the degrees that cost the fewest dollars per sample, exactly.

    Ours, for DistTrain, section 8, which names reduced cost as a goal of heterogeneous hardware and
    gives no algorithm. Thresholds of the slowest stage are tried one after the other; under one of
    them a unit offers its Pareto front of GPUs and one-time seconds. The optimum's own slowest stage is
    among the thresholds, and options that beat its own make it neither slower nor dearer. A threshold is
    skipped if the least time and the fewest GPUs of its options, even if of different options, cost more
    than the best so far. Ties: the lower threshold.

    Args:
        task: with dollars per hour in its pools.

    Raises:
        ValueError: GPUs without a price, or nothing fits.

    Complexity: O(D T U) for D degrees of the pacing unit, T thresholds and the product U of what units
    offer under one.
    """
    if min((task.pool(unit).dollars_per_hour for unit in task.units), default=0.0) <= 0:
        raise ValueError("the cheapest orchestration needs dollars_per_hour > 0 for the pool of every unit")
    best: Orchestration | None = None
    least = inf
    for at_least, pace in sorted((_at_least_dollars(task, pace), pace) for pace in paces(task)):
        if at_least > least:
            break
        for candidate in _candidates(task, pace, least):
            dollars = dollars_per_sample(task, candidate)
            if dollars < least * (1 - CHEAPEST):
                best, least = candidate, dollars
    if best is None:
        raise ValueError(why_nothing_fits(task))
    return best


def _at_least_dollars(task: Task, pace: int) -> float:
    """Return a lower bound of the cost with that degree: GPUs that never wait still do all the work.

    GPUs x slowest stage is at least tp x seconds of every unit.
    """
    samples = pace * task.microbatch_samples
    num_rounds = task.batch_samples // samples

    def of_unit(unit: Unit) -> float:
        work_s = min(tp * seconds for tp, seconds in unit.sample_s) * samples
        return task.pool(unit).dollars_per_hour * work_s * (num_rounds - 1)

    return float_sum(map(of_unit, task.units)) / S_PER_HOUR / task.batch_samples


def _candidates(task: Task, pace: int, limit: float) -> Iterator[Orchestration]:
    """Yield candidates for one degree of the pacing unit: the cheapest of each threshold, below a limit."""
    num_rounds = task.batch_samples // (pace * task.microbatch_samples)
    limit *= S_PER_HOUR * task.batch_samples
    prices = [task.pool(unit).dollars_per_hour for unit in task.units]
    options = [worth_it(options_of(task, unit, pace)) for unit in task.units]
    if not all(options):
        return
    first_s = max(unit_options[0].stage_s for unit_options in options)
    stages_s = {option.stage_s for unit_options in options for option in unit_options}
    for threshold_s in sorted(seconds for seconds in stages_s if seconds >= first_s):
        fronts = fronts_under(options, threshold_s)
        steady_s = threshold_s * (num_rounds - 1)
        least_s = steady_s + float_sum(unit_options[-1].once_s for unit_options in fronts)
        rate = float_sum(
            price * unit_options[0].num_gpus for price, unit_options in zip(prices, fronts, strict=True)
        )
        if rate * least_s > limit:
            continue
        cheapest = _cheapest(task, prices, fronts, steady_s)
        if cheapest is not None:
            limit = min(limit, cheapest[0])
            yield evaluated(task, pace, cheapest[1])


def _cheapest(
    task: Task, prices: Sequence[float], fronts: Sequence[Sequence[Option]], steady_s: float
) -> tuple[float, tuple[Option, ...]] | None:
    """Return the options with the least seconds x dollars per hour, stages as slow as the threshold."""
    best: tuple[float, tuple[Option, ...]] | None = None
    for chosen in product(*fronts):
        iteration_s = float_sum(option.once_s for option in chosen) + steady_s
        rate = float_sum(price * option.num_gpus for price, option in zip(prices, chosen, strict=True))
        if best is not None and rate * iteration_s >= best[0]:
            continue
        if suffices(task, [option.num_gpus for option in chosen]):
            best = rate * iteration_s, chosen
    return best
