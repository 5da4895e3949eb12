"""The cheapest orchestration: dollars of a sample on GPUs that are paid by the hour."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from operator import attrgetter

from workbench.balance.orchestration.exact import (
    CHEAPEST,
    Option,
    front,
    judged,
    options_of,
    paces,
    suffices,
    why_nothing_fits,
    worth_it,
)
from workbench.balance.orchestration.task import Orchestration, Task, Unit
from workbench.units import S_PER_HOUR

_STAGE_S = attrgetter("stage_s")


def dollars_per_sample(task: Task, found: Orchestration) -> float:
    """GPUs that are taken, for as long as an iteration; those left over cost nothing."""
    rates = (
        task.pool(unit).dollars_per_hour * degrees.num_gpus
        for unit, degrees in zip(task.units, found.degrees, strict=True)
    )
    return sum(rates) / S_PER_HOUR * found.iteration_s / task.batch_samples


def orchestrate_cheapest(task: Task) -> Orchestration:
    """The integers that cost the fewest dollars a sample, exactly.

    Ours, for DistTrain, section 8, which names reduced cost as a goal of heterogeneous hardware and
    gives no algorithm. Thresholds of the slowest stage are tried one after the other; under one of
    them a unit offers the options that no other beats in GPUs and in what is paid once. The optimum's
    own slowest stage is among the thresholds, and options that beat its own make it neither slower nor
    dearer. A threshold is left out when the least time and the fewest GPUs of its options, though they
    are not the same options', cost more than the best found. Ties: the lower threshold.

    Args:
        task: with dollars per hour in its pools.

    Raises:
        ValueError: GPUs without a price, or nothing fits.

    Complexity: O(D T U) for D degrees of the pacing unit, T thresholds and the product U of what units
    offer under one.
    """
    if min((task.pool(unit).dollars_per_hour for unit in task.units), default=0.0) <= 0:
        raise ValueError("the cheapest orchestration wants dollars_per_hour > 0 for the pool of every unit")
    best: Orchestration | None = None
    least = inf
    for at_least, pace in sorted((_at_least_dollars(task, pace), pace) for pace in paces(task)):
        if at_least > least:
            break
        for found in _of_pace(task, pace, least):
            dollars = dollars_per_sample(task, found)
            if dollars < least * (1 - CHEAPEST):
                best, least = found, dollars
    if best is None:
        raise ValueError(why_nothing_fits(task))
    return best


def _at_least_dollars(task: Task, pace: int) -> float:
    """No orchestration with that degree costs less: GPUs that never wait still do all the work.

    GPUs x slowest stage is at least tp x seconds of every unit.
    """
    samples = pace * task.microbatch_samples
    num_rounds = task.batch_samples // samples

    def of_unit(unit: Unit) -> float:
        work_s = min(tp * seconds for tp, seconds in unit.sample_s) * samples
        return task.pool(unit).dollars_per_hour * work_s * (num_rounds - 1)

    return sum(map(of_unit, task.units)) / S_PER_HOUR / task.batch_samples


def _of_pace(task: Task, pace: int, limit: float) -> Iterator[Orchestration]:
    """Candidates for one degree of the pacing unit: of each threshold the cheapest, below a limit."""
    num_rounds = task.batch_samples // (pace * task.microbatch_samples)
    limit *= S_PER_HOUR * task.batch_samples
    prices = [task.pool(unit).dollars_per_hour for unit in task.units]
    options = [worth_it(options_of(task, unit, pace)) for unit in task.units]
    if not all(options):
        return
    first_s = max(of_unit[0].stage_s for of_unit in options)
    for threshold_s in sorted({o.stage_s for of_unit in options for o in of_unit if o.stage_s >= first_s}):
        fronts = [front(of_unit[: bisect_right(of_unit, threshold_s, key=_STAGE_S)]) for of_unit in options]
        steady_s = threshold_s * (num_rounds - 1)
        least_s = steady_s + sum(of_unit[-1].once_s for of_unit in fronts)
        rate = sum(price * of_unit[0].num_gpus for price, of_unit in zip(prices, fronts, strict=True))
        if rate * least_s > limit:
            continue
        cheapest = _cheapest(task, prices, fronts, steady_s)
        if cheapest is not None:
            limit = min(limit, cheapest[0])
            yield judged(task, pace, cheapest[1])


def _cheapest(
    task: Task, prices: Sequence[float], fronts: Sequence[Sequence[Option]], steady_s: float
) -> tuple[float, tuple[Option, ...]] | None:
    """One option of each unit with the least seconds x dollars an hour, stages as slow as the threshold."""
    best: tuple[float, tuple[Option, ...]] | None = None
    for chosen in product(*fronts):
        iteration_s = sum(option.once_s for option in chosen) + steady_s
        rate = sum(price * option.num_gpus for price, option in zip(prices, chosen, strict=True))
        if best is not None and rate * iteration_s >= best[0]:
            continue
        if suffices(task, [option.num_gpus for option in chosen]):
            best = rate * iteration_s, chosen
    return best
