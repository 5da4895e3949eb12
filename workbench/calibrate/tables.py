"""Rate tables from measured rows of operators and collectives, with their leave-one-out errors."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from workbench.calibrate.measurement import AttentionRow, CollectiveRow, CopyRow, MatmulRow
from workbench.calibrate.sustained_rows import SustainedAttentionRow, SustainedMatmulRow
from workbench.cost.collectives import by_ranks
from workbench.cost.interpolate import Surface
from workbench.cost.profile import (
    ATTENTION_AXES,
    BYTES_AXES,
    COLLECTIVE_AXES,
    PRODUCT_AXES,
    CollectiveTable,
    Fit,
    Table,
)
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP

R = TypeVar("R")
K = TypeVar("K")

SOURCE = "microbenchmark"
NORMS = ("layer_norm", "rms_norm")
POINTWISE = ("add", "gelu", "swiglu")
NUM_DIGITS = 4
FEWEST_ON_A_LINE = 3  # so that one can be left out between two others


def grouped(rows: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    """Group rows by key, keys in sorted order, so that the order of rows does not matter."""
    groups: dict[K, list[R]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: str(item[0])))


def matmul_table(rows: Sequence[MatmulRow]) -> Table:
    """FLOP/s by (m, n, k)."""
    points = product_points(rows)
    return Table(axes=PRODUCT_AXES, points=points, measured=bool(points), source=SOURCE)


def product_points(rows: Sequence[MatmulRow | SustainedMatmulRow]) -> tuple[tuple[float, ...], ...]:
    """(m, n, k, FLOP/s) of each shape, by its median time."""
    shapes = grouped(rows, lambda row: (row.m, row.n, row.k))
    return tuple(
        (float(m), float(n), float(k), 2.0 * m * n * k / median(row.seconds for row in same))
        for (m, n, k), same in shapes.items()
    )


def moved_table(rows: Sequence[CopyRow], operators: Sequence[str]) -> Table:
    """Bytes/s by bytes moved: the median over some memory-bound operators of about one size."""
    octaves = grouped((r for r in rows if r.operator in operators), lambda row: _octave(row.num_bytes))
    points = tuple(
        (median(float(row.num_bytes) for row in same), median(row.num_bytes / row.seconds for row in same))
        for same in octaves.values()
    )
    return Table(axes=BYTES_AXES, points=points, measured=bool(points), source=SOURCE)


def _octave(num_bytes: int) -> int:
    return round(math.log2(num_bytes))


def attention_table(rows: Sequence[AttentionRow]) -> Table:
    """FLOP/s by (length, heads, queries per key) of causal forwards, each by its best launch."""
    causal = [row for row in rows if row.mask == "causal"]
    shapes = grouped(causal, lambda row: (row.length, row.heads, row.heads / row.kv_heads))
    points = tuple(
        (*map(float, shape), max(attention_flop_per_s(row) for row in same)) for shape, same in shapes.items()
    )
    axes = ATTENTION_AXES
    return Table(axes=axes, points=points, measured=bool(points), source=SOURCE)


def attention_flop_per_s(row: AttentionRow | SustainedAttentionRow) -> float:
    """FLOP/s of a forward over the pairs that attend."""
    return 4.0 * row.head_dim * row.pairs * row.heads / row.seconds


def attention_backward_rate(rows: Sequence[AttentionRow]) -> float | None:
    """Backward FLOP/s over forward FLOP/s, the median over all shapes; None if not measured."""
    ratios = [
        ATTENTION_BACKWARD_FLOP * row.seconds / row.backward_s
        for row in rows
        if row.mask == "causal" and row.backward_s
    ]
    return median(ratios) if ratios else None


def collective_tables(rows: Sequence[CollectiveRow]) -> tuple[CollectiveTable, ...]:
    """Bytes/s by (ranks, bytes) of every collective over every link."""
    tables = []
    for (collective, scope), members in grouped(rows, lambda row: (row.collective, row.link)).items():
        sizes = grouped(members, lambda row: (row.num_ranks, row.num_bytes))
        points = tuple(
            (float(ranks), float(size), size / median(row.seconds for row in same))
            for (ranks, size), same in sizes.items()
        )
        table = Table(axes=COLLECTIVE_AXES, points=points, measured=True, source=SOURCE)
        tables.append(CollectiveTable(collective=collective, scope=scope, table=table))
    return tuple(tables)


def table_fits(tables: Sequence[tuple[str, Table]]) -> list[Fit]:
    """Leave-one-out errors of the tables with enough points."""
    fits = []
    for name, table in tables:
        if len(table.points) >= (FEWEST_ON_A_LINE if len(table.axes) == 1 else 2):
            middle, p90 = Surface(table.points).leave_one_out()
            fits.append(Fit(table=name, num_points=len(table.points), median=middle, p90=p90))
    return fits


def collective_fits(tables: Sequence[CollectiveTable]) -> list[Fit]:
    """Leave-one-out errors by number of ranks, as predictions interpolate them."""
    lines = [
        (
            f"{collective.collective} of {num_ranks:g} over {collective.scope}",
            Table(axes=BYTES_AXES, points=tuple(line)),
        )
        for collective in tables
        for num_ranks, line in by_ranks(collective.table).items()
    ]
    return table_fits(lines)


def relative_fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """[features] non-negative seconds per unit of each, least squares of relative errors.

    Args:
        features: [N][features]; seconds: [N].
    """
    scale = features.max(axis=0)
    solution, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
    return np.asarray(solution / scale)


def rounded(value: float) -> float:
    """Round as profiles derived from published figures do."""
    return float(f"{value:.{NUM_DIGITS}g}")


def quality(name: str, errors: Sequence[float]) -> Fit:
    """Median and 90th percentile of errors."""
    middle, p90 = (float(np.quantile(errors, q)) for q in (0.5, 0.9))
    return Fit(table=name, num_points=len(errors), median=middle, p90=p90)


def other_masks_fit(rows: Sequence[AttentionRow], causal: Table) -> list[Fit]:
    """Errors of other masks predicted from the causal table by their pairs."""
    if not causal.points:
        return []
    surface = Surface(causal.points)
    others = [row for row in rows if row.mask != "causal"]
    best = grouped(others, lambda row: (row.mask, row.length, row.heads, row.kv_heads, row.head_dim))
    errors = []
    for same in best.values():
        row = min(same, key=lambda row: row.seconds)
        length = max(1.0, 2.0 * row.pairs / row.length)
        rate = surface.read(length, row.heads * max(1.0, row.length / length), row.heads / row.kv_heads).rate
        errors.append(abs(4.0 * row.head_dim * row.pairs * row.heads / rate / row.seconds - 1))
    return [quality("attention, other masks by their pairs", errors)] if errors else []
