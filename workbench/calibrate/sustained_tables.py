"""Rates of long loops from measured rows, with their leave-one-out errors."""

from collections.abc import Callable, Sequence
from statistics import median

from workbench.calibrate.sustained_rows import SustainedAttentionRow, SustainedMatmulRow
from workbench.calibrate.tables import (
    FEWEST_ON_A_LINE,
    SOURCE,
    attention_flop_per_s,
    grouped,
    product_points,
    quality,
    table_fits,
)
from workbench.cost.kernel_times import KernelTimes
from workbench.cost.profile import (
    ATTENTION_AXES,
    PRODUCT_AXES,
    Direction,
    Fit,
    Profile,
    SustainedHeads,
    SustainedProducts,
    Table,
)
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP
from workbench.cost.sustained import (
    HeadWidths,
    Line,
    backward_rate,
    forward_slowdown,
    product_slowdowns,
)

LOOPS = f"{SOURCE}, long loops over operands that take turns"
FORWARD, BACKWARD = "forward", "backward"


def sustained_products(rows: Sequence[SustainedMatmulRow]) -> tuple[SustainedProducts, ...]:
    """FLOP/s by the forward's (m, n, k), direction by direction.

    Raises:
        ValueError: an unknown direction.
    """
    tables = []
    for direction, members in grouped(rows, lambda row: row.direction).items():
        table = Table(axes=PRODUCT_AXES, points=product_points(members), measured=True, source=LOOPS)
        tables.append(SustainedProducts(direction=Direction(direction), table=table))
    return tuple(tables)


def sustained_attention(rows: Sequence[SustainedAttentionRow]) -> tuple[SustainedHeads, ...]:
    """FLOP/s by (length, heads, queries per key), by head width and mask; of sizes with both passes."""
    tables = []
    for (head_dim, mask), members in grouped(rows, lambda row: (row.head_dim, row.mask)).items():
        shapes = grouped(members, lambda row: (row.length, row.heads, row.heads / row.kv_heads))
        with_both_passes = {
            shape: shape_rows
            for shape, shape_rows in shapes.items()
            if {row.direction for row in shape_rows} >= {FORWARD, BACKWARD}
        }
        if with_both_passes:
            forward, backward = (
                _attention_table(with_both_passes, direction) for direction in (FORWARD, BACKWARD)
            )
            tables.append(
                SustainedHeads(head_dim=head_dim, causal=mask == "causal", forward=forward, backward=backward)
            )
    return tuple(tables)


def _attention_table(
    shapes: dict[tuple[int, int, float], list[SustainedAttentionRow]], direction: str
) -> Table:
    scale = ATTENTION_BACKWARD_FLOP if direction == BACKWARD else 1.0
    points = tuple(
        (
            *map(float, at),
            median(scale * attention_flop_per_s(row) for row in same if row.direction == direction),
        )
        for at, same in shapes.items()
    )
    return Table(axes=ATTENTION_AXES, points=points, measured=True, source=LOOPS)


def sustained_fits(profile: Profile) -> tuple[Fit, ...]:
    """Errors of long loops predicted from short loops and the other long ones, by table.

    Products by shape. Attention by length, each inner length from the others of its width, and by head
    width, each inner width from the two beside it: the error at unmeasured widths.
    """
    short = KernelTimes(profile).in_short_loops()
    fits = []
    for product_rates in profile.sustained_products:
        points = product_slowdowns(
            product_rates, lambda gemm: short.matmul_s(gemm, profile.table_precision)[0]
        )
        slowdowns = Table(axes=PRODUCT_AXES, points=tuple(points))
        fits += table_fits([(f"long loops of products, {product_rates.direction}", slowdowns)])
    lines: dict[str, Callable[[SustainedHeads], Line]] = {
        FORWARD: lambda heads: forward_slowdown(heads, short.attention_flop_per_s),
        f"{BACKWARD} over {FORWARD}": backward_rate,
    }
    for name, line_of in lines.items():
        heads_and_lines = [(heads, line_of(heads)) for heads in profile.sustained_attention]
        fits += _fits_by_length(name, [line for _, line in heads_and_lines])
        fits += _fits_by_width(name, heads_and_lines)
    return tuple(fits)


def _fits_by_length(name: str, lines: Sequence[Line]) -> list[Fit]:
    errors = [
        abs(Line(p for p in line.points if p[0] != length).at(length) / ratio - 1)
        for line in lines
        if len(line.points) >= FEWEST_ON_A_LINE
        for length, ratio in sorted(line.points)[1:-1]
    ]
    return [quality(f"long loops of attention, {name}, by length", errors)] if errors else []


def _fits_by_width(name: str, lined: Sequence[tuple[SustainedHeads, Line]]) -> list[Fit]:
    errors = []
    for causal in (False, True):
        alike = [(heads, line) for heads, line in lined if heads.causal is causal]
        for left_out, line in sorted(alike, key=lambda pair: pair[0].head_dim)[1:-1]:
            rest = HeadWidths([pair for pair in alike if pair[0] is not left_out])
            errors += [
                abs(rest.at(left_out.head_dim, causal=causal, length=length) / ratio - 1)
                for length, ratio in line.points
            ]
    return [quality(f"long loops of attention, {name}, by head width", errors)] if errors else []
