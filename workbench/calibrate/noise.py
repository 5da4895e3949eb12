"""Disturbances of a machine while it was measured, and the spread of its rows."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from workbench.calibrate.measurement import LayerRow, Measurement, YardstickRow
from workbench.cost.profile import Fit

MOST_OTHERS = 0.15  # cores used by other programs or the machine's host
MOST_SPREAD = 0.15  # (third quartile - first quartile) / median of a layer's repetitions
MOST_SWAY = 0.15  # (highest - lowest) / median of the yardstick, without the extreme tenths
MOST_ERROR = 0.15  # median leave-one-out error of a table
JUDGED = ("matmul", "attention", "copies", "norms", "layers", "intra link", "inter link")


def noise_of(measurement: Measurement, fits: Sequence[Fit]) -> tuple[str, ...]:
    """Reasons not to trust the measurement, one line each; empty if there are none.

    Only tables whose form follows from the machine count: those that compare unlike things (other masks,
    collectives from one size to another) have errors on any machine.
    """
    yardsticks = [row for row in measurement.rows if isinstance(row, YardstickRow)]
    layers = [row.spread for row in measurement.rows if isinstance(row, LayerRow)]
    return (*_load(yardsticks), *_sway(yardsticks), *_spread(layers), *_errors(fits))


def yardstick_s_of(measurement: Measurement) -> float | None:
    """The yardstick's median seconds while this was measured, as all tables hold medians."""
    seconds = [row.seconds for row in measurement.rows if isinstance(row, YardstickRow)]
    return median(seconds) if seconds else None


def _load(rows: Sequence[YardstickRow]) -> Iterator[str]:
    others = [row.others_cores for row in rows if row.others_cores is not None]
    if others and fmean(others) > MOST_OTHERS:
        yield f"others kept {fmean(others):.2f} cores busy while this machine was measured"


def _sway(rows: Sequence[YardstickRow]) -> Iterator[str]:
    seconds = sorted(row.seconds for row in rows)
    cut = len(seconds) // 10
    kept = seconds[cut : len(seconds) - cut]
    if len(kept) > 1 and kept[-1] - kept[0] > MOST_SWAY * median(kept):
        sway = (kept[-1] - kept[0]) / median(kept)
        yield f"the same work took times that lay {sway:.0%} apart while this machine was measured"


def _spread(spreads: Sequence[float]) -> Iterator[str]:
    if spreads and median(spreads) > MOST_SPREAD:
        yield f"repetitions of a layer lay {median(spreads):.0%} apart (quartiles over median)"


def _errors(fits: Sequence[Fit]) -> Iterator[str]:
    for fit in fits:
        if fit.table.partition(",")[0] in JUDGED and "other" not in fit.table and fit.median > MOST_ERROR:
            yield f"{fit.table}: sizes left out are {fit.median:.0%} off in the median"
