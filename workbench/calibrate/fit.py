"""Fit a profile to microbenchmark rows, with leave-one-out errors per table."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import numpy as np

from workbench.arrays import Floats
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
    merge_rows,
)
from workbench.calibrate.noise import noise_of, yardstick_s_of
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
from workbench.cost.measured import COLUMNS, RECOMPUTED, MeasuredLayer
from workbench.cost.profile import Fit, MachineLink, Profile, Provenance
from workbench.cost.roofline import Work

R = TypeVar("R")
LAUNCH = "LAUNCH"
# Sizes of a point: rows of one are its repetitions.
SIZES = ("rows", "tokens_in", "attention_area", "context_tokens", "reader_tokens", "context_area")
FEWEST_OF_A_LINK = 3  # sizes needed to fit latency and bandwidth with one left out
MIN_FOLD_POINTS = 4  # a layer's curve has four terms; fewer other points cannot predict the one left out


def fit(name: str, measurements: Iterable[Measurement], mixing: Mixing = Mixing.REFUSED) -> Profile:
    """Fit one profile to the rows of one machine.

    Sizes measured more than once are medians. Peaks are the best measured rates; without matmul and copy
    rows there are none, and only the measured layers have a price. Attention that was not measured is
    priced at the peak of products.

    Args:
        mixing: whether rows of different software may be combined; the profile then names all versions.

    Raises:
        ValueError: rows of different machines or software versions, or no rows at all.

    Complexity: O(points^2) for the leave-one-out errors.
    """
    measurement = merge_rows(measurements, mixing)
    if not measurement.rows:
        raise ValueError(f"profile {name!r}: want at least one row, got none")
    precision = _table_precision(measurement)
    table_rows = _at_precision(measurement, precision)
    profile = _profile(name, measurement, table_rows, precision)
    fits = _fits(profile, measurement, table_rows)
    return replace(profile, fits=fits, noise=noise_of(measurement, fits))


def _profile(name: str, measurement: Measurement, table_rows: Measurement, precision: str) -> Profile:
    """The profile without its fits."""
    copies, attentions = _rows_of(measurement, CopyRow), _rows_of(table_rows, AttentionRow)
    pointwise = moved_table(copies, POINTWISE)
    overheads_s, optimizer_s = _overheads_and_optimizer(measurement)
    return Profile(
        name=name,
        device=measurement.header.device,
        memory_bytes=measurement.header.memory_bytes,
        peak_flop_per_s=tuple(sorted(_peaks(measurement).items())),
        peak_bytes_per_s=max((rate for *_, rate in pointwise.points), default=None),
        provenance=_provenance(measurement.header),
        matmul=matmul_table(_rows_of(table_rows, MatmulRow)),
        attention=attention_table(attentions),
        pointwise=pointwise,
        normalization=moved_table(copies, NORMS),
        sustained_products=sustained_products(_rows_of(table_rows, SustainedMatmulRow)),
        sustained_attention=sustained_attention(_rows_of(table_rows, SustainedAttentionRow)),
        attention_backward_rate=attention_backward_rate(attentions) or 1.0,
        attention_head_dim=min({row.head_dim for row in attentions}, default=None),
        table_precision=precision,
        kernel_floor_s=_kernel_floor_s(measurement),
        overheads_s=overheads_s,
        optimizer_s_per_parameter=optimizer_s,
        optimizer_update=_optimizer_update(measurement),
        layers=layer_tables(_rows_of(measurement, LayerRow)),
        links=tuple(_link(scope, *line) for scope, line in _times_by_link(measurement).items()),
        collectives=collective_tables(_rows_of(measurement, CollectiveRow)),
        unmeasured=_missing(measurement),
        yardstick_s=yardstick_s_of(measurement),
    )


def _fits(profile: Profile, measurement: Measurement, table_rows: Measurement) -> tuple[Fit, ...]:
    """Errors of all tables, each predicted without the point it is compared with."""
    tables = [
        ("matmul", profile.matmul),
        ("attention", profile.attention),
        ("copies", profile.pointwise),
        ("norms", profile.normalization),
    ]
    return (
        *table_fits(tables),
        *other_masks_fit(_rows_of(table_rows, AttentionRow), profile.attention),
        *collective_fits(profile.collectives),
        *layer_fits(profile.layers),
        *_link_fits(measurement),
        *sustained_fits(profile),
    )


def _table_precision(measurement: Measurement) -> str:
    """The precision of most products, or of long loops if nothing else was measured."""
    names = [row.precision for row in _rows_of(measurement, MatmulRow)]
    names = names or [row.precision for row in _rows_of(measurement, SustainedMatmulRow)]
    return max(sorted(set(names)), key=names.count, default="") or "float32"


def _at_precision(measurement: Measurement, precision: str) -> Measurement:
    """Rows of products and attention in one precision, from which tables are made."""
    kinds = MatmulRow | AttentionRow | SustainedMatmulRow | SustainedAttentionRow
    rows = (row for row in measurement.rows if isinstance(row, kinds) and row.precision == precision)
    return replace(measurement, rows=tuple(rows))


def _optimizer_update(measurement: Measurement) -> str | None:
    """How AdamW ran; ValueError if it differs between rows."""
    names = sorted({row.update for row in _rows_of(measurement, OptimizerRow)})
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
    """Convert rows to points, one table per layer, precision and grid."""
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
            fold = LayerTable(signature=table.signature, precision=table.precision, points=others)
            predicted = MeasuredLayer(fold).read(Work((left_out.row,) * left_out.rows))
            actual_s = left_out.input_grad_s + left_out.weight_grad_s
            forward.append(abs(predicted.forward_s / left_out.forward_s - 1))
            if actual_s:
                backward.append(abs((predicted.input_grad_s + predicted.weight_grad_s) / actual_s - 1))
    named = (("layers, forward", forward), ("layers, backward", backward))
    return tuple(quality(name, errors) for name, errors in named if errors)


def _rows_of(measurement: Measurement, kind: type[R]) -> list[R]:
    return [row for row in measurement.rows if isinstance(row, kind)]


def _size(row: LayerRow) -> tuple[int, ...]:
    return tuple(getattr(row, name) for name in SIZES)


def _point(rows: Sequence[LayerRow]) -> LayerPoint:
    """Medians over rows of one size."""
    sizes = dict(zip(SIZES, _size(rows[0]), strict=True))
    seconds: dict[str, Any] = {
        name: _median_of([getattr(row, name) for row in rows]) for name in (*COLUMNS, *RECOMPUTED)
    }
    return LayerPoint(**sizes, **seconds)


def _median_of(seconds: Sequence[float | None]) -> float | None:
    known = [second for second in seconds if second is not None]
    return median(known) if known else None


def _peaks(measurement: Measurement) -> dict[str, float]:
    """The best rate by precision; from long loops if nothing else was measured."""
    short, loops = _rows_of(measurement, MatmulRow), _rows_of(measurement, SustainedMatmulRow)
    rows: list[MatmulRow | SustainedMatmulRow] = [*(short or loops)]
    by_precision = grouped(rows, lambda row: row.precision)
    return {
        precision: max(2.0 * row.m * row.n * row.k / row.seconds for row in same)
        for precision, same in by_precision.items()
    }


def _kernel_floor_s(measurement: Measurement) -> float:
    """Time of a kernel that does nothing; if unmeasured, the shortest measured time."""
    launches = [row.seconds for row in _rows_of(measurement, OverheadRow) if row.action == LAUNCH]
    if launches:
        return median(launches)
    copied_s = [row.seconds for row in _rows_of(measurement, CopyRow)]
    return min(copied_s + [row.seconds for row in _rows_of(measurement, MatmulRow)], default=0.0)


def _times_by_link(measurement: Measurement) -> dict[str, tuple[Floats, Floats]]:
    """(ascending bytes, seconds) of each link and of copies to the host and back."""
    timed = [(row.link, row.num_bytes, row.seconds) for row in _rows_of(measurement, LinkRow)]
    timed += [(row.direction, row.num_bytes, row.seconds) for row in _rows_of(measurement, HostCopyRow)]
    return {
        scope: tuple(np.array(sorted((float(size), second) for _, size, second in members)).T)
        for scope, members in grouped(timed, lambda row: row[0]).items()
    }


def _link(scope: str, sizes: Floats, seconds: Floats) -> MachineLink:
    """Latency and bandwidth by non-negative least squares of relative errors."""
    latency_s, s_per_byte = affine_fit(sizes, seconds)
    return MachineLink(
        scope=scope,
        name=scope,
        bytes_per_s=1 / s_per_byte,
        latency_s=latency_s,
        measured=True,
        source="microbenchmark",
    )


def _link_fits(measurement: Measurement) -> list[Fit]:
    """Errors of latency and bandwidth for sizes that were left out."""
    return [
        quality(f"{scope} link", _leave_one_out_errors(sizes, seconds))
        for scope, (sizes, seconds) in _times_by_link(measurement).items()
        if len(sizes) > FEWEST_OF_A_LINK
    ]


def _leave_one_out_errors(sizes: Floats, seconds: Floats) -> list[float]:
    """Errors of all sizes but the smallest and the largest, each predicted from the others.

    If the others do not grow, they predict one time for all sizes: an error, but no reason to refuse the
    fit.
    """
    errors = []
    for index in range(1, len(sizes) - 1):
        kept = np.arange(len(sizes)) != index
        latency_s, s_per_byte = _line(sizes[kept], seconds[kept])
        errors.append(abs(float((latency_s + s_per_byte * sizes[index]) / seconds[index]) - 1))
    return errors


def affine_fit(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """(seconds at size 0, seconds per unit), both >= 0, by least squares of relative errors.

    Raises ValueError when the times do not grow with the size.
    """
    base_s, s_per_unit = _line(sizes, seconds)
    if s_per_unit <= 0:
        raise ValueError(
            f"{len(sizes)} times between {sizes.min():g} and {sizes.max():g} do not grow with the size"
        )
    return base_s, s_per_unit


def _line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    base_s, s_per_unit = relative_fit(np.stack([np.ones_like(sizes), sizes], axis=1), seconds).tolist()
    return base_s, s_per_unit


def _overheads_and_optimizer(
    measurement: Measurement,
) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]:
    """Overheads by action, with an optimizer step's time at no parameters; seconds per parameter."""
    actions = [row for row in _rows_of(measurement, OverheadRow) if row.action != LAUNCH]
    by_action = grouped(actions, lambda row: row.action)
    overheads_s = {action: median(row.seconds for row in rows) for action, rows in by_action.items()}
    per_parameter: dict[str, float] = {}
    by_precision = grouped(_rows_of(measurement, OptimizerRow), lambda row: row.precision)
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
    names = [name for kind, name in kinds.items() if not _rows_of(measurement, kind)]
    if not any(row.action != LAUNCH for row in _rows_of(measurement, OverheadRow)):
        names.append("executor overhead per action: taken as 0")
    if not _rows_of(measurement, SustainedMatmulRow):
        names.append("long loops of products: short loops' rates")
    if not _rows_of(measurement, SustainedAttentionRow):
        names.append("long loops of attention by head width: short loops' rates at one width")
    if not _rows_of(measurement, AttentionRow):
        names.append("attention apart from measured layers: peak rate assumed")
    names += [
        f"compute beside {row.collective} of {row.num_ranks}: {row.beside_s / row.alone_s:.2f} times as long "
        "as alone when measured, not part of any prediction"
        for row in _rows_of(measurement, OverlapRow)
    ]
    return tuple(names)
