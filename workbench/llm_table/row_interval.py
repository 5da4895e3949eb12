"""The prediction interval of a row: its costs by share, and what the row leaves open."""

import math
from collections.abc import Iterator, Mapping

from workbench.cost.flash import flash_share
from workbench.cost.products import ProductFormat
from workbench.cost.profile import Profile
from workbench.float_sum import float_sum
from workbench.llm_table.cost_parts import CostParts
from workbench.llm_table.frameworks import is_compared, presumed
from workbench.llm_table.llm_row import LlmRow, Scores
from workbench.llm_table.row_execution import GENERATIONS
from workbench.timing.doubts import SCALED, doubts_of, narrow_doubts
from workbench.timing.interval import Doubt
from workbench.timing.shares import Source
from workbench.timing.systems import ANY_SYSTEM, of_system, stretched

UNIFORM = 12**-0.5  # standard deviation of a uniform distribution over its width
# Deviation of memory-bound kernels: tables hold how fast bytes move, not which operations a training system
# fuses. A bias with the following GELU, dropout with its residual sum: pairs move each tensor twice, or once.
OF_FUSION = UNIFORM * math.log(2)

BY_CONVENTION = 0.25  # of a blank cell's span, if the training system's documented default fills it
# Columns that training runs often leave open -> (whole step, or one source; span of the unknown answer).
# A second forward of all blocks is a third of the other passes. Samples per microbatch change how well
# kernels are filled: a tenth. Overlap may hide all of a source's share, sharding moves half of it.
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
SYSTEM = "framework"  # among the columns that a row leaves open: one of which nothing was compared


def unsaid_of(cells: Mapping[str, str]) -> Mapping[str, float]:
    """Columns that may matter and that a row leaves to their defaults, each with its openness, at most 1.

    A training system's documented default leaves less open than a presumed one.
    """
    is_documented = bool((cells.get("framework") or "").strip())
    undocumented = presumed(cells) if is_documented else frozenset()
    blank = {
        name: BY_CONVENTION if is_documented and name not in undocumented else 1.0
        for name in SPANS
        if not (cells.get(name) or "").strip()
    }
    return blank if is_compared(cells) else blank | {SYSTEM: 1.0}


def reasons_of(
    row: LlmRow, profile: Profile, parts: CostParts, unsaid: Mapping[str, float]
) -> tuple[Doubt, ...]:
    """Every reason why a row's iteration may be off, those of the machine first."""
    shares = _source_shares(parts)
    formats: dict[ProductFormat, str] = {row.narrow: str(row.precision)}
    formats.pop(ProductFormat.SAME, None)
    all_doubts = doubts_of(
        profile,
        shares,
        across_nodes=row.num_gpus > row.gpus_per_nvlink_domain,
        unsaid=(*_unsaid_doubts(unsaid, shares), *narrow_doubts(profile, shares, formats)),
        fitted_off=row.fitted_off,
        has_fitted_rate="matmul_rate" in dict(row.fitted),
        beside_tables=_beside_tables(row, profile),
    )
    return of_system(all_doubts, ANY_SYSTEM) if SYSTEM in unsaid else stretched(all_doubts)


def _beside_tables(row: LlmRow, profile: Profile) -> Mapping[Source, float]:
    """Deviations of kernels outside the tables: attention that stores its scores, or of an older generation
    than the device's table, is scaled like between devices.
    """
    generation = GENERATIONS.get(row.attention)
    is_older = generation is not None and flash_share(generation, profile.flash_generation) != 1.0
    attention = SCALED[Source.ATTENTION] if is_older or row.attention is Scores.STORED else 0.0
    return {Source.ATTENTION: attention, Source.MEMORY: OF_FUSION}


def _source_shares(parts: CostParts) -> Mapping[Source, float]:
    """Share of the iteration by source; bubbles and launches are attributed in proportion to all else."""
    busy = {
        Source.PRODUCTS: parts.products,
        Source.ATTENTION: parts.attention,
        Source.MEMORY: parts.memory_bound + parts.optimizer,
        Source.COLLECTIVES: parts.in_layers,
        Source.REDUCTION: parts.data,
    }
    total = float_sum(busy.values())
    return {source: seconds / total for source, seconds in busy.items()}


def _unsaid_doubts(names: Mapping[str, float], shares: Mapping[Source, float]) -> Iterator[Doubt]:
    for name, (source, span) in SPANS.items():
        if name in names:
            share = 1.0 if source is None else shares[source]
            yield Doubt(f"{name} not said", share * span * UNIFORM * names[name])
