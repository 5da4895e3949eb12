"""Lower bounds on the seconds of a layer, for any number of ranks and calls."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from workbench.arrays import Floats
from workbench.cost.execution import AttentionKernel, Lookups
from workbench.cost.kernel_times import ELEMENT_BYTES, length_of
from workbench.cost.measured import MeasuredLayer
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import OperatorPasses
from workbench.cost.profile import Direction
from workbench.cost.recurrence import AnyRecurrence, recurrence_bytes
from workbench.cost.roofline import (
    ATTENTION_BACKWARD_FLOP,
    Gemm,
    Grid,
    Work,
    attention_flop,
    gemm_of,
    operator_tokens,
)
from workbench.model.experts import num_experts
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, Lookup, Matmul, Pointwise, Recurrence, Shard
from workbench.model.trained import without_adapters
from workbench.schedule.action import Pass

WHOLE = Grid()  # the layer uncut


class LeastTime(NamedTuple):
    """Lower bounds on seconds times ranks of passes.

    Args:
        way_s: the path that others wait for: forward, and gradients through the layers.
        weights_s: what all passes take in addition: gradients of weights, which nothing waits for.
    """

    way_s: float
    weights_s: float

    @property
    def all_s(self) -> float:
        return self.way_s + self.weights_s

    def __add__(self, other: object) -> "LeastTime":
        """The bounds of both together."""
        assert isinstance(other, LeastTime)
        return LeastTime(*(first + second for first, second in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> "LeastTime":
        """Every pass times a factor."""
        return LeastTime(*(factor * seconds for seconds in self))


NOTHING = LeastTime(0.0, 0.0)


def least_of(times: Iterable[LeastTime]) -> LeastTime:
    """A lower bound for several alternatives: the minimum of each."""
    alternatives = list(times)
    way_s = min(alternative.way_s for alternative in alternatives)
    return LeastTime(way_s, min(alternative.all_s for alternative in alternatives) - way_s)


class LeastTimes:
    """Lower bounds on layers whose calls take rows out of a stock, in any parts.

    Products run at the profile's rates for the best number of tokens and tensor-parallel ranks of a call,
    equal for all products of a layer and all passes over one microbatch, see `LeastProducts`. Fused attention
    and memory-bound kernels run at their best rates, without what does not grow with tokens. Collectives,
    launches and overheads are free. Layers measured whole count by their fit without the constant of a call.
    Cross-attention is left out; layers with experts have the best rate of any shape.

    Why it holds: on tp x cp ranks a call does 1 / (tp cp) of each product, and no less of the rest, so ranks
    times seconds are FLOP (or bytes) over a rate that this bound's rate is not below; FLOP and bytes add up
    over calls. The mean keys a query of a call lies between the fewest and the most of its rows. Ranks that
    share tokens unevenly take as long as the slowest, which is no less than their mean.

    Args:
        cost: the machine, under its execution.
        precision: of activations and weights.
        stock: all rows that calls may have.
        degrees: of tensor parallelism; empty: unknown.
        cuts_tokens: whether context-parallel ranks may share tokens: then attention may be simulated tile
            by tile, at most at the rate of a long causal launch, or run block by block over fewer keys, with
            late queries over twice the mean number of keys.
    """

    def __init__(
        self, cost: CostModel, precision: str, stock: Work, *, degrees: Sequence[int], cuts_tokens: bool
    ) -> None:
        self._cost, self._precision, self._stock = cost, precision, cost.computed(stock)
        self._degrees, self._cuts_tokens = tuple(degrees), cuts_tokens
        self._attentions: dict[Attention, tuple[float, float]] = {}

    def cutting_tokens(self) -> "LeastTimes":
        """The same bounds where context-parallel ranks share tokens; products are computed once."""
        other = copy(self)
        other._cuts_tokens, other._attentions = True, {}
        return other

    def of(self, layer: Layer, work: Work, needs: Needs) -> LeastTime:
        """A lower bound on passes over some rows of the stock, summed over their ranks.

        It adds up over calls: the bound of all rows is at most the sum of those of their parts.

        Args:
            needs: which gradients run.

        Complexity: O(operators + measured grids), and that of `LeastProducts.seconds`.
        """
        if layer.reads_context:
            return NOTHING
        layer, needs = bare(layer, needs)
        measured = self._cost.measured_on(layer, self._precision)
        bounds = [_measured(each, work, grid.tp * grid.cp, needs) for grid, each in measured]
        if all(grid != WHOLE for grid, _ in measured):  # else other grids are scaled from one rank
            bounds.append(self._composed(layer, work, needs))
        return least_of(bounds).scaled(self.factor)

    @property
    def factor(self) -> float:
        """A lower bound on the factor by which passes take longer in a pipeline."""
        profile, kinds = self._cost.profile, (Pass.F, Pass.B, Pass.I, Pass.W)
        return min(min(profile.pipeline_factor(kind), profile.alone_factor(kind)) for kind in kinds)

    def in_calls(
        self, layer: Layer, work: Work, needs: Needs, tp: int, parts: Floats
    ) -> tuple[Floats, Floats] | None:
        """[ranges] path and all seconds as `of`, for calls whose work on a rank lies between two neighbours.

        The caller applies `factor`. None: the layer is not a sum of operators, or has experts.

        Args:
            parts: [ranges + 1] multiples of this work on a rank, ascending.

        Complexity: O(operators), and that of `LeastProducts.seconds_in_each`.
        """
        if num_experts(layer) or self._cost.measured_on(layer, self._precision):
            return None
        layer, needs = bare(layer, needs)
        least = self._cost.least_products(self._precision)
        path_s, all_s = np.zeros((2, len(parts) - 1))
        other, products = self._apart(layer, work, needs)
        for group in products:
            kinds, tokens = _kinds_of(group, work), parts * operator_tokens(group[0], work, WHOLE)
            path_directions, all_directions = directions_of(needs)
            path = least.seconds_in_each(kinds, tp, path_directions, tokens)
            weights = least.seconds_in_each(kinds, tp, all_directions[len(path_directions) :], tokens)
            path_s, all_s = path_s + path, all_s + path + weights
        return path_s + other.way_s, all_s + other.all_s

    def of_attention(self, layer: Layer, work: Work, needs: Needs) -> LeastTime:
        """The share of the layer's attentions alone in `in_calls`."""
        attentions = (each for each in layer.operators if isinstance(each, Attention))
        return sum((self._attention(each, work, needs) for each in attentions), NOTHING)

    def _composed(self, layer: Layer, work: Work, needs: Needs) -> LeastTime:
        degrees = () if num_experts(layer) else self._degrees
        other, products = self._apart(layer, work, needs)
        return sum((self._of_products(each, work, degrees, needs) for each in products), other)

    def _apart(self, layer: Layer, work: Work, needs: Needs) -> tuple[LeastTime, list[list[Matmul]]]:
        """The bound of everything but products, and products grouped by their tokens."""
        total, products = NOTHING, defaultdict(list)
        for operator in layer.operators:
            if isinstance(operator, Matmul):
                products[operator.tokens, operator.tokens_scale].append(operator)
            elif isinstance(operator, Attention):
                total += self._attention(operator, work, needs)
            elif isinstance(operator, Recurrence):
                total += self._recurrence(operator, work, needs)
            elif not num_experts(layer):
                total += self._moved(operator, work, needs)
        return total, [each for each in products.values() if operator_tokens(each[0], work, WHOLE)]

    def _of_products(
        self, products: Sequence[Matmul], work: Work, degrees: Sequence[int], needs: Needs
    ) -> LeastTime:
        """The bound of products over the same tokens."""
        stock = operator_tokens(products[0], self._stock, WHOLE)
        least, kinds = self._cost.least_products(self._precision), _kinds_of(products, work)
        way_s, all_s = (least.seconds(kinds, degrees, each, stock) for each in directions_of(needs))
        return LeastTime(way_s, max(all_s - way_s, 0.0))

    def _attention(self, operator: Attention, work: Work, needs: Needs) -> LeastTime:
        flop = attention_flop(operator, self._cost.computed(work), WHOLE)
        if self._cost.execution.attention is not AttentionKernel.FUSED or not flop:
            return NOTHING
        if operator not in self._attentions:
            rates = list(self._attention_rates(operator))
            forward_s = min(1.0 / rate for rate, _ in rates)
            both_s = min((1.0 + ATTENTION_BACKWARD_FLOP / backward) / rate for rate, backward in rates)
            self._attentions[operator] = forward_s, both_s
        forward_s, both_s = self._attentions[operator]
        return LeastTime(flop * (both_s if needs.input_grad else forward_s), 0.0)

    def _attention_rates(self, operator: Attention) -> Iterator[tuple[float, float]]:
        """Yield upper bounds on forward FLOP/s and on backward over forward, octave by octave of lengths."""
        rows = [Work((row,)) for row in dict.fromkeys(self._stock.rows)]
        rows = [row for row in rows if operator_tokens(operator, row, WHOLE) > 0]
        lengths = [length_of(operator, row, WHOLE) for row in rows]
        queries = operator_tokens(operator, self._stock, WHOLE)
        short, last = (1.0, 2.0 * max(lengths)) if self._cuts_tokens else (min(lengths), max(lengths))
        fewest = 1.0 if self._cuts_tokens else operator.num_heads / operator.num_kv_heads
        while True:
            long = min(2.0 * short, last)
            most = operator.num_heads * max(1.0, queries / short)
            between = (short, fewest), (long, most)
            yield self._cost.most_attention_flop_per_s(operator, self._precision, between)
            if long == last:
                break
            short = long
        if self._cuts_tokens:  # simulated tile by tile, see `sim.attention.price.anchored_gpus`
            yield self._cost.most_attention_flop_per_s(replace(operator, causal=True), self._precision)

    def _recurrence(self, rule: AnyRecurrence, work: Work, needs: Needs) -> LeastTime:
        """The bound of its bytes alone."""
        moved = recurrence_bytes(rule, operator_tokens(rule, work, WHOLE), ELEMENT_BYTES[self._precision])
        path = moved.forward + needs.input_grad * moved.backward
        return LeastTime(path / self._cost.most_moved_bytes_per_s(), 0.0)

    def _moved(self, operator: Pointwise | Lookup, work: Work, needs: Needs) -> LeastTime:
        if isinstance(operator, Lookup) and self._cost.execution.lookups is Lookups.PRODUCTS:
            return NOTHING
        moved = OperatorPasses(self._cost, WHOLE, self._precision).moved_bytes(operator, work)
        rate = self._cost.most_moved_bytes_per_s(operator)
        weights = (
            min(moved.input_grad, moved.weight_grad) if isinstance(operator, Lookup) else moved.weight_grad
        )
        path = moved.forward + needs.input_grad * moved.input_grad
        return LeastTime(path / rate, needs.weight_grad * weights / rate)


def bare(layer: Layer, needs: Needs) -> tuple[Layer, Needs]:
    """A layer and its gradients without adapters: what it takes at least."""
    return (
        (without_adapters(layer), Needs(needs.input_grad, weight_grad=False))
        if layer.has_adapters
        else (layer, needs)
    )


def _kinds_of(products: Sequence[Matmul], work: Work) -> Counter[tuple[Gemm, Shard]]:
    return Counter((gemm_of(each, work, WHOLE), each.shard) for each in products)


def directions_of(needs: Needs) -> tuple[tuple[Direction, ...], tuple[Direction, ...]]:
    """Directions that others wait for; and all directions, which begin with these."""
    path = (Direction.FORWARD, *[Direction.INPUT_GRAD] * needs.input_grad)
    return path, (*path, *[Direction.WEIGHT_GRAD] * needs.weight_grad)


def _measured(measured: MeasuredLayer, work: Work, num_ranks: int, needs: Needs) -> LeastTime:
    time = measured.least_s(work)
    way_s = min(time.forward_s, time.forward_only_s)
    way_s += needs.input_grad * min(time.input_grad_s, time.split_input_s)
    weights_s = needs.weight_grad * min(time.weight_grad_s, time.split_weight_s)
    return LeastTime(way_s, weights_s).scaled(num_ranks)
