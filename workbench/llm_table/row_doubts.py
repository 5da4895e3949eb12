"""Why the prediction of a row may be off: its costs by share, and what the row leaves unsaid."""

from collections.abc import Collection, Iterator, Mapping

from workbench.cost.profile import Profile
from workbench.llm_table.llm_row import LlmRow, Number
from workbench.timing.doubts import doubts_of
from workbench.timing.interval import Doubt
from workbench.timing.shares import Source

UNIFORM = 12**-0.5  # deviation of what lies anywhere between two ends, over their distance
NARROW = (Number.FP8, Number.MXFP8, Number.NVFP4)
OF_NARROW = 0.1  # of products in a narrow format, whose rate follows from peaks

# Columns that training runs often leave open -> (whole step, or one source; what an unknown answer spans).
# A second forward of all blocks is a third of the other passes. Samples of a microbatch change how well
# kernels are filled, sharding what is gathered when: a tenth. What is hidden may be all of a source's share.
SPANS: dict[str, tuple[Source | None, float]] = {
    "recompute": (None, 1 / 3),
    "micro_batch": (None, 0.1),
    "attention": (None, 0.1),
    "zero_stage": (None, 0.1),
    "dp_overlap": (Source.REDUCTION, 1.0),
    "tp_overlap": (Source.COLLECTIVES, 1.0),
    "sequence_parallel": (Source.COLLECTIVES, 0.5),
    "inter_gbytes_per_s": (Source.REDUCTION, 1.0),
}


def unsaid_of(cells: Mapping[str, str]) -> frozenset[str]:
    """Columns that may matter and that a row leaves to their defaults."""
    return frozenset(name for name in SPANS if not (cells.get(name) or "").strip())


def row_doubts(
    row: LlmRow, profile: Profile, shares: Mapping[Source, float], unsaid: Collection[str]
) -> tuple[Doubt, ...]:
    """Every reason, those of the machine first."""
    across = row.num_gpus > row.gpus_per_nvlink_domain
    more = (*_unsaid(unsaid, shares), *_narrow(row, shares))
    return doubts_of(profile, shares, across_nodes=across, unsaid=more)


def _unsaid(names: Collection[str], shares: Mapping[Source, float]) -> Iterator[Doubt]:
    for name, (source, span) in SPANS.items():
        if name in names:
            share = 1.0 if source is None else shares[source]
            yield Doubt(f"{name} not said", share * span * UNIFORM)


def _narrow(row: LlmRow, shares: Mapping[Source, float]) -> Iterator[Doubt]:
    if row.precision in NARROW:
        yield Doubt(f"{row.precision} by the ratio of peaks", shares[Source.PRODUCTS] * OF_NARROW)
