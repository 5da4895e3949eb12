"""Defers LLM work from overloaded microbatches to the ones right after them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.balance.microbatches.bottleneck_match import Matching, bottleneck_match
from workbench.balance.microbatches.replicas import heaviest_first
from workbench.balance.microbatches.subset_sums import SubsetSums
from workbench.float_sum import float_sum

UNITS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """Microbatches in execution order, and the work that each defers to the next.

    Args:
        order: [K] indices of the given microbatches: (overloaded, underloaded) pairs one after the
            other; where K is odd, the one without partner is last.
        deferred: [K] samples of the microbatch at that position whose LLM work the next position does.
    """

    order: tuple[int, ...]
    deferred: tuple[tuple[int, ...], ...]

    def llm_microbatches(self, microbatches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """[K] samples whose LLM work is done at each position, ascending."""
        received: tuple[int, ...] = ()
        samples_of = []
        for index, deferred in zip(self.order, self.deferred, strict=True):
            own = (sample for sample in microbatches[index] if sample not in deferred)
            samples_of.append(tuple(sorted((*own, *received))))
            received = deferred
        return tuple(samples_of)


def pairwise_deferral(
    microbatches: Sequence[Sequence[int]], llm_s: Sequence[float], match: Matching = bottleneck_match
) -> Deferral:
    """Pair overloaded with underloaded microbatches and move the subset that balances each pair best.

    Source: Entrain (dissertation, section 4.5.2; Algorithm 4, lines 7-15). For a given pair, the subset
    nearest to half the difference makes the heavier of the two as light as possible; over all
    pairings of the two halves, `bottleneck_match` makes the heaviest as light as possible.
    Differs: one table of subset sums per overloaded microbatch instead of one per pair.

    Args:
        microbatches: [K] samples of each, none empty.
        llm_s: LLM work by sample, >= 0. Works are counted in whole units, see `whole_units`.
        match: `bottleneck_match` as printed, or `even_match`.

    Returns:
        An order and deferrals that leave no microbatch empty. Pairs follow each other from the heaviest
        overloaded microbatch to the lightest.

    Complexity: O(K (N UNITS / 64 + K log UNITS)) for N samples a microbatch, and the matching.
    """
    units = whole_units(microbatches, llm_s)
    loads = [sum(members) for members in units]
    ordered = heaviest_first(range(len(loads)), loads)
    overloaded, underloaded = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    tables = [SubsetSums(units[index]) for index in overloaded]
    over = np.array([loads[index] for index in overloaded]).reshape(-1, 1)
    under = np.array([loads[index] for index in underloaded])
    moved = np.array(
        [table.nearest((load - under) / 2) for table, load in zip(tables, over[:, 0], strict=True)]
    ).reshape(len(over), len(under))
    matching = match(np.maximum(over - moved, under + moved), over[:, 0], under)
    order: list[int] = []
    deferred: list[tuple[int, ...]] = []
    for row, (index, partner) in enumerate(zip(overloaded, matching.partners, strict=True)):
        positions = tables[row].subset(int(moved[row, partner])) if matching.defers[row] else ()
        order += [index, underloaded[partner]]
        deferred += [tuple(microbatches[index][position] for position in positions), ()]
    alone = set(underloaded) - set(order)
    return Deferral(order=(*order, *sorted(alone)), deferred=(*deferred, *(() for _ in alone)))


def whole_units(microbatches: Sequence[Sequence[int]], llm_s: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Return work by microbatch and sample in whole units.

    Whole, small numbers are kept; others are counted in units of which the heaviest microbatch has
    `UNITS`, so that a load is off by at most N / 2 of them.
    """
    heaviest_s = max(
        (float_sum(llm_s[sample] for sample in samples) for samples in microbatches), default=0.0
    )
    is_whole = heaviest_s <= UNITS and all(
        float(llm_s[sample]).is_integer() for samples in microbatches for sample in samples
    )
    unit_s = 1.0 if is_whole or heaviest_s == 0 else heaviest_s / UNITS
    return tuple(tuple(round(llm_s[sample] / unit_s) for sample in samples) for samples in microbatches)
