"""Why the prediction of a row may be off: its costs by share, and what the row leaves unsaid."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from workbench.cost.flash import flash_share
from workbench.cost.profile import Profile
from workbench.llm_table.cost_parts import CostParts
from workbench.llm_table.frameworks import presumed
from workbench.llm_table.llm_row import LlmRow, Number, Scores
from workbench.llm_table.row_execution import GENERATIONS
from workbench.timing.doubts import SCALED, doubts_of, is_sustained_fitted
from workbench.timing.interval import Doubt
from workbench.timing.shares import Source

UNIFORM = 12**-0.5  # deviation of what lies anywhere between two ends, over their distance
OF_NARROW = 0.1  # of products in a narrow format, whose rate follows from peaks
# Of memory-bound kernels: tables hold how fast bytes move, not which operations a training system fuses. A
# bias with the GELU behind it, dropout with its residual sum: chains of two move each tensor twice, or once.
OF_FUSION = UNIFORM * math.log(2)

BY_CONVENTION = 0.25  # of what a blank cell spans, where the training system's documented default fills it
# On all deviations of a row, so that 80 % of published rows lie inside (`experiments.public.coverage`): the
# largest of the stretches without one data set, as new rows are further off than known ones.
STRETCH = 0.45

# Columns that training runs often leave open -> (whole step, or one source; what an unknown answer spans).
# A second forward of all blocks is a third of the other passes. Samples of a microbatch change how well
# kernels are filled: a tenth. What is hidden may be all of a source's share, sharding moves half of it.
SPANS: dict[str, tuple[Source | None, float]] = {
    "recompute": (None, 1 / 3),
    "micro_batch": (None, 0.1),
    "attention": (None, 0.05),
    "zero_stage": (Source.REDUCTION, 0.5),
    "dp_overlap": (Source.REDUCTION, 1.0),
    "tp_overlap": (Source.COLLECTIVES, 1.0),
    "sequence_parallel": (Source.COLLECTIVES, 0.5),
    "inter_gbytes_per_s": (Source.REDUCTION, 1.0),
}


def unsaid_of(cells: Mapping[str, str]) -> Mapping[str, float]:
    """Columns that may matter and that a row leaves to their defaults, each with how open it is: up to 1.

    A training system's documented default leaves less open than what is presumed of it.
    """
    is_documented = bool((cells.get("framework") or "").strip())
    guessed = presumed(cells) if is_documented else frozenset()
    return {
        name: BY_CONVENTION if is_documented and name not in guessed else 1.0
        for name in SPANS
        if not (cells.get(name) or "").strip()
    }


def reasons_of(
    row: LlmRow, profile: Profile, parts: CostParts, unsaid: Mapping[str, float]
) -> tuple[Doubt, ...]:
    """Every reason why a row's iteration may be off, those of the machine first."""
    shares = _sources(parts)
    found = doubts_of(
        profile,
        shares,
        across_nodes=row.num_gpus > row.gpus_per_nvlink_domain,
        unsaid=(*_unsaid(unsaid, shares), *_narrow(row, profile, shares)),
        fitted_off=row.fitted_off,
        has_fitted_rate="matmul_rate" in dict(row.fitted),
        beside_tables=_beside_tables(row, profile),
    )
    return tuple(replace(doubt, deviation=STRETCH * doubt.deviation) for doubt in found)


def _beside_tables(row: LlmRow, profile: Profile) -> Mapping[Source, float]:
    """Of kernels that are not those of the tables: attention that stores its scores, or of an older
    generation than the device's table holds, is scaled like between devices."""
    generation = GENERATIONS.get(row.attention)
    is_older = generation is not None and flash_share(generation, profile.flash_generation) != 1.0
    attention = SCALED[Source.ATTENTION] if is_older or row.attention is Scores.STORED else 0.0
    return {Source.ATTENTION: attention, Source.MEMORY: OF_FUSION}


def _sources(parts: CostParts) -> Mapping[Source, float]:
    """What each source decides of the iteration; waiting grows as what is waited for."""
    busy = {
        Source.PRODUCTS: parts.products,
        Source.ATTENTION: parts.attention,
        Source.MEMORY: parts.memory_bound + parts.optimizer,
        Source.COLLECTIVES: parts.in_layers,
        Source.REDUCTION: parts.data,
    }
    total = sum(busy.values())
    return {source: seconds / total for source, seconds in busy.items()}


def _unsaid(names: Mapping[str, float], shares: Mapping[Source, float]) -> Iterator[Doubt]:
    for name, (source, span) in SPANS.items():
        if name in names:
            share = 1.0 if source is None else shares[source]
            yield Doubt(f"{name} not said", share * span * UNIFORM * names[name])


def _narrow(row: LlmRow, profile: Profile, shares: Mapping[Source, float]) -> Iterator[Doubt]:
    """Runs in FP8 and MXFP8 are among those to which a share was fitted, runs in NVFP4 are not."""
    if row.precision.narrow is not None and not (
        is_sustained_fitted(profile) and row.precision is not Number.NVFP4
    ):
        yield Doubt(f"{row.precision} by the ratio of peaks", shares[Source.PRODUCTS] * OF_NARROW)
