"""GPUs and tensor-, data- and pipeline-parallel degrees of every unit of a multimodal model, by a formula."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from workbench.balance.orchestration.task import Cut, Degrees, Orchestration, Pool, Task, Unit
from workbench.float_sum import float_sum
from workbench.units import gib_text

CHEAPEST = 1e-12  # relative: objectives this near count as equal, and fewer GPUs win


def evaluate(task: Task, degrees: Sequence[Degrees]) -> Orchestration:
    """Evaluate the formula: the first microbatch, then the slowest stage per further one, then gradients.

    Source: DistTrain, section 4.2, Eq. 1 and 2, with forward and backward together, "communication
    time of DP" as volume over bandwidth; section 4.3 for virtual stages. The source does not say how
    the units' reductions combine: here one after the other. ValueError where a degree does not
    divide or memory does not suffice.
    """
    pace = degrees[_pacing(task)].dp
    options_chosen = []
    for unit, chosen in zip(task.units, degrees, strict=True):
        options = [o for o in options_of(task, unit, pace) if o.degrees == chosen]
        if not options:
            raise ValueError(f"unit {unit.name!r}: {chosen} does not divide the batch or does not fit")
        options_chosen.append(options[0])
    return evaluated(task, pace, options_chosen)


def orchestrate(task: Task) -> Orchestration:
    """Return the best degrees, exactly.

    Ours: for a given data-parallel degree of the pacing unit, units meet only in the sum of GPUs, the
    sum of one-time seconds (warm-ups and reductions) and the slowest stage. Thresholds of the slowest
    stage are tried from the least feasible one upwards, until the threshold alone costs more than the
    best found; under one threshold every unit offers its Pareto front of GPUs and one-time seconds.
    Of equal objectives the fewest GPUs win (section 7.1: more bring nothing).

    Raises:
        ValueError: nothing fits, naming the unit that does not fit alone or the GPUs it would take.

    Complexity: O(D T U) for D degrees, T thresholds tried (few, since steady time rules) and the
    product U of what units offer. Degrees whose lower bound, all GPUs busy all the time, is above
    the best found are skipped.
    """
    best: Orchestration | None = None
    for at_least_s, pace in sorted((_lower_bound_s(task, pace), pace) for pace in paces(task)):
        limit_s = inf if best is None else best.iteration_s * (1 + CHEAPEST)
        if at_least_s > limit_s:
            break
        for candidate in _candidates(task, pace, limit_s):
            if best is None or is_better(candidate, best):
                best = candidate
    if best is None:
        raise ValueError(why_nothing_fits(task))
    return best


def best_of_every_pace(task: Task) -> tuple[Orchestration, ...]:
    """Return the best degrees for each degree of the pacing unit that has any, fastest first."""
    results: list[Orchestration] = []
    for pace in paces(task):
        best: Orchestration | None = None
        for candidate in _candidates(task, pace, inf):
            if best is None or is_better(candidate, best):
                best = candidate
        results += [] if best is None else [best]
    return tuple(sorted(results, key=lambda result: (result.iteration_s, result.num_gpus)))


class Option(NamedTuple):
    """Degrees of one unit with the seconds of a stage and the one-time seconds; sorted by its fields."""

    stage_s: float
    num_gpus: int
    once_s: float  # a first microbatch, the reduction and the update
    tp: int
    dp: int
    pp: int

    reduction_s: float  # with the update

    @property
    def degrees(self) -> Degrees:
        return Degrees(tp=self.tp, dp=self.dp, pp=self.pp)


_STAGE_S = attrgetter("stage_s")


def paces(task: Task) -> tuple[int, ...]:
    """Return possible data-parallel degrees of the pacing unit: divisors of the number of microbatches."""
    num = task.batch_samples // task.microbatch_samples
    most = min(num, task.pool(task.units[_pacing(task)]).num_gpus)
    return tuple(dp for dp in range(1, most + 1) if num % dp == 0)


def options_of(task: Task, unit: Unit, pace: int) -> Iterator[Option]:
    """Yield every degree of a unit that divides and fits, at that many parallel microbatches."""
    samples = pace * task.microbatch_samples  # of one round, over all replicas of the unit
    pool = task.pool(unit)
    most = min(pool.num_gpus, unit.max_gpus or pool.num_gpus)
    dps = (pace,) if unit.name == task.pacing else [dp for dp in range(1, samples + 1) if samples % dp == 0]
    reduced_s = unit.reduction_bytes / pool.gpu_bytes_per_s
    for (tp, sample_s), dp in product(unit.sample_s, dps):
        through_s = samples / dp * sample_s
        for pp in range(_least_pp(pool, unit, tp, dp, samples // dp), unit.num_layers + 1):
            gpus = tp * dp * pp
            if gpus > most:
                break
            reduction_s = reduced_s * (dp - 1) / gpus  # a GPU holds 1 / (tp pp), its peers are dp - 1 of dp
            reduction_s += unit.updated_s(tp, dp, pp)
            once_s = through_s / task.virtual_stages + reduction_s
            stage_s = through_s / pp
            if task.cut is Cut.LAYERS:
                stage_s = through_s * ceil(unit.num_layers / pp) / unit.num_layers
            yield Option(stage_s, gpus, once_s, tp, dp, pp, reduction_s)


def _least_pp(pool: Pool, unit: Unit, tp: int, dp: int, samples: int) -> int:
    """Return the fewest stages with which weights, sharded optimizer and 1F1B activations fit on a GPU.

    Source: DistTrain, section 4.2, constraints: P/(pp tp) + S/(pp tp dp) + L/tp, since the first of pp
    stages holds pp microbatches of a pp-th of the activations; and one more for every stage of later units.
    """
    activations = unit.activation_bytes * samples / tp
    room = pool.gpu_bytes - activations
    state = unit.weight_bytes / tp + unit.optimizer_bytes / (tp * dp)
    state += activations * unit.stages_behind
    if room <= 0:
        return unit.num_layers + 1
    return max(1, ceil(state / room * (1 - 1e-12)))


def _lower_bound_s(task: Task, pace: int) -> float:
    """Return a lower bound of the seconds with that degree: a pool's GPUs share its work without a gap.

    GPUs x slowest stage is at least the work of the pool's units, tp x seconds each, whatever their dp
    and pp; and a unit's first microbatch has at least one sample.
    """
    samples = pace * task.microbatch_samples
    num_rounds = task.batch_samples // samples

    def of_unit(unit: Unit, busy: Pool) -> float:
        first = task.microbatch_samples if unit.name == task.pacing else 1
        shared = samples / busy.num_gpus * (num_rounds - 1) if task.pool(unit) == busy else 0.0
        return min(seconds * (first / task.virtual_stages + tp * shared) for tp, seconds in unit.sample_s)

    pools = dict.fromkeys(task.pool(unit) for unit in task.units)
    return max(float_sum(of_unit(unit, busy) for unit in task.units) for busy in pools)


def _candidates(task: Task, pace: int, limit_s: float) -> Iterator[Orchestration]:
    """Yield candidates for one degree of the pacing unit, one per useful threshold."""
    num_rounds = task.batch_samples // (pace * task.microbatch_samples)
    options = [worth_it(options_of(task, unit, pace)) for unit in task.units]
    if not all(options):
        return
    thresholds = sorted({option.stage_s for unit_options in options for option in unit_options})
    least_once_s = float_sum(min(option.once_s for option in unit_options) for unit_options in options)
    for threshold_s in thresholds[_first_feasible(task, options, thresholds) :]:
        if least_once_s + threshold_s * (num_rounds - 1) > limit_s:
            return
        candidate = _least_once(task, pace, fronts_under(options, threshold_s))
        if candidate is not None:
            limit_s = min(limit_s, candidate.iteration_s * (1 + CHEAPEST))
            yield candidate


def worth_it(options: Iterable[Option]) -> list[Option]:
    """Return, by stage time, options that none with as few GPUs beats in stage time and one-time seconds."""
    kept: list[Option] = []
    gpus: list[int] = []  # a staircase of those kept: more GPUs, fewer one-time seconds
    onces_s: list[float] = []
    for option in sorted(options):
        index = bisect_right(gpus, option.num_gpus)
        if index and onces_s[index - 1] <= option.once_s:
            continue
        kept.append(option)
        end = index
        while end < len(gpus) and onces_s[end] >= option.once_s:
            end += 1
        start = index - 1 if index and gpus[index - 1] == option.num_gpus else index
        gpus[start:end] = [option.num_gpus]
        onces_s[start:end] = [option.once_s]
    return kept


def _first_feasible(task: Task, options: Sequence[Sequence[Option]], thresholds: Sequence[float]) -> int:
    """Return the index of the least threshold under which the GPUs suffice."""
    fewest = [list(accumulate((o.num_gpus for o in unit_options), min)) for unit_options in options]

    def suffice(threshold_s: float) -> bool:
        counts = [bisect_right(unit_options, threshold_s, key=_STAGE_S) for unit_options in options]
        if not all(counts):
            return False
        return suffices(task, [unit_options[n - 1] for unit_options, n in zip(fewest, counts, strict=True)])

    return bisect_left(thresholds, True, key=suffice)  # noqa: FBT003  (the value to find)


def suffices(task: Task, gpus: Sequence[int]) -> bool:
    """Whether every pool has the GPUs that its units use."""
    used: dict[str, int] = {}
    for unit, num_gpus in zip(task.units, gpus, strict=True):
        used[unit.pool] = used.get(unit.pool, 0) + num_gpus
    available = {unit.pool: task.pool(unit).num_gpus for unit in task.units}
    return all(num_gpus <= available[pool] for pool, num_gpus in used.items())


def fronts_under(options: Sequence[Sequence[Option]], threshold_s: float) -> list[list[Option]]:
    """Return each unit's Pareto front among its options, sorted by stage time, up to a threshold."""
    ends = [bisect_right(unit_options, threshold_s, key=_STAGE_S) for unit_options in options]
    return [_front(unit_options[:end]) for unit_options, end in zip(options, ends, strict=True)]


def _front(options: Sequence[Option]) -> list[Option]:
    """Return the Pareto front of GPUs and one-time seconds; ties go to the faster stage."""
    front: list[Option] = []
    for option in sorted(options, key=lambda o: (o.num_gpus, o.once_s, o.stage_s)):
        if not front or option.once_s < front[-1].once_s:
            front.append(option)
    return front


def _least_once(task: Task, pace: int, fronts: Sequence[Sequence[Option]]) -> Orchestration | None:
    """Return the options with the fewest one-time seconds on the available GPUs; of equals, the fewest GPUs.

    Their stages need not be as slow as the threshold: faster ones are also found under a lower threshold.
    The last unit needs no loop: the most remaining GPUs give its shortest time.
    """
    *others, last = fronts
    *pools, last_pool = (unit.pool for unit in task.units)
    available = task.pool(task.units[-1]).num_gpus
    gpus = [option.num_gpus for option in last]
    best: tuple[float, int, tuple[Option, ...]] | None = None
    for chosen in product(*others):
        used = sum(option.num_gpus for option in chosen)
        used_in_pool = used if not task.pools else _pool_gpus(chosen, pools, last_pool)
        index = bisect_right(gpus, available - used_in_pool)
        if index == 0 or (task.pools and not suffices(task, [*(o.num_gpus for o in chosen), 0])):
            continue
        last_option = last[index - 1]
        once_s = float_sum(option.once_s for option in chosen) + last_option.once_s
        if best is None or (once_s, used + last_option.num_gpus) < best[:2]:
            best = once_s, used + last_option.num_gpus, (*chosen, last_option)
    return None if best is None else evaluated(task, pace, best[2])


def _pool_gpus(chosen: Sequence[Option], pools: Sequence[str], pool: str) -> int:
    """Return the GPUs of one pool that some options use."""
    return sum(
        option.num_gpus for option, option_pool in zip(chosen, pools, strict=True) if option_pool == pool
    )


def evaluated(task: Task, pace: int, chosen: Sequence[Option]) -> Orchestration:
    """Apply the formula to one option of every unit; see `evaluate`."""
    num_rounds = task.batch_samples // (pace * task.microbatch_samples)
    return Orchestration(
        degrees=tuple(option.degrees for option in chosen),
        warmup_s=float_sum(option.once_s - option.reduction_s for option in chosen),
        steady_s=max(option.stage_s for option in chosen) * (num_rounds - 1),
        reduction_s=float_sum(option.reduction_s for option in chosen),
    )


def is_better(candidate: Orchestration, other: Orchestration) -> bool:
    """Whether one is shorter, or as short with fewer GPUs."""
    if abs(candidate.iteration_s - other.iteration_s) > CHEAPEST * other.iteration_s:
        return candidate.iteration_s < other.iteration_s
    return candidate.num_gpus < other.num_gpus


def _pacing(task: Task) -> int:
    return next(index for index, unit in enumerate(task.units) if unit.name == task.pacing)


def why_nothing_fits(task: Task) -> str:
    """Return the unit that does not fit alone, or the GPUs that all units of a pool need, as text."""
    for unit in task.units:
        if not any(True for pace in paces(task) for _ in options_of(task, unit, pace)):
            pool = task.pool(unit)
            return f"unit {unit.name!r} does not fit on {pool.num_gpus} GPUs of {gib_text(pool.gpu_bytes)}"
    short = [f"{_fewest(task, pool)} GPUs at least, got {pool.num_gpus}" for pool in _short(task)]
    return f"the units need {', '.join(short) or 'degrees that are feasible together'}"


def _short(task: Task) -> list[Pool]:
    """Return the pools that are too small for their units, whatever the degrees."""
    pools = dict.fromkeys(task.pool(unit) for unit in task.units)
    return [pool for pool in pools if _fewest(task, pool) > pool.num_gpus]


def _fewest(task: Task, pool: Pool) -> int:
    """Return the fewest GPUs that a pool's units need, over all degrees of the pacing unit."""
    units = [unit for unit in task.units if task.pool(unit) == pool]
    return min(
        sum(min((o.num_gpus for o in options_of(task, unit, pace)), default=task.num_gpus) for unit in units)
        for pace in paces(task)
    )
