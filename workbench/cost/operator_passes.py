"""Seconds of single operators of a layer, pass by pass, with the reasons why they may be off."""

from collections import Counter
from dataclasses import dataclass

from workbench.cost.execution import AttentionKernel, GradientSum, Lookups
from workbench.cost.kernel_times import ELEMENT_BYTES, KernelTimes
from workbench.cost.products import ProductFormat, is_measured
from workbench.cost.profile import Direction, Table
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP, Gemm, Grid, Work, gemm_of, operator_tokens
from workbench.cost.traffic import (
    LOSS,
    WIDE_BYTES,
    PassBytes,
    is_cross_entropy,
    lookup_bytes,
    loss_bytes,
    pointwise_bytes,
)
from workbench.model.experts import EXPERT
from workbench.model.layer import Attention, Layer, LayerKind, Lookup, Matmul, Operator, Pointwise, Shard

ROUTER = "mlp.router"


@dataclass(slots=True)
class Passes:
    """Seconds of an operator, pass by pass."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0


class OperatorPasses:
    """Operators on one machine.

    Args:
        cost: of kernels.
        work: the packed rows.
        grid: degrees.
        precision: of activations and weights.
        unmeasured: reasons are added to it.
    """

    def __init__(
        self, cost: KernelTimes, work: Work, grid: Grid, precision: str, unmeasured: set[str]
    ) -> None:
        self._cost, self._work, self._grid, self._precision = cost, work, grid, precision
        self._bytes = ELEMENT_BYTES[precision]
        self.unmeasured = unmeasured

    def of_layer(self, layer: Layer) -> list[Passes]:
        """In order. Operators in the same place of several experts run as one kernel: its seconds stand at
        the first of them."""
        counts = Counter(map(group_of, layer.operators))
        found = []
        for operator in layer.operators:
            group = group_of(operator)
            count = 1 if group is None else counts.pop(group, 0)
            found.append(self.of(operator, count, self._format(layer, operator)) if count else Passes())
        return found

    def of(self, operator: Operator, count: int = 1, narrow: ProductFormat = ProductFormat.SAME) -> Passes:
        """Of so many alike in one kernel, with operands of products in that format."""
        if isinstance(operator, Matmul):
            return self._matmul(operator, count, narrow)
        if isinstance(operator, Attention):
            return self._attention(operator)
        if isinstance(operator, Lookup) and self._cost.execution.lookups is Lookups.PRODUCTS:
            return self._looked_up(operator)
        return self._moved(operator, count)

    def _looked_up(self, table: Lookup) -> Passes:
        """Both products with a matrix of ones and zeros, which each pass writes anew."""
        rows = table.num_rows / (1 if table.shard is Shard.REPLICATED else self._grid.tp)
        gemm = Gemm(operator_tokens(table, self._work, self._grid), table.width, rows)
        ones_s = self._cost.moved_s(gemm.m * gemm.k * self._bytes)
        forward_s, weight_grad_s = (
            ones_s + self._cost.product_s(gemm, direction, self._precision)[0]
            for direction in (Direction.FORWARD, Direction.WEIGHT_GRAD)
        )
        return Passes(forward_s, 0.0, weight_grad_s)

    def _format(self, layer: Layer, operator: Operator) -> ProductFormat:
        is_linear = layer.kind is LayerKind.BLOCK and operator.name != ROUTER
        narrows = self._bytes < WIDE_BYTES and is_linear
        return self._cost.execution.products if narrows else ProductFormat.SAME

    def _moved(self, operator: Pointwise | Lookup, count: int) -> Passes:
        moved = self.moved_bytes(operator)
        self._note(self._cost.profile.pointwise, "memory-bound kernels")
        self.unmeasured.add("backward of memory-bound kernels")
        return Passes(*(self._cost.moved_s(count * num_bytes, operator) for num_bytes in moved))

    def moved_bytes(self, operator: Pointwise | Lookup) -> PassBytes:
        """Of one memory-bound kernel a pass, on one rank."""
        run, work, grid = self._cost.execution, self._work, self._grid
        if isinstance(operator, Lookup):
            moved = lookup_bytes(operator, work, grid, self._bytes)
        elif is_cross_entropy(operator):
            logits = operator_tokens(operator, work, grid) * operator.width / grid.tp
            moved = loss_bytes(logits, self._bytes, run.loss)
        else:
            moved = pointwise_bytes(operator, work, grid, self._bytes, run.dropout)
        scale = run.loss_passes if operator.name == LOSS else 1.0
        if run.cuts_sequence and operator.shard is Shard.REPLICATED:
            scale /= grid.tp
        return PassBytes(*(num_bytes * scale for num_bytes in moved))

    def _matmul(self, operator: Matmul, count: int, narrow: ProductFormat) -> Passes:
        """The three products, casts of their operands, sums over tokens for a bias, and main gradients."""
        cost, gemm = self._cost, gemm_of(operator, self._work, self._grid)
        times = [
            cost.linear_s(gemm, direction, self._precision, narrow, num_grouped=count)
            for direction in Direction
        ]
        self._note_products(narrow, all(inside for _, inside in times), count)
        forward_s, input_grad_s, weight_grad_s = (seconds for seconds, _ in times)
        forward_s += cost.cast_s(count * gemm.m * gemm.k, narrow)
        input_grad_s += cost.cast_s(count * gemm.m * gemm.n, narrow)
        weight_grad_s += cost.moved_s(count * self._main_gradient_bytes(gemm))
        if operator.bias:
            weight_grad_s += cost.moved_s(count * gemm.m * gemm.n * self._bytes)
        return Passes(forward_s, input_grad_s, weight_grad_s)

    def _main_gradient_bytes(self, gemm: Gemm) -> float:
        """What a product moves more when it adds into float32 than when it writes its own format."""
        if self._cost.execution.gradient_sum is GradientSum.OWN or self._bytes >= WIDE_BYTES or not gemm.m:
            return 0.0
        return gemm.n * gemm.k * (2 * WIDE_BYTES - self._bytes)

    def _attention(self, operator: Attention) -> Passes:
        forward_s, inside = self._cost.attention_s(operator, self._work, self._grid, self._precision)
        self._note(self._cost.profile.attention, "attention")
        self.unmeasured.update(self._cost.attention_doubts(operator))
        if not inside:
            self.unmeasured.add("attention outside the measured shapes")
        kernel = self._cost.execution.attention
        if kernel is AttentionKernel.FUSED:
            rate = self._cost.attention_backward_rate(operator, self._work, self._grid)
            return Passes(forward_s, forward_s * ATTENTION_BACKWARD_FLOP / rate, 0.0)
        self.unmeasured.add("attention with stored scores")
        backward_s = self._cost.stored_backward_s(operator, self._work, self._grid, self._precision)
        again_s = forward_s if kernel is AttentionKernel.RECOMPUTED else 0.0
        return Passes(forward_s, backward_s + again_s, 0.0)

    def _note_products(self, narrow: ProductFormat, inside: bool, count: int) -> None:  # noqa: FBT001
        profile = self._cost.profile
        self._note(profile.matmul, "matmul")
        if len(profile.sustained_products) < len(Direction):
            self.unmeasured.add("backward of matmul")
        if not inside:
            self.unmeasured.add("matmul outside the measured shapes")
        if count > 1:
            self.unmeasured.add("products of several experts in one kernel")
        if narrow is not ProductFormat.SAME and not is_measured(profile, narrow):
            self.unmeasured.add(f"products in {narrow}")

    def _note(self, table: Table, name: str) -> None:
        if not table.points:
            self.unmeasured.add(f"{name}: peak rate assumed")
        elif not table.measured:
            self.unmeasured.add(f"{name}: scaled from another machine")
        if table.points and self._precision != self._cost.profile.table_precision:
            self.unmeasured.add(f"{name} in {self._precision}")


def group_of(operator: Operator) -> str | None:
    """Where it stands in one of several experts, which run as one kernel there; None: not in one of them."""
    if not operator.name.startswith(EXPERT):
        return None
    return operator.name.removeprefix(EXPERT).partition(".")[2]


def kernels_of(layer: Layer) -> tuple[Operator, ...]:
    """Its operators, those in the same place of several experts once."""
    grouped = {group_of(operator): operator for operator in reversed(layer.operators)}
    alone = (operator for operator in layer.operators if group_of(operator) is None)
    return (*alone, *(operator for group, operator in grouped.items() if group is not None))
