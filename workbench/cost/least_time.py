"""Seconds that a layer takes at least, on however many ranks and in however many calls."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

from workbench.cost.execution import AttentionKernel, Lookups
from workbench.cost.kernel_times import length_of
from workbench.cost.measured import MeasuredLayer
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import OperatorPasses
from workbench.cost.profile import Direction
from workbench.cost.roofline import (
    ATTENTION_BACKWARD_FLOP,
    Grid,
    RowWork,
    Work,
    attention_flop,
    gemm_of,
    operator_tokens,
)
from workbench.model.experts import num_experts
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, Lookup, Matmul, Pointwise
from workbench.schedule.action import Pass

WHOLE = Grid()  # the layer uncut
LONG = 16384  # tokens of the causal launch at whose rate attention is simulated tile by tile


class LeastTime(NamedTuple):
    """Seconds times ranks of passes.

    Args:
        way_s: forward, and gradients through the layers, which others wait for.
        weights_s: gradients of weights, for which nobody waits: what all take more than that at least.
    """

    way_s: float
    weights_s: float

    @property
    def all_s(self) -> float:
        return self.way_s + self.weights_s

    def __add__(self, other: object) -> "LeastTime":
        """Of both."""
        assert isinstance(other, LeastTime)
        return LeastTime(*(own + its for own, its in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> "LeastTime":
        """Every pass."""
        return LeastTime(*(factor * seconds for seconds in self))


NOTHING = LeastTime(0.0, 0.0)


def least_of(times: Iterable[LeastTime]) -> LeastTime:
    """What no one of several is below: the least way, and the least of all passes."""
    found = list(times)
    way_s = min(each.way_s for each in found)
    return LeastTime(way_s, min(each.all_s for each in found) - way_s)


class LeastTimes:
    """What layers take at least whose calls take rows out of a stock, in whatever parts.

    Products at the rates that the profile gives to the best number of tokens and tensor-parallel ranks of a
    call, which are the same for all products of a layer and in all passes over one microbatch, see
    `LeastProducts`. Fused attention at the best rate that a call can have; memory-bound kernels
    at their best rate, without what does not grow with tokens; collectives, launches and overheads for
    nothing; layers measured whole by their fit without what a call takes. What cross-attention takes is left
    out; layers with experts have the best rate of any shape.

    Why it holds: on tp x cp ranks a call does 1 / (tp cp) of each product, and no less of the rest, so ranks
    times seconds are FLOP over a rate (bytes over one) that this rate is no less than; FLOP and bytes add up
    over calls. Keys a query of a call lie between the fewest and the most of its rows', as a mean does.
    Ranks that share tokens unevenly take as long as the slowest, which is no less than their mean.

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
        self._attentions: dict[Attention, tuple[float, float]] = {}

    def cutting_tokens(self) -> "LeastTimes":
        """The same where context-parallel ranks share tokens; what products take is worked out once."""
        other = copy(self)
        other._cuts_tokens, other._attentions = True, {}
        return other

    def of(self, layer: Layer, work: Work, needs: Needs) -> LeastTime:
        """Of passes over some rows of the stock, on all of their ranks together.

        It adds up over calls: that of all rows is no more than the sum of those of its parts.

        Args:
            needs: which gradients it computes.

        Complexity: O(operators + measured grids), and that of `LeastProducts.seconds`.
        """
        if layer.reads_context:
            return NOTHING
        measured = self._cost.measured_on(layer, self._precision)
        found = [_measured(each, work, grid.tp * grid.cp, needs) for grid, each in measured]
        if all(grid != WHOLE for grid, _ in measured):  # else other grids are scaled from one rank
            found.append(self._composed(layer, work, needs))
        profile, kinds = self._cost.profile, (Pass.F, Pass.B, Pass.I, Pass.W)
        factor = min(min(profile.pipeline_factor(kind), profile.alone_factor(kind)) for kind in kinds)
        return least_of(found).scaled(factor)

    def _composed(self, layer: Layer, work: Work, needs: Needs) -> LeastTime:
        total, products = NOTHING, defaultdict(list)
        for operator in layer.operators:
            if isinstance(operator, Matmul):
                products[operator.tokens, operator.tokens_scale].append(operator)
            elif isinstance(operator, Attention):
                total += self._attention(operator, work, needs)
            elif not num_experts(layer):
                total += self._moved(operator, work, needs)
        tps = () if num_experts(layer) else tuple(self._degrees(layer))
        return sum((self._of_products(each, work, tps, needs) for each in products.values()), total)

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

    def _of_products(
        self, products: Sequence[Matmul], work: Work, tps: tuple[tuple[int, int], ...], needs: Needs
    ) -> LeastTime:
        """Of those with the same tokens."""
        tokens, stock = (operator_tokens(products[0], each, WHOLE) for each in (work, self._stock))
        if not tokens:
            return NOTHING
        least = self._cost.least_products(self._precision)
        kinds = Counter((gemm_of(each, work, WHOLE), each.shard) for each in products)
        way = (Direction.FORWARD, *[Direction.INPUT_GRAD] * needs.input_grad)
        every = (*way, *[Direction.WEIGHT_GRAD] * needs.weight_grad)
        way_s, all_s = (least.seconds(kinds, tps, each, stock) for each in (way, every))
        return LeastTime(way_s, max(all_s - way_s, 0.0))

    def _attention(self, operator: Attention, work: Work, needs: Needs) -> LeastTime:
        flop = attention_flop(operator, work, WHOLE)
        if self._cost.execution.attention is not AttentionKernel.FUSED or not flop:
            return NOTHING
        if operator not in self._attentions:
            self._attentions[operator] = self._attention_rates(operator)
        rate, backward = self._attentions[operator]
        forward_s = flop / rate
        backward_s = forward_s * ATTENTION_BACKWARD_FLOP / backward
        return LeastTime(forward_s + needs.input_grad * backward_s, 0.0)

    def _attention_rates(self, operator: Attention) -> tuple[float, float]:
        """FLOP/s of a forward, and of a backward over these."""
        rows = [Work((row,)) for row in dict.fromkeys(self._stock.rows)]
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

    def _moved(self, operator: Pointwise | Lookup, work: Work, needs: Needs) -> LeastTime:
        if isinstance(operator, Lookup) and self._cost.execution.lookups is Lookups.PRODUCTS:
            return NOTHING
        moved = OperatorPasses(self._cost, WHOLE, self._precision).moved_bytes(operator, work)
        rate = self._cost.most_moved_bytes_per_s(operator)
        weights = (
            min(moved.input_grad, moved.weight_grad) if isinstance(operator, Lookup) else moved.weight_grad
        )
        way = moved.forward + needs.input_grad * moved.input_grad
        return LeastTime(way / rate, needs.weight_grad * weights / rate)


def _measured(measured: MeasuredLayer, work: Work, num_ranks: int, needs: Needs) -> LeastTime:
    time = measured.least_s(work)
    way_s = min(time.forward_s, time.forward_only_s)
    way_s += needs.input_grad * min(time.input_grad_s, time.split_input_s)
    weights_s = needs.weight_grad * min(time.weight_grad_s, time.split_weight_s)
    return LeastTime(way_s, weights_s).scaled(num_ranks)
