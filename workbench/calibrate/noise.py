"""What others did to a machine while it was measured, and how far its rows are apart."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from workbench.calibrate.measurement import LayerRow, Measurement, YardstickRow
from workbench.cost.profile import Fit

MOST_OTHERS = 0.15  # cores that others kept busy, or the machine's host took
MOST_SPREAD = 0.15  # (third quartile - first quartile) / median of a layer's repetitions
MOST_SWAY = 0.15  # (highest - lowest) / median of the yardstick, the extreme tenths left out
MOST_ERROR = 0.15  # median leave-one-out error of a table
JUDGED = ("matmul", "attention", "copies", "norms", "layers", "intra link", "inter link")


def noise_of(measurement: Measurement, fits: Sequence[Fit]) -> tuple[str, ...]:
    """What makes the measurement untrustworthy, a line each; none where nothing does.

    Tables count whose form is the machine's own: those that compare unlike things (other masks, collectives
    from one size to another) are off on any machine.
    """
    yardsticks = [row for row in measurement.rows if isinstance(row, YardstickRow)]
    layers = [row.spread for row in measurement.rows if isinstance(row, LayerRow)]
    return (*_load(yardsticks), *_sway(yardsticks), *_spread(layers), *_errors(fits))


def yardstick_s_of(measurement: Measurement) -> float | None:
    """Seconds of the yardstick while this was measured: the median, as all tables hold medians."""
    found = [row.seconds for row in measurement.rows if isinstance(row, YardstickRow)]
    return median(found) if found else None


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
    for one in fits:
        if one.table.partition(",")[0] in JUDGED and "other" not in one.table and one.median > MOST_ERROR:
            yield f"{one.table}: sizes left out are {one.median:.0%} off in the median"
