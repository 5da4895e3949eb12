"""Turns the rows of a microbenchmark into a profile, with leave-one-out errors per table."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from workbench.calibrate.measurement import (
    CollectiveRow,
    CopyRow,
    LayerRow,
    LinkRow,
    MatmulRow,
    Measurement,
    OptimizerRow,
    OverheadRow,
    merge_rows,
)
from workbench.cost.interpolate import Surface
from workbench.cost.measured import MeasuredLayer
from workbench.cost.profile import (
    CollectiveTable,
    Fit,
    LayerPoint,
    LayerTable,
    MachineLink,
    Profile,
    Provenance,
    Table,
)
from workbench.cost.roofline import RowWork, Work

R = TypeVar("R")
K = TypeVar("K")
MIN_FOLD_POINTS = 4  # a layer's curve has four terms; fewer other points say nothing about the one left out


def fit(name: str, measurements: Iterable[Measurement]) -> Profile:
    """One profile out of the rows of one machine.

    Sizes measured more than once are medians. Peaks are the best rates that were measured;
    without matmul and copy rows there are none, and only the measured layers have a price.

    Raises:
        ValueError: rows of different machines or software versions, or no rows at all.

    Complexity: O(points^2) for the leave-one-out errors.
    """
    measurement = merge_rows(measurements)
    header = measurement.header
    matmuls, copies = _of(measurement, MatmulRow), _of(measurement, CopyRow)
    if not measurement.rows:
        raise ValueError(f"profile {name!r}: want at least one row, got none")
    precision = _most_common([row.precision for row in matmuls]) or "float32"
    matmul = _matmul_table([row for row in matmuls if row.precision == precision])
    pointwise = _copy_table(copies)
    layers = layer_tables(_of(measurement, LayerRow))
    links, link_fits = _links(_of(measurement, LinkRow))
    collectives = _collectives(_of(measurement, CollectiveRow))
    overheads_s, optimizer_s = _overheads_and_optimizer(measurement)
    tables = [("matmul", matmul), ("copies", pointwise)]
    tables += [(f"{found.collective} over {found.scope}", found.table) for found in collectives]
    return Profile(
        name=name,
        device=header.device,
        memory_bytes=header.memory_bytes,
        peak_flop_per_s=tuple(sorted(_peaks(matmuls).items())),
        peak_bytes_per_s=max((rate for *_, rate in pointwise.points), default=None),
        provenance=Provenance(
            date=header.date,
            clocks=header.clocks,
            versions=header.versions,
            sources=(f"measured on {header.device_name}, {header.num_threads} threads a rank",),
        ),
        matmul=matmul,
        pointwise=pointwise,
        table_precision=precision,
        kernel_floor_s=min([row.seconds for row in copies] + [row.seconds for row in matmuls], default=0.0),
        overheads_s=overheads_s,
        optimizer_s_per_parameter=optimizer_s,
        layers=layers,
        links=links,
        collectives=collectives,
        unmeasured=_missing(measurement),
        fits=(*_table_fits(tables), *layer_fits(layers), *link_fits),
    )


def layer_tables(rows: Sequence[LayerRow]) -> tuple[LayerTable, ...]:
    """Rows as points, one table per (signature, precision, tp, cp)."""
    by_layer = _grouped(rows, lambda row: (row.signature, row.precision, row.tp, row.cp))
    tables = []
    for (signature, precision, tp, cp), members in by_layer.items():
        sizes = _grouped(members, lambda row: (row.rows, row.tokens_in, row.attention_area))
        points = tuple(_point(size, same) for size, same in sizes.items())
        tables.append(LayerTable(signature=signature, precision=precision, tp=tp, cp=cp, points=points))
    return tuple(tables)


def layer_fits(tables: Sequence[LayerTable]) -> tuple[Fit, ...]:
    """Errors when each size of each layer is predicted from the layer's other sizes."""
    forward, backward = [], []
    for table in tables:
        if len(table.points) <= MIN_FOLD_POINTS:
            continue
        for left_out in table.points:
            others = tuple(point for point in table.points if point is not left_out)
            rest = LayerTable(signature=table.signature, precision=table.precision, points=others)
            row = RowWork(left_out.tokens_in, left_out.tokens_in, left_out.attention_area)
            predicted = MeasuredLayer(rest).read(Work((row,) * left_out.rows))
            actual_s = left_out.input_grad_s + left_out.weight_grad_s
            forward.append(abs(predicted.forward_s / left_out.forward_s - 1))
            if actual_s:
                backward.append(abs((predicted.input_grad_s + predicted.weight_grad_s) / actual_s - 1))
    named = (("layers, forward", forward), ("layers, backward", backward))
    return tuple(_quality(name, errors) for name, errors in named if errors)


def _of(measurement: Measurement, kind: type[R]) -> list[R]:
    return [row for row in measurement.rows if isinstance(row, kind)]


def _grouped(rows: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    """Rows by key, keys in sorted order, so that the order of rows does not matter."""
    groups: dict[K, list[R]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: str(item[0])))


def _most_common(names: Sequence[str]) -> str:
    return max(sorted(set(names)), key=names.count, default="")


def _point(size: tuple[int, int, int], rows: Sequence[LayerRow]) -> LayerPoint:
    num_rows, tokens_in, area = size
    alone = [row.weight_only_s for row in rows if row.weight_only_s is not None]
    return LayerPoint(
        rows=num_rows,
        tokens_in=tokens_in,
        attention_area=area,
        forward_s=median(row.forward_s for row in rows),
        input_grad_s=median(row.input_grad_s for row in rows),
        weight_grad_s=median(row.weight_grad_s for row in rows),
        weight_only_s=median(alone) if alone else None,
    )


def _matmul_table(rows: Sequence[MatmulRow]) -> Table:
    shapes = _grouped(rows, lambda row: (row.m, row.n, row.k))
    points = tuple(
        (float(m), float(n), float(k), 2.0 * m * n * k / median(row.seconds for row in same))
        for (m, n, k), same in shapes.items()
    )
    return Table(axes=("m", "n", "k"), points=points, measured=bool(points), source="microbenchmark")


def _copy_table(rows: Sequence[CopyRow]) -> Table:
    sizes = _grouped(rows, lambda row: row.num_bytes)
    points = tuple((float(size), size / median(row.seconds for row in same)) for size, same in sizes.items())
    return Table(axes=("bytes",), points=points, measured=bool(points), source="microbenchmark")


def _peaks(rows: Sequence[MatmulRow]) -> dict[str, float]:
    by_precision = _grouped(rows, lambda row: row.precision)
    return {
        precision: max(2.0 * row.m * row.n * row.k / row.seconds for row in same)
        for precision, same in by_precision.items()
    }


def _collectives(rows: Sequence[CollectiveRow]) -> tuple[CollectiveTable, ...]:
    tables = []
    for (collective, scope), members in _grouped(rows, lambda row: (row.collective, row.link)).items():
        sizes = _grouped(members, lambda row: (row.num_ranks, row.num_bytes))
        points = tuple(
            (float(ranks), float(size), size / median(row.seconds for row in same))
            for (ranks, size), same in sizes.items()
        )
        table = Table(axes=("num_ranks", "bytes"), points=points, measured=True, source="microbenchmark")
        tables.append(CollectiveTable(collective=collective, scope=scope, table=table))
    return tuple(tables)


def _links(rows: Sequence[LinkRow]) -> tuple[tuple[MachineLink, ...], list[Fit]]:
    """Latency and bandwidth of each link, by non-negative least squares of relative errors."""
    links, fits = [], []
    for scope, members in _grouped(rows, lambda row: row.link).items():
        sizes, seconds = np.array(sorted((float(row.num_bytes), row.seconds) for row in members)).T
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
        errors = np.abs((latency_s + s_per_byte * sizes) / seconds - 1)
        fits.append(_quality(f"{scope} link, residuals", [float(error) for error in errors]))
    return tuple(links), fits


def affine_fit(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(seconds at size 0, seconds per unit), both >= 0, least relative squares.

    Raises ValueError when the times do not grow with the size.
    """
    scale = float(sizes.max())
    features = np.stack([np.ones_like(sizes), sizes / scale], axis=1) / seconds[:, None]
    solution, _ = nnls(features, np.ones(len(sizes)))
    if solution[1] <= 0:
        raise ValueError(
            f"{len(sizes)} times between {sizes.min():g} and {scale:g} do not grow with the size"
        )
    return float(solution[0]), float(solution[1]) / scale


def _overheads_and_optimizer(
    measurement: Measurement,
) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]:
    """Overheads by action, with what an optimizer step takes at no parameters; seconds per parameter."""
    by_action = _grouped(_of(measurement, OverheadRow), lambda row: row.action)
    overheads_s = {action: median(row.seconds for row in rows) for action, rows in by_action.items()}
    per_parameter: dict[str, float] = {}
    by_precision = _grouped(_of(measurement, OptimizerRow), lambda row: row.precision)
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
        OverheadRow: "executor overhead per action",
        OptimizerRow: "optimizer step",
        LinkRow: "links",
        CollectiveRow: "collectives",
    }
    names = [name for kind, name in kinds.items() if not _of(measurement, kind)]
    return (*names, "attention apart from measured layers: peak rate assumed")


def _table_fits(tables: Sequence[tuple[str, Table]]) -> list[Fit]:
    fits = []
    for name, table in tables:
        if len(table.points) > 1:
            middle, p90 = Surface(table.points).leave_one_out()
            fits.append(Fit(table=name, num_points=len(table.points), median=middle, p90=p90))
    return fits


def _quality(name: str, errors: Sequence[float]) -> Fit:
    middle, p90 = (float(np.quantile(errors, q)) for q in (0.5, 0.9))
    return Fit(table=name, num_points=len(errors), median=middle, p90=p90)
