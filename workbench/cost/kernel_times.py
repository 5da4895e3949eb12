"""Prices single kernels on the machine of one profile, under one execution."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from workbench.arrays import Floats
from workbench.cost.eager_scores import HEAD_COPIES
from workbench.cost.execution import ALIGNED_BYTES, AttentionKernel, Execution
from workbench.cost.flash import ends_at_windows, flash_share
from workbench.cost.interpolate import Surface
from workbench.cost.power import clock_share, slowest_share
from workbench.cost.products import BFLOAT16_BYTES, NARROW, ProductFormat, narrow_rate
from workbench.cost.profile import Direction, Profile, Table
from workbench.cost.roofline import Gemm, Grid, Work, attention_flop, attention_pairs, operator_tokens
from workbench.cost.sustained import (
    HeadWidths,
    backward_rate,
    forward_slowdown,
    in_direction,
    product_slowdowns,
)
from workbench.model.layer import Attention, Lookup, Pointwise

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
GROUP_TILE = 128  # rows of a tile of grouped products on Hopper and Blackwell


class KernelTimes:
    """Times of products, attentions and memory-bound kernels, read from a profile's tables.

    Rates of short loops give the dependence on shape. Where the profile also has rates of long loops, times
    are multiplied by the slowdown of those: for a product by shape, for attention by head width, mask and
    length.
    """

    def __init__(self, profile: Profile, execution: Execution | None = None) -> None:
        self.profile = profile
        self.execution = (execution or Execution()).on(profile)
        self._matmul = _surface(profile.matmul)
        self._attention = _surface(profile.attention)
        self._pointwise = _surface(profile.pointwise)
        self._normalization = _surface(profile.normalization) or self._pointwise
        self._products: dict[tuple[Gemm, str], tuple[float, bool]] = {}
        short = self.in_short_loops() if profile.sustained_products or profile.sustained_attention else self
        slowdowns = {
            products.direction: product_slowdowns(
                products, lambda gemm: short.matmul_s(gemm, profile.table_precision)[0]
            )
            for products in profile.sustained_products
        }
        self._slowdowns = {direction: Surface(points) for direction, points in slowdowns.items()}
        self._speedups = {
            direction: Surface([(*shape, 1.0 / ratio) for *shape, ratio in points])
            for direction, points in slowdowns.items()
        }
        heads = profile.sustained_attention
        self._head_slowdowns = HeadWidths(
            [(h, forward_slowdown(h, short.attention_flop_per_s)) for h in heads]
        )
        self._head_backward = HeadWidths([(h, backward_rate(h)) for h in heads])

    def in_short_loops(self) -> "KernelTimes":
        """The times of short loops alone, under the default execution."""
        return KernelTimes(replace(self.profile, sustained_products=(), sustained_attention=()))

    def product_s(self, gemm: Gemm, direction: Direction, precision: str) -> tuple[float, bool]:
        """Seconds of a layer's product in one direction, given the forward's shape; see `matmul_s`."""
        seconds, inside = self.matmul_s(in_direction(gemm, direction), precision)
        slowdown = self._slowdowns.get(direction)
        return (seconds * slowdown.read(*gemm).rate if slowdown and gemm.flop else seconds), inside

    def linear_s(
        self, gemm: Gemm, direction: Direction, precision: str, narrow: ProductFormat, *, num_grouped: int = 1
    ) -> tuple[float, bool]:
        """Seconds of a linear layer's product in one direction and format, without casts.

        A grouped kernel pads each product's rows to whole tiles, half a tile on average; it takes the time of
        one product with the rows of all, and at least the time to move operands and results.
        """
        if num_grouped > 1 and gemm.flop:
            return self._grouped_s(gemm, direction, precision, narrow, num_grouped)
        seconds, inside = self.product_s(gemm, direction, precision)
        return self._narrowed_s(seconds, gemm, narrow), inside

    def _grouped_s(
        self, gemm: Gemm, direction: Direction, precision: str, narrow: ProductFormat, num: int
    ) -> tuple[float, bool]:
        padded = in_direction(gemm._replace(m=gemm.m + GROUP_TILE / 2), direction)
        batch = padded._replace(m=padded.m * num)
        seconds, inside = self.matmul_s(batch, precision)
        moved_s = self.moved_s(num * gemm.num_bytes(ELEMENT_BYTES[precision]))
        return max(self._narrowed_s(seconds, batch, narrow), moved_s), inside

    def _narrowed_s(self, seconds: float, gemm: Gemm, narrow: ProductFormat) -> float:
        if narrow is ProductFormat.SAME or not seconds:
            return seconds
        operands = (gemm.m * gemm.k + gemm.k * gemm.n) * NARROW[narrow].element_bytes
        moved_s = self.moved_s(operands + gemm.m * gemm.n * BFLOAT16_BYTES)
        return self._floor(max(seconds / narrow_rate(self.profile, narrow), moved_s))

    def cast_s(self, elements: float, narrow: ProductFormat) -> float:
        """Seconds to cast elements for the products of both passes."""
        if narrow is ProductFormat.SAME:
            return 0.0
        return self.moved_s(elements * NARROW[narrow].cast_bytes / NARROW[narrow].cast_rate)

    def casts_s(self, gemm: Gemm, narrow: ProductFormat, count: int = 1) -> tuple[float, float, float]:
        """Seconds of casts around `count` alike products, by direction."""
        if narrow is ProductFormat.SAME:
            return 0.0, 0.0, 0.0
        format_ = NARROW[narrow]
        inputs, results = count * gemm.m * gemm.k, count * gemm.m * gemm.n
        later_bytes = (inputs + results) * format_.later_cast_bytes
        weights_bytes = (count * gemm.k * gemm.n * num_bytes for num_bytes in format_.weight_cast_bytes)
        forward_s, input_grad_s, weight_grad_s = (
            self.moved_s(num_bytes / format_.cast_rate) if num_bytes else 0.0
            for num_bytes in (*weights_bytes, later_bytes)
        )
        return (
            forward_s + self.cast_s(inputs, narrow),
            input_grad_s + self.cast_s(results, narrow),
            weight_grad_s,
        )

    @cached_property
    def ends_at_windows(self) -> bool:
        """Whether attention skips what windows and chunks hide; attention with stored scores does not."""
        run = self.execution
        is_fused = run.attention is AttentionKernel.FUSED
        return is_fused and ends_at_windows(run.flash, self.profile.flash_generation)

    def computed(self, work: Work) -> Work:
        """The work with the query-key pairs that attention really computes."""
        return work if self.ends_at_windows else work.whole

    @cached_property
    def clock_share(self) -> float:
        """The slowest device's clock under the power limit, over the clock behind the profile's rates."""
        run, power = self.execution, self.profile.power
        spread = power.clock_spread if power else 0.0
        return clock_share(run.power_limit_w, power) * slowest_share(run.num_devices, spread)

    @cached_property
    def product_share(self) -> float:
        """The share of product rates in short loops that training sustains at that clock."""
        power = self.profile.power
        return self.clock_share * (power.sustained_products if power else 1.0)

    def matmul_s(self, gemm: Gemm, precision: str) -> tuple[float, bool]:
        """Seconds of a product in a short loop, and whether its shape is inside the measured range.

        Tables have products of few rows, but not of few columns: one with fewer columns than any measured is
        read as its transposed. A shape that is still below the smallest measured one takes the time of the
        smallest; an empty one takes 0. Equal products are priced once.
        """
        key = gemm, precision
        priced = self._products.get(key)
        if priced is None:
            priced = self._products[key] = self._matmul_s(gemm, precision)
        return priced

    def _matmul_s(self, gemm: Gemm, precision: str) -> tuple[float, bool]:
        flop = gemm.flop
        if flop == 0:
            return 0.0, True
        size = ELEMENT_BYTES[precision]
        factor = self.execution.matmul_factor(*gemm, element_bytes=size) * self.product_share
        peak = self.profile.peak(precision) * factor
        if self._matmul is None:
            moved_s = gemm.num_bytes(size) / self.profile.memory_bytes_per_s
            return self._floor(max(flop / peak, moved_s)), True
        shape = gemm.transposed if gemm.n < min(gemm.m, self._matmul.low[1]) else gemm
        padded = Gemm(*map(max, shape, self._matmul.low))
        reading = self._matmul.read(*padded)
        rate = reading.rate * peak / self.profile.peak(self.profile.table_precision)
        if padded != shape:
            return self._floor(padded.flop / rate), False
        return self._floor(flop / rate), reading.inside and shape == gemm

    def most_product_flop_per_s(self, precision: str) -> float:
        """An upper bound on the FLOP/s of all products: the fastest measured one's, in its best direction.

        Casts to narrow formats count as free.
        """
        peak = self._most_rate(precision)
        if self._matmul is not None:
            peak *= self._matmul.extremes[1] / self.profile.peak(self.profile.table_precision)
        return peak / min([1.0, *(slowdown.extremes[0] for slowdown in self._slowdowns.values())])

    def _most_rate(self, precision: str) -> float:
        """An upper bound on the FLOP/s of products without tables."""
        run = self.execution
        peak = self.profile.peak(precision) * run.matmul_rate * self.product_share
        peak *= max(1.0, run.unaligned_rate) ** (ALIGNED_BYTES.bit_length() - 1)
        if run.products is not ProductFormat.SAME:
            peak *= max(1.0, narrow_rate(self.profile, run.products))
        return peak

    def most_products_flop_per_s(
        self, rows: Floats, columns: tuple[float, float], direction: Direction, precision: str
    ) -> Floats:
        """[ranges] `most_product_flop_per_s` for rows between neighbouring values; n and k are `columns`."""
        shape = Gemm(float(rows[0]), *columns)
        rates = np.full(len(rows) - 1, self._most_rate(precision))
        if self._matmul is not None:
            own, axis = in_direction(shape, direction), in_direction(Gemm(0, 1, 2), direction).index(0)
            most = self._most_readings(self._matmul, rows, own, axis)
            if own.n < self._matmul.low[1]:
                turned_axis = (1, 0, 2)[axis]
                most = np.maximum(most, self._most_readings(self._matmul, rows, own.transposed, turned_axis))
            rates *= most / self.profile.peak(self.profile.table_precision)
        if direction in self._speedups:
            rates *= self._speedups[direction].most_along(0, rows, shape)
        return rates

    @staticmethod
    def _most_readings(table: Surface, rows: Floats, shape: Gemm, axis: int) -> Floats:
        """[ranges] upper bounds on a table's FLOP/s for products whose rows are the coordinate `axis`."""
        most = table.most_along(axis, rows, shape)
        for dimension, low in enumerate(table.low):  # smaller sizes take the time of the smallest
            sizes = rows[1:] if dimension == axis else shape[dimension]
            most = most / np.maximum(1.0, low / sizes)
        return most

    def most_attention_flop_per_s(
        self,
        operator: Attention,
        precision: str,
        between: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> tuple[float, float]:
        """Upper bounds on a fused attention's forward FLOP/s, and on its backward's rate over the forward's.

        Args:
            between: smallest and largest (length, heads) of a launch, see `attention_s`; None: any.
        """
        run = self.execution
        rate = self.profile.peak(precision) * run.attention_rate * self.clock_share
        rate *= flash_share(run.flash, self.profile.flash_generation)
        if self._attention is not None:
            ratio = operator.num_heads / operator.num_kv_heads
            table_rate = (
                self._attention.extremes[1]
                if between is None
                else self._attention.most(*((*corner, ratio) for corner in between))
            )
            rate *= table_rate / self.profile.peak(self.profile.table_precision)
        (short, *_), (long, *_) = between or ((1.0,), (inf,))
        least, _ = self._head_slowdowns.extremes(operator.mean_dim, short, long, causal=operator.causal)
        factor = run.attention_backward_factor(operator.mean_dim)
        if not self._head_backward.covers(operator.mean_dim):
            return rate / least, self.profile.attention_backward_rate * factor
        _, most = self._head_backward.extremes(operator.mean_dim, short, long, causal=operator.causal)
        return rate / least, most * factor

    def most_moved_bytes_per_s(self, operator: Pointwise | Lookup | None = None) -> float:
        """An upper bound on the bytes/s of a memory-bound kernel."""
        is_norm = isinstance(operator, Pointwise) and operator.weights
        surface = self._normalization if is_norm else self._pointwise
        rate = surface.extremes[1] if surface else self.profile.memory_bytes_per_s
        return rate * self.execution.memory_rate

    def least_update_s(self, num_bytes: float) -> float:
        """A lower bound on the seconds of optimizer steps that move `num_bytes` together."""
        rate = self._pointwise.extremes[1] if self._pointwise else self.profile.memory_bytes_per_s
        return num_bytes / (rate * self.execution.step_rate)

    def attention_s(self, operator: Attention, work: Work, grid: Grid, precision: str) -> tuple[float, bool]:
        """Seconds of the forward kernel, and whether its shape is inside the measured range.

        A row of several sequences counts as that many times the heads at their mean length.
        """
        flop = attention_flop(operator, work, grid)
        run = self.execution
        peak = self.profile.peak(precision) * run.attention_rate * self.clock_share
        peak *= flash_share(run.flash, self.profile.flash_generation)
        if operator_tokens(operator, work, grid) == 0:
            return 0.0, True
        if run.attention is not AttentionKernel.FUSED:
            return self._scores_s(operator, work, grid, precision, Direction.FORWARD), True
        length = length_of(operator, work, grid)
        slowdown = self._head_slowdowns.at(operator.mean_dim, causal=operator.causal, length=length)
        if self._attention is None or flop == 0:
            return self._floor(flop / peak * slowdown), True
        queries = operator_tokens(operator, work, grid) * grid.cp
        heads = operator.num_heads / grid.tp * max(1.0, queries / length)
        reading = self._attention.read(length, heads, operator.num_heads / operator.num_kv_heads)
        rate = reading.rate * peak / self.profile.peak(self.profile.table_precision)
        return self._floor(flop / rate * slowdown), reading.inside

    def attention_flop_per_s(self, length: float, heads: float, queries_per_key: float) -> float:
        """The forward's rate in a short loop by the table, or the peak of products without one."""
        if self._attention is None:
            return self.profile.peak(self.profile.table_precision)
        return self._attention.read(length, heads, queries_per_key).rate

    def attention_backward_rate(self, operator: Attention, work: Work, grid: Grid) -> float:
        """Backward FLOP/s over forward FLOP/s: by head width where measured, else the profile's value."""
        factor = self.execution.attention_backward_factor(operator.mean_dim)
        if not self._head_backward.covers(operator.mean_dim) or not operator_tokens(operator, work, grid):
            return self.profile.attention_backward_rate * factor
        length = length_of(operator, work, grid)
        return self._head_backward.at(operator.mean_dim, causal=operator.causal, length=length) * factor

    def attention_doubts(self, operator: Attention) -> Iterator[str]:
        """Yield what was not measured for such attention: its width, backward or mask."""
        profile, width = self.profile, operator.mean_dim
        heads = profile.sustained_attention
        is_covered = self._head_backward.covers(width) and all(table.forward.measured for table in heads)
        if not is_covered:
            yield "backward of attention"
        if not is_covered and profile.attention_head_dim not in (None, width):
            yield f"attention with heads of {width:g}"
        has_mask = operator.causal or self._head_backward.has_mask(causal=False)
        if profile.attention.points and not has_mask:
            yield "attention without a causal mask"

    def stored_backward_s(self, operator: Attention, work: Work, grid: Grid, precision: str) -> float:
        """Backward seconds with stored scores: four products, two for each of the forward's, and passes."""
        if operator_tokens(operator, work, grid) == 0:
            return 0.0
        return self._scores_s(operator, work, grid, precision, Direction.INPUT_GRAD)

    def chunks_s(self, flop: float, num_bytes: float, product: Gemm, precision: str) -> float:
        """Seconds of kernels over chunks: of their FLOP at the rate of such a product, or of their bytes."""
        rate = self._rate(product, precision) * self.product_share
        return max(self._floor(flop / rate), self.moved_s(num_bytes)) if flop else 0.0

    def _scores_s(
        self, operator: Attention, work: Work, grid: Grid, precision: str, direction: Direction
    ) -> float:
        """Seconds of products over all scores, masked ones too, and of passes over stored scores.

        Each product is bounded by one read or write of all scores. PyTorch's calls over scores stream, and
        heads are copied for its batched products.
        """
        run, queries = self.execution, operator_tokens(operator, work, grid)
        is_forward, size = direction is Direction.FORWARD, ELEMENT_BYTES[precision]
        keys = operator.num_keys or work.sums.longest * operator.tokens_scale
        scores = queries * keys * operator.num_heads / grid.tp
        rate = self._rate(Gemm(scores / keys, keys, operator.mean_dim), precision) * run.attention_rate
        pass_s = self.moved_s(scores * size / run.scores_rate)
        product_s = max(self._floor(2.0 * operator.mean_dim * scores / (rate * self.product_share)), pass_s)
        products_s = (2 if is_forward else 4) * product_s
        if calls := run.eager_scores(operator):
            moved = scores * (calls.forward if is_forward else calls.backward).bytes_per_element(size)
            heads = queries * operator.num_heads * operator.mean_dim / grid.tp
            return (
                products_s + self.moved_s(moved) + self.moved_s(heads * HEAD_COPIES.bytes_per_element(size))
            )
        return products_s + (run.scores_passes if is_forward else run.scores_backward_passes) * pass_s

    def _rate(self, gemm: Gemm, precision: str) -> float:
        """FLOP/s of a batch of such products: the table's at the batch's size, or the peak without one."""
        peak = self.profile.peak(precision)
        if self._matmul is None:
            return peak
        most = float(self._matmul.low[0])
        reading = self._matmul.read(max(gemm.m, most), *map(max, gemm[1:], self._matmul.low[1:]))
        return reading.rate * peak / self.profile.peak(self.profile.table_precision)

    def moved_s(self, num_bytes: float, operator: Pointwise | Lookup | None = None) -> float:
        """Seconds of one memory-bound kernel; norms have their own rates."""
        if num_bytes == 0:
            return 0.0
        is_norm = isinstance(operator, Pointwise) and operator.weights
        surface = self._normalization if is_norm else self._pointwise
        rate = surface.read(num_bytes).rate if surface else self.profile.memory_bytes_per_s
        return self._floor(num_bytes / (rate * self.execution.memory_rate))

    def update_s(self, num_bytes: float) -> float:
        """Seconds of an optimizer step that moves `num_bytes`."""
        if num_bytes == 0:
            return 0.0
        rate = self._pointwise.read(num_bytes).rate if self._pointwise else self.profile.memory_bytes_per_s
        run = self.execution
        return self._floor(num_bytes / (rate * run.step_rate)) + run.step_start_s

    def _floor(self, seconds: float) -> float:
        return max(seconds, self.profile.kernel_floor_s)


def _surface(table: Table) -> Surface | None:
    return Surface(table.points) if table.points else None


def length_of(operator: Attention, work: Work, grid: Grid) -> float:
    """Length of sequences, by the mean number of keys a query; at least 1."""
    queries = operator_tokens(operator, work, grid) * grid.cp
    keys = attention_pairs(operator, work, grid) * grid.cp / queries
    return max(1.0, keys * 2.0 if operator.causal else keys)
