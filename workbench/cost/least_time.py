"""Seconds that a layer takes at least, on however many ranks and in however many calls."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from workbench.cost.execution import AttentionKernel, Lookups
from workbench.cost.kernel_times import length_of
from workbench.cost.measured import MeasuredLayer
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import OperatorPasses
from workbench.cost.profile import Direction
from workbench.cost.roofline import (
    ATTENTION_BACKWARD_FLOP,
    Gemm,
    Grid,
    RowWork,
    Work,
    attention_flop,
    forward_flop,
    gemm_of,
    operator_tokens,
)
from workbench.cost.sustained import in_direction
from workbench.model.experts import num_experts
from workbench.model.layer import Attention, Layer, Lookup, Matmul, Pointwise, Shard
from workbench.schedule.action import Pass

WHOLE = Grid()  # the layer uncut
LONG = 16384  # tokens of the causal launch at whose rate attention is simulated tile by tile
FEWEST = 1e-3  # tokens of a call: fewer than any has


class LeastTime(NamedTuple):
    """Seconds times ranks of a layer's passes.

    Args:
        forward_s: F.
        input_grad_s, weight_grad_s: gradients to its input and of its weights.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float

    def __add__(self, other: object) -> "LeastTime":
        """Pass by pass."""
        assert isinstance(other, LeastTime)
        return LeastTime(*(own + its for own, its in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> "LeastTime":
        """Every pass."""
        return LeastTime(*(factor * seconds for seconds in self))


NOTHING = LeastTime(0.0, 0.0, 0.0)


class LeastTimes:
    """What layers take at least whose calls take rows out of a stock, in whatever parts.

    Products and fused attention at the best rate that the profile gives to any shape which a call can
    have: its features cut among as many tensor-parallel ranks as can be, its tokens any number up to the
    stock's; memory-bound kernels at their best rate, without what does not grow with tokens; collectives,
    launches and overheads for nothing; layers measured whole by their fit without what a call takes. What
    cross-attention takes is left out; layers with experts have the best rate of any shape.

    Why it holds: on tp x cp ranks a call does 1 / (tp cp) of each product, and no less of the rest, so ranks
    times seconds are FLOP over a rate (bytes over one) that this rate is no less than; FLOP and bytes add up
    over calls. Keys a query of a call lie between the fewest and the most of its rows', as a mean does.
    Ranks among which tokens are shared unevenly may be priced by one that has fewer: then it holds only as
    far as that one's share.

    Args:
        cost: the machine, under its execution.
        precision: of activations and weights.
        stock: all rows that calls may have.
        num_ranks: most tensor-parallel ranks.
        cuts_tokens: whether context-parallel ranks may share tokens: then attention may be simulated tile
            by tile, at the rate of a long causal launch and no better, or go block by block, over fewer keys,
            and of late queries over twice as many as in the mean.
    """

    def __init__(
        self, cost: CostModel, precision: str, stock: Work, *, num_ranks: int, cuts_tokens: bool
    ) -> None:
        self._cost, self._precision, self._stock = cost, precision, stock
        self._num_ranks, self._cuts_tokens = num_ranks, cuts_tokens
        self._products: dict[tuple[object, ...], float] = {}
        self._attentions: dict[Attention, tuple[float, float]] = {}

    def of(self, layer: Layer, work: Work) -> LeastTime:
        """Of passes over some rows of the stock, on all of their ranks together.

        It adds up over calls: that of all rows is no more than the sum of those of its parts.

        Complexity: O(operators + measured grids), and one bound of a table for every shape not yet seen.
        """
        if layer.reads_context:
            return NOTHING
        measured = self._cost.measured_on(layer, self._precision)
        found = [_measured(each, work, grid.tp * grid.cp) for grid, each in measured]
        if all(grid != WHOLE for grid, _ in measured):  # else other grids are scaled from one rank
            found.append(self._composed(layer, work))
        profile, kinds = self._cost.profile, (Pass.F, Pass.B, Pass.I, Pass.W)
        factor = min(min(profile.pipeline_factor(kind), profile.alone_factor(kind)) for kind in kinds)
        return LeastTime(*(factor * min(seconds) for seconds in zip(*found, strict=True)))

    def _composed(self, layer: Layer, work: Work) -> LeastTime:
        total = NOTHING
        tps = tuple(self._degrees(layer))
        for operator in layer.operators:
            if isinstance(operator, Matmul):
                total += self._product(operator, work, () if num_experts(layer) else tps)
            elif isinstance(operator, Attention):
                total += self._attention(operator, work)
            elif not num_experts(layer):
                total += self._moved(operator, work)
        return total

    def _degrees(self, layer: Layer) -> Iterator[tuple[int, int]]:
        """Ranges of tensor-parallel degrees: divisors of the heads one by one, else octaves."""
        heads = [each.num_kv_heads for each in layer.operators if isinstance(each, Attention)]
        if heads:
            common = math.gcd(*heads)
            yield from ((tp, tp) for tp in range(1, min(common, self._num_ranks) + 1) if common % tp == 0)
            return
        yield 1, 1
        low = 2
        while low <= self._num_ranks:
            yield low, min(2 * low, self._num_ranks)
            low *= 2

    def _product(self, operator: Matmul, work: Work, tps: tuple[tuple[int, int], ...]) -> LeastTime:
        flop = forward_flop(operator, work, WHOLE)
        if not flop:
            return NOTHING
        return LeastTime(*(flop / self._product_rate(operator, tps, direction) for direction in Direction))

    def _product_rate(
        self, operator: Matmul, tps: tuple[tuple[int, int], ...], direction: Direction
    ) -> float:
        """The best of all degrees; of any shape where none is given."""
        whole = gemm_of(operator, self._stock, WHOLE)
        key = whole, operator.shard, tps, direction
        if key not in self._products:
            boxes = [_box(whole, operator.shard, tp) for tp in tps]
            self._products[key] = max(
                (
                    self._cost.most_product_flop_per_s(
                        self._precision, *(in_direction(corner, direction) for corner in box)
                    )
                    for box in boxes
                ),
                default=self._cost.most_product_flop_per_s(self._precision),
            )
        return self._products[key]

    def _attention(self, operator: Attention, work: Work) -> LeastTime:
        flop = attention_flop(operator, work, WHOLE)
        if self._cost.execution.attention is not AttentionKernel.FUSED or not flop:
            return NOTHING
        if operator not in self._attentions:
            self._attentions[operator] = self._attention_rates(operator)
        rate, backward = self._attentions[operator]
        forward_s = flop / rate
        return LeastTime(forward_s, forward_s * ATTENTION_BACKWARD_FLOP / backward, 0.0)

    def _attention_rates(self, operator: Attention) -> tuple[float, float]:
        """FLOP/s of a forward, and of a backward over these."""
        rows = [Work((row,)) for row in self._stock.rows]
        rows = [row for row in rows if operator_tokens(operator, row, WHOLE) > 0]
        lengths = [length_of(operator, row, WHOLE) for row in rows]
        queries = operator_tokens(operator, self._stock, WHOLE)
        short, long = (1.0, 2.0 * max(lengths)) if self._cuts_tokens else (min(lengths), max(lengths))
        fewest = 1.0 if self._cuts_tokens else operator.num_heads / operator.num_kv_heads
        most = operator.num_heads * max(1.0, queries / short)
        rate, backward = self._cost.most_attention_flop_per_s(
            operator, self._precision, (short, fewest), (long, most)
        )
        if not self._cuts_tokens:
            return rate, backward
        causal = Attention(
            name=operator.name,
            num_heads=operator.num_heads,
            num_kv_heads=operator.num_kv_heads,
            head_dim=operator.head_dim,
            causal=True,
        )
        launch = Work((RowWork(LONG, LONG, LONG * (LONG + 1) // 2),))
        launch_s, _ = self._cost.attention_s(causal, launch, WHOLE, self._precision)
        tiled = attention_flop(causal, launch, WHOLE) / launch_s
        return max(rate, tiled), max(backward, self._cost.attention_backward_rate(causal, launch, WHOLE))

    def _moved(self, operator: Pointwise | Lookup, work: Work) -> LeastTime:
        if isinstance(operator, Lookup) and self._cost.execution.lookups is Lookups.PRODUCTS:
            return NOTHING
        moved = OperatorPasses(self._cost, work, WHOLE, self._precision, set()).moved_bytes(operator)
        rate = self._cost.most_moved_bytes_per_s(operator)
        weights = (
            min(moved.input_grad, moved.weight_grad) if isinstance(operator, Lookup) else moved.weight_grad
        )
        return LeastTime(moved.forward / rate, moved.input_grad / rate, weights / rate)


def _box(whole: Gemm, shard: Shard, tp: tuple[int, int]) -> tuple[Gemm, Gemm]:
    """Least and most sizes of a product of the stock on so many ranks, with any number of its tokens."""
    few, many = tp
    fewest = min(FEWEST, whole.m)
    if shard is Shard.COLUMN:
        return Gemm(fewest, whole.n / many, whole.k), whole._replace(n=whole.n / few)
    if shard is Shard.ROW:
        return Gemm(fewest, whole.n, whole.k / many), whole._replace(k=whole.k / few)
    return whole._replace(m=fewest), whole


def _measured(measured: MeasuredLayer, work: Work, num_ranks: int) -> LeastTime:
    time = measured.least_s(work)
    return LeastTime(
        num_ranks * min(time.forward_s, time.forward_only_s),
        num_ranks * min(time.input_grad_s, time.split_input_s),
        num_ranks * min(time.weight_grad_s, time.split_weight_s),
    )
