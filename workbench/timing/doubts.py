"""Why a predicted step may be off: errors of measured tables, scaled tables, and what was not specified."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from workbench.cost.products import ProductFormat
from workbench.cost.profile import Fit, Profile
from workbench.float_sum import float_sum
from workbench.timing.interval import MEDIAN_OF_NORMAL, Doubt
from workbench.timing.shares import Source

# Prefixes of the names of a source's tables.
FITS: dict[Source, tuple[str, ...]] = {
    Source.PRODUCTS: ("matmul", "long loops of products"),
    Source.ATTENTION: ("attention", "long loops of attention"),
    Source.MEMORY: ("bytes moved", "memory-bound", "copies", "norms", "pointwise"),
    Source.COLLECTIVES: ("all_", "reduce_scatter", "collectives"),
    Source.REDUCTION: ("all_", "reduce_scatter", "collectives"),
    Source.REST: ("layers",),
}
OTHER_MASKS = "attention, other masks"  # of masks that plans of language models do not have
OTHER_LAYERS = "matmul, held against"  # errors that a rate fitted to a training system's own rows corrects
MEAN_OF_NORMAL = 0.7979  # mean absolute deviation of a normal distribution, in deviations: sqrt(2 / pi)

# Deviations of a source without fits. Scaled tables: error of scaling between architectures
# (`experiments.public.devices`), as a deviation. Collectives by formula: error of ring formulas.
SCALED: dict[Source, float] = {
    Source.PRODUCTS: 0.18,
    Source.ATTENTION: 0.17,
    Source.MEMORY: 0.43,
    Source.COLLECTIVES: 0.26,
    Source.REDUCTION: 0.26,
    Source.REST: 0.2,
}
# Where a device's sustained share of products was fitted to runs of training: the mean error of these eight,
# 3.1 %, with half the difference between the two devices, B200 and GB200.
SUSTAINED = 0.06
# No table of collectives between nodes is known; clusters of one kind of card differ as much.
BETWEEN_NODES = 0.4
# Formats of products at whose rates such shares were fitted, and the deviation of any other one's rate, which
# follows from peaks or from another format.
FITTED_FORMATS = (ProductFormat.FP8, ProductFormat.FP8_DELAYED, ProductFormat.MXFP8)
OF_NARROW = 0.1
OF_OTHERS = 0.07  # least, of the whole step, where the training system's own overheads were not measured
OF_OWN = 0.03  # the same where they were, on that machine

# Deviation of a source whose rates follow from a cell that nobody published.
PRESUMED: dict[str, tuple[Source, float]] = {
    "processors": (Source.PRODUCTS, 0.03),
    "power_watts": (Source.PRODUCTS, 0.1),
    "bfloat16_tflop_per_s": (Source.PRODUCTS, 0.15),
    "reached_bfloat16_tflop_per_s": (Source.PRODUCTS, 0.1),
    "memory_gbytes_per_s": (Source.MEMORY, 0.1),
    "link_gbytes_per_s": (Source.COLLECTIVES, 0.2),
    "card_gbytes_per_s": (Source.REDUCTION, 0.25),
}


def doubts_of(
    profile: Profile,
    shares: Mapping[Source, float],
    *,
    across_nodes: bool,
    unsaid: Iterable[Doubt] = (),
    fitted_off: float = 0.0,
    has_fitted_rate: bool = False,
    beside_tables: Mapping[Source, float] | None = None,
) -> tuple[Doubt, ...]:
    """Return every reason why a step may be off, weighted by its share of the step.

    Args:
        profile: the machine that was priced.
        shares: of the step's time, by source, see `shares_of`.
        across_nodes: whether weights or gradients travel between nodes.
        unsaid: what the caller left unspecified, with its possible effect.
        fitted_off: mean error on steps of the training system that its fitted numbers were not fitted to.
        has_fitted_rate: whether one of the fitted numbers is the rate of products.
        beside_tables: deviations of sources whose kernels differ from those of the tables.
    """
    corrected, extra = profile, beside_tables or {}
    if has_fitted_rate:
        fits = (fit for fit in profile.fits if not fit.table.startswith(OTHER_LAYERS))
        corrected = replace(profile, fits=tuple(fits))
    tables = (
        Doubt(
            _about(profile, source),
            share
            * math.hypot(deviation_of(corrected, source, across_nodes=across_nodes), extra.get(source, 0.0)),
        )
        for source, share in shares.items()
    )
    step_deviation = OF_OWN if profile.overheads_s else max(OF_OTHERS, fitted_off / MEAN_OF_NORMAL)
    step = Doubt("the step beyond its kernels", step_deviation)
    return tuple(doubt for doubt in (*tables, *_presumed(profile, shares), step, *unsaid) if doubt.deviation)


def deviation_of(profile: Profile, source: Source, *, across_nodes: bool) -> float:
    """Return the deviation of the logarithm of a source's seconds, from its tables' leave-one-out errors."""
    if source is Source.REDUCTION and across_nodes:
        return BETWEEN_NODES
    if source is Source.PRODUCTS and is_sustained_fitted(profile):
        return SUSTAINED
    fits = [fit for fit in profile.fits if _is_of(fit, source)]
    if not fits:
        return SCALED[source]
    return float_sum(fit.median for fit in fits) / len(fits) / MEDIAN_OF_NORMAL


def narrow_doubts(
    profile: Profile, shares: Mapping[Source, float], formats: Mapping[ProductFormat, str]
) -> Iterator[Doubt]:
    """Yield the doubt about products in narrow formats, each with the name that it has for its user."""
    is_fitted = is_sustained_fitted(profile)
    by_peaks = (name for each, name in formats.items() if not (is_fitted and each in FITTED_FORMATS))
    if names := ", ".join(by_peaks):
        yield Doubt(f"{names} by the ratio of peaks", shares[Source.PRODUCTS] * OF_NARROW)


def is_sustained_fitted(profile: Profile) -> bool:
    """Whether the sustained share of the device's product rate was fitted to training runs."""
    return profile.power is not None and profile.power.is_fitted


def _is_of(fit: Fit, source: Source) -> bool:
    return fit.table.startswith(FITS[source]) and not fit.table.startswith(OTHER_MASKS)


def _about(profile: Profile, source: Source) -> str:
    if profile.like is None or source is Source.REST:
        return source
    return f"{source}, scaled from {profile.like}"


def _presumed(profile: Profile, shares: Mapping[Source, float]) -> Iterator[Doubt]:
    for cell in profile.presumed:
        if cell in PRESUMED:
            source, deviation = PRESUMED[cell]
            yield Doubt(f"{cell} presumed", shares[source] * deviation)
