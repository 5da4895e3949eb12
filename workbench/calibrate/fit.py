"""Turns the rows of a microbenchmark into a profile, with leave-one-out errors per table."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from workbench.calibrate.measurement import (
    AttentionRow,
    CollectiveRow,
    CopyRow,
    Header,
    HostCopyRow,
    LayerRow,
    LinkRow,
    MatmulRow,
    Measurement,
    Mixing,
    OptimizerRow,
    OverheadRow,
    OverlapRow,
    YardstickRow,
    merge_rows,
)
from workbench.calibrate.sustained_rows import SustainedAttentionRow, SustainedMatmulRow
from workbench.calibrate.sustained_tables import sustained_attention, sustained_fits, sustained_products
from workbench.calibrate.tables import (
    NORMS,
    POINTWISE,
    attention_backward_rate,
    attention_table,
    collective_fits,
    collective_tables,
    grouped,
    matmul_table,
    moved_table,
    other_masks_fit,
    quality,
    relative_fit,
    table_fits,
)
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.measured import MeasuredLayer
from workbench.cost.profile import Fit, MachineLink, Profile, Provenance
from workbench.cost.roofline import Work

R = TypeVar("R")
LAUNCH = "LAUNCH"
FEWEST_OF_A_LINK = 3  # sizes that say what latency and bandwidth are, and one to leave out
MIN_FOLD_POINTS = 4  # a layer's curve has four terms; fewer other points say nothing about the one left out


def fit(name: str, measurements: Iterable[Measurement], mixing: Mixing = Mixing.REFUSED) -> Profile:
    """One profile out of the rows of one machine.

    Sizes measured more than once are medians. Peaks are the best rates that were measured;
    without matmul and copy rows there are none, and only the measured layers have a price.
    Attention that was not measured is priced at the peak of products.

    Args:
        mixing: whether rows of different software go together; the profile then names all versions.

    Raises:
        ValueError: rows of different machines or software versions, or no rows at all.

    Complexity: O(points^2) for the leave-one-out errors.
    """
    measurement = merge_rows(measurements, mixing)
    header = measurement.header
    matmuls, copies = _of(measurement, MatmulRow), _of(measurement, CopyRow)
    if not measurement.rows:
        raise ValueError(f"profile {name!r}: want at least one row, got none")
    loops = _of(measurement, SustainedMatmulRow)
    precision = (
        _most_common([row.precision for row in matmuls] or [row.precision for row in loops]) or "float32"
    )
    attentions = [row for row in _of(measurement, AttentionRow) if row.precision == precision]
    matmul = matmul_table([row for row in matmuls if row.precision == precision])
    attention = attention_table(attentions)
    pointwise, normalization = moved_table(copies, POINTWISE), moved_table(copies, NORMS)
    layers = layer_tables(_of(measurement, LayerRow))
    links, link_fits = _links(measurement)
    collectives = collective_tables(_of(measurement, CollectiveRow))
    overheads_s, optimizer_s = _overheads_and_optimizer(measurement)
    tables = [("matmul", matmul), ("attention", attention), ("copies", pointwise), ("norms", normalization)]
    profile = Profile(
        name=name,
        device=header.device,
        memory_bytes=header.memory_bytes,
        peak_flop_per_s=tuple(sorted(_peaks(matmuls, loops).items())),
        peak_bytes_per_s=max((rate for *_, rate in pointwise.points), default=None),
        provenance=_provenance(header),
        matmul=matmul,
        attention=attention,
        pointwise=pointwise,
        normalization=normalization,
        sustained_products=sustained_products([row for row in loops if row.precision == precision]),
        sustained_attention=sustained_attention(
            [row for row in _of(measurement, SustainedAttentionRow) if row.precision == precision]
        ),
        attention_backward_rate=attention_backward_rate(attentions) or 1.0,
        attention_head_dim=min({row.head_dim for row in attentions}, default=None),
        table_precision=precision,
        kernel_floor_s=_kernel_floor_s(measurement),
        overheads_s=overheads_s,
        optimizer_s_per_parameter=optimizer_s,
        optimizer_update=_optimizer_update(measurement),
        layers=layers,
        links=links,
        collectives=collectives,
        unmeasured=_missing(measurement),
        yardstick_s=yardstick_s_of(measurement),
        fits=(
            *table_fits(tables),
            *other_masks_fit(attentions, attention),
            *collective_fits(collectives),
            *layer_fits(layers),
            *link_fits,
        ),
    )
    fits = (*profile.fits, *sustained_fits(profile))
    return replace(profile, fits=fits, noise=noise_of(measurement, fits))


def _optimizer_update(measurement: Measurement) -> str | None:
    """How AdamW ran; ValueError where some rows ran otherwise than others."""
    names = sorted({row.update for row in _of(measurement, OptimizerRow)})
    if len(names) > 1:
        raise ValueError(f"optimizer steps of {' and '.join(names)} updates are not mixed: measure one again")
    return names[0] if names else None


def _provenance(header: Header) -> Provenance:
    return Provenance(
        date=header.date,
        clocks=header.clocks,
        versions=header.versions,
        sources=(f"measured on {header.device_name}, {header.num_threads} threads a rank",),
    )


def layer_tables(rows: Sequence[LayerRow]) -> tuple[LayerTable, ...]:
    """Rows as points, one table per layer, precision and grid."""
    by_layer = grouped(
        rows,
        lambda row: (row.signature, row.precision, row.tp, row.cp, row.ep, row.sequence_parallel),
    )
    return tuple(
        LayerTable(
            signature=signature,
            precision=precision,
            tp=tp,
            cp=cp,
            ep=ep,
            sequence_parallel=sequence_parallel,
            points=tuple(_point(same) for same in grouped(members, _size).values()),
        )
        for (signature, precision, tp, cp, ep, sequence_parallel), members in by_layer.items()
    )


def layer_fits(tables: Sequence[LayerTable]) -> tuple[Fit, ...]:
    """Errors when each size of each layer is predicted from the layer's other sizes."""
    forward, backward = [], []
    for table in tables:
        if len(table.points) <= MIN_FOLD_POINTS:
            continue
        for left_out in table.points:
            others = tuple(point for point in table.points if point is not left_out)
            rest = LayerTable(signature=table.signature, precision=table.precision, points=others)
            predicted = MeasuredLayer(rest).read(Work((left_out.row,) * left_out.rows))
            actual_s = left_out.input_grad_s + left_out.weight_grad_s
            forward.append(abs(predicted.forward_s / left_out.forward_s - 1))
            if actual_s:
                backward.append(abs((predicted.input_grad_s + predicted.weight_grad_s) / actual_s - 1))
    named = (("layers, forward", forward), ("layers, backward", backward))
    return tuple(quality(name, errors) for name, errors in named if errors)


def _of(measurement: Measurement, kind: type[R]) -> list[R]:
    return [row for row in measurement.rows if isinstance(row, kind)]


def _most_common(names: Sequence[str]) -> str:
    return max(sorted(set(names)), key=names.count, default="")


def _size(row: LayerRow) -> tuple[int, ...]:
    own = row.rows, row.tokens_in, row.attention_area
    return *own, row.context_tokens, row.reader_tokens, row.context_area


def _point(rows: Sequence[LayerRow]) -> LayerPoint:
    """Of rows of one size."""
    return LayerPoint(
        rows=rows[0].rows,
        tokens_in=rows[0].tokens_in,
        attention_area=rows[0].attention_area,
        context_tokens=rows[0].context_tokens,
        reader_tokens=rows[0].reader_tokens,
        context_area=rows[0].context_area,
        forward_s=median(row.forward_s for row in rows),
        input_grad_s=median(row.input_grad_s for row in rows),
        weight_grad_s=median(row.weight_grad_s for row in rows),
        weight_only_s=_median_of([row.weight_only_s for row in rows]),
        forward_only_s=_median_of([row.forward_only_s for row in rows]),
        split_input_s=_median_of([row.split_input_s for row in rows]),
        split_weight_s=_median_of([row.split_weight_s for row in rows]),
        recompute_forward_s=_median_of([row.recompute_forward_s for row in rows]),
        recompute_backward_s=_median_of([row.recompute_backward_s for row in rows]),
        recompute_idle_s=_median_of([row.recompute_idle_s for row in rows]),
    )


def _median_of(seconds: Sequence[float | None]) -> float | None:
    known = [second for second in seconds if second is not None]
    return median(known) if known else None


def _peaks(short: Sequence[MatmulRow], loops: Sequence[SustainedMatmulRow]) -> dict[str, float]:
    """The best rate by precision; of long loops where nothing else was measured."""
    rows: list[MatmulRow | SustainedMatmulRow] = [*(short or loops)]
    by_precision = grouped(rows, lambda row: row.precision)
    return {
        precision: max(2.0 * row.m * row.n * row.k / row.seconds for row in same)
        for precision, same in by_precision.items()
    }


def _kernel_floor_s(measurement: Measurement) -> float:
    """What a kernel costs that does nothing; where that was not measured, the shortest that was."""
    launches = [row.seconds for row in _of(measurement, OverheadRow) if row.action == LAUNCH]
    if launches:
        return median(launches)
    copied_s = [row.seconds for row in _of(measurement, CopyRow)]
    return min(copied_s + [row.seconds for row in _of(measurement, MatmulRow)], default=0.0)


def _links(measurement: Measurement) -> tuple[tuple[MachineLink, ...], list[Fit]]:
    """Latency and bandwidth of each link and of the way to the host and back.

    By non-negative least squares of relative errors; each error is of a size that was left out.
    """
    timed = [(row.link, row.num_bytes, row.seconds) for row in _of(measurement, LinkRow)]
    timed += [(row.direction, row.num_bytes, row.seconds) for row in _of(measurement, HostCopyRow)]
    links, fits = [], []
    for scope, members in grouped(timed, lambda row: row[0]).items():
        sizes, seconds = np.array(sorted((float(size), second) for _, size, second in members)).T
        latency_s, s_per_byte = affine_fit(sizes, seconds)
        links.append(
            MachineLink(
                scope=scope,
                name=scope,
                bytes_per_s=1 / s_per_byte,
                latency_s=latency_s,
                measured=True,
                source="microbenchmark",
            )
        )
        if len(sizes) > FEWEST_OF_A_LINK:
            fits.append(quality(f"{scope} link", _left_out(sizes, seconds)))
    return tuple(links), fits


def _left_out(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Errors of all sizes but the smallest and the largest, each predicted from the others.

    Others that do not grow predict one time for all sizes: an error, and no reason to refuse the whole.
    """
    errors = []
    for index in range(1, len(sizes) - 1):
        kept = np.arange(len(sizes)) != index
        latency_s, s_per_byte = _line(sizes[kept], seconds[kept])
        errors.append(abs(float((latency_s + s_per_byte * sizes[index]) / seconds[index]) - 1))
    return errors


def affine_fit(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(seconds at size 0, seconds per unit), both >= 0, least relative squares.

    Raises ValueError when the times do not grow with the size.
    """
    base_s, s_per_unit = _line(sizes, seconds)
    if s_per_unit <= 0:
        raise ValueError(
            f"{len(sizes)} times between {sizes.min():g} and {sizes.max():g} do not grow with the size"
        )
    return base_s, s_per_unit


def _line(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    base_s, s_per_unit = relative_fit(np.stack([np.ones_like(sizes), sizes], axis=1), seconds).tolist()
    return base_s, s_per_unit


def _overheads_and_optimizer(
    measurement: Measurement,
) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]:
    """Overheads by action, with what an optimizer step takes at no parameters; seconds per parameter."""
    actions = [row for row in _of(measurement, OverheadRow) if row.action != LAUNCH]
    by_action = grouped(actions, lambda row: row.action)
    overheads_s = {action: median(row.seconds for row in rows) for action, rows in by_action.items()}
    per_parameter: dict[str, float] = {}
    by_precision = grouped(_of(measurement, OptimizerRow), lambda row: row.precision)
    for precision, rows in by_precision.items():
        sizes, seconds = np.array(sorted((float(row.num_parameters), row.seconds) for row in rows)).T
        base_s, per_parameter[precision] = affine_fit(sizes, seconds)
        overheads_s["STEP"] = max(overheads_s.get("STEP", 0.0), base_s)
    return tuple(sorted(overheads_s.items())), tuple(sorted(per_parameter.items()))


def _missing(measurement: Measurement) -> tuple[str, ...]:
    kinds = {
        MatmulRow: "matmul",
        CopyRow: "memory-bound kernels",
        LayerRow: "layers",
        OptimizerRow: "optimizer step",
        LinkRow: "links",
        CollectiveRow: "collectives",
    }
    names = [name for kind, name in kinds.items() if not _of(measurement, kind)]
    if not any(row.action != LAUNCH for row in _of(measurement, OverheadRow)):
        names.append("executor overhead per action: taken as 0")
    if not _of(measurement, SustainedMatmulRow):
        names.append("long loops of products: short loops' rates")
    if not _of(measurement, SustainedAttentionRow):
        names.append("long loops of attention by head width: short loops' rates at one width")
    if not _of(measurement, AttentionRow):
        names.append("attention apart from measured layers: peak rate assumed")
    names += [
        f"compute beside {row.collective} of {row.num_ranks}: {row.beside_s / row.alone_s:.2f} times as long "
        "as alone when measured, not part of any prediction"
        for row in _of(measurement, OverlapRow)
    ]
    return tuple(names)


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
