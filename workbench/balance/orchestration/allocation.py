"""Assigns GPUs to modules in proportion to their work, and finds the batch size at which that is stable."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log

from workbench.float_sum import float_sum

Allocation = tuple[int, ...]


def proportional_allocation(work: Sequence[float], num_units: int) -> Allocation:
    """Return the whole numbers nearest to exact shares, at least one each.

    Source: Entrain (dissertation, section 4.4.2, Algorithm 2 line 5: "rounding to the nearest feasible
    integers"). Nearest is by the sum of absolute differences. That sum is separable and convex, and
    floors of at least one are nearest for their own sum, so units given or taken one at a time where
    that costs least stay nearest. Equal costs: the module that is shortest of its share.

    Args:
        work: [M] work of each module, > 0 in total.
        num_units: GPUs of one replica, or groups of tp x cp of them; >= M.

    Returns:
        [M] units of each module. Equal shortage: the earlier module.

    Raises:
        ValueError: no work, negative work, or fewer units than modules.

    Complexity: O(M^2).
    """
    _check(work, num_units)
    total = float_sum(work)
    shares = [module_work * num_units / total for module_work in work]
    units = [max(1, floor(share)) for share in shares]

    def cost_of_change(index: int, change: int) -> tuple[float, float, int]:
        excess = units[index] - shares[index]
        return abs(excess + change) - abs(excess), change * excess, change * index

    while sum(units) < num_units:
        units[min(range(len(work)), key=lambda index: cost_of_change(index, 1))] += 1
    while sum(units) > num_units:
        reducible = [index for index in range(len(work)) if units[index] > 1]
        units[min(reducible, key=lambda index: cost_of_change(index, -1))] -= 1
    return tuple(units)


def _check(work: Sequence[float], num_units: int) -> None:
    if not work or min(work) < 0 or float_sum(work) <= 0:
        raise ValueError(f"work of modules must be >= 0 and not all 0, got {list(work)}")
    if num_units < len(work):
        raise ValueError(f"want at least one unit per module, got {num_units} for {len(work)} modules")


def num_trials(confidence: float, most_failures: float) -> int:
    """Return how many trials must all succeed to show, with that confidence, that failures are rarer.

    Source: Entrain, Algorithm 2 line 1, ceil(ln(alpha) / ln(1 - p)); 59 at 95 % and 5 %.
    """
    for name, value in (("confidence", confidence), ("most_failures", most_failures)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return ceil(log(1 - confidence) / log(1 - most_failures))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTrials:
    """Trials of one batch size: how often each allocation occurred, the reference included."""

    num_samples: int
    counts: tuple[tuple[Allocation, int], ...]

    @property
    def is_stable(self) -> bool:
        return len(self.counts) == 1


def trials_of(
    draw: Callable[[int], Sequence[float]],
    num_samples: int,
    num_units: int,
    *,
    trials: int,
) -> SizeTrials:
    """Try a reference batch and `trials` more of one size. Arguments: `stable_batch_size`."""
    counts: dict[Allocation, int] = {}
    for _ in range(1 + trials):
        allocation = proportional_allocation(draw(num_samples), num_units)
        counts[allocation] = counts.get(allocation, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return SizeTrials(num_samples=num_samples, counts=tuple(ordered))


def stable_batch_size(
    draw: Callable[[int], Sequence[float]],
    num_units: int,
    *,
    first: int = 4,
    most: int = 1 << 16,
    trials: int = 59,
) -> tuple[SizeTrials, ...]:
    """Double the batch size until all random batches lead to the same allocation.

    Source: Entrain (dissertation, section 4.4.2), Algorithm 2.
    Differs: a size that fails is still tried to the end, so that its table can be printed.

    Args:
        draw: work of each module in a new random batch of that many samples.
        num_units: GPUs of one replica.
        first, most: sizes to start with and to give up after.
        trials: k validation batches after the reference batch, see `num_trials`.

    Returns:
        Trials of every size tried; the last one is b_min.

    Raises:
        ValueError: still not stable at `most`, naming the two most frequent allocations: the mean is too
            close to a rounding boundary.
    """
    tried: list[SizeTrials] = []
    size = first
    while size <= most:
        tried.append(trials_of(draw, size, num_units, trials=trials))
        if tried[-1].is_stable:
            return tuple(tried)
        size *= 2
    rivals = ", ".join(f"{list(allocation)} ({times} times)" for allocation, times in tried[-1].counts[:2])
    raise ValueError(f"no stable allocation up to {tried[-1].num_samples} samples a batch: {rivals}")
