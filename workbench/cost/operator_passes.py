"""Prices single operators of a layer, pass by pass, with the reasons why prices may be off."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.cost.autocast import Autocast, weight_cast_bytes
from workbench.cost.eager_traffic import eager_bytes
from workbench.cost.execution import AttentionKernel, GradientSum, Lookups
from workbench.cost.indexer import KERNELS as INDEXER_KERNELS
from workbench.cost.indexer_time import indexer_s
from workbench.cost.kernel_times import ELEMENT_BYTES, KernelTimes
from workbench.cost.products import (
    CastKernels,
    ProductFormat,
    cast_kernels,
    is_measured,
    is_narrowed,
    rated_format,
)
from workbench.cost.profile import Direction, Table
from workbench.cost.recurrence import AnyRecurrence, chunk_of, recurrence_bytes, recurrence_flop
from workbench.cost.roofline import (
    ATTENTION_BACKWARD_FLOP,
    Gemm,
    Grid,
    Work,
    gemm_of,
    operator_tokens,
)
from workbench.cost.traffic import (
    LOSS,
    WIDE_BYTES,
    PassBytes,
    is_cross_entropy,
    lookup_bytes,
    loss_bytes,
    pointwise_bytes,
)
from workbench.model.experts import ROUTER, is_of_expert, role_in_expert
from workbench.model.layer import (
    Attention,
    Layer,
    LayerKind,
    Lookup,
    Matmul,
    Operator,
    Pointwise,
    Recurrence,
    Shard,
)
from workbench.model.lora import SUM
from workbench.model.reach import ANY
from workbench.model.trained import first_trained


class Passes(NamedTuple):
    """Seconds of an operator, pass by pass, and the reasons why they may be off."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    unmeasured: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel of an operator, or of several alike operators.

    Args:
        operator: the operator.
        count: number of operators in the kernel.
        narrow: format of operands of products.
        is_trained: whether it has gradients of weights where the layer has; beside adapters, theirs alone.
        known: cache of its passes, by the properties of a work that decide them.
    """

    operator: Operator
    count: int
    narrow: ProductFormat
    is_trained: bool = True
    known: dict[Hashable, Passes] = field(default_factory=dict, compare=False)

    def decided_by(self, work: Work) -> Hashable:
        return work.sums if isinstance(self.operator, Attention) else work.tokens(self.operator.tokens)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The properties of a layer that do not depend on its work.

    Args:
        operators: the layer's.
        kernels: in their order; operators in the same position of several experts run as one.
        num_forward, num_backward: kernels launched in a pass, without casts.
        num_casts: kernels of casts in either pass.
        first: see `first_trained`.
        is_interior: by kernel, whether its input gradient runs even where the layer's input needs none.
        waits: whether the host waits for what a router chose.
    """

    operators: tuple[Operator, ...]
    kernels: tuple[Kernel, ...]
    num_forward: int
    num_backward: int
    num_casts: CastKernels
    first: int
    is_interior: tuple[bool, ...]
    waits: bool


class OperatorPasses:
    """Prices operators on one machine; what layers, or works of equally many tokens, share is computed once.

    Args:
        cost: prices of kernels.
        grid: degrees of parallelism.
        precision: of activations and weights.
    """

    def __init__(self, cost: KernelTimes, grid: Grid, precision: str) -> None:
        self._cost, self._grid, self._precision = cost, grid, precision
        self._bytes = ELEMENT_BYTES[precision]
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._layers: dict[tuple[int, LayerKind], LayerKernels] = {}

    def of_layer(self, layer: Layer, work: Work) -> list[Passes]:
        """The passes of a layer's kernels, in order."""
        return [self.of_kernel(kernel, work) for kernel in self.prepared(layer).kernels]

    def of_kernel(self, kernel: Kernel, work: Work) -> Passes:
        """The passes of one kernel of a layer."""
        key = kernel.decided_by(work)
        passes = kernel.known.get(key)
        if passes is None:
            passes = self.of(kernel.operator, work, kernel.count, kernel.narrow)
            passes = kernel.known[key] = passes if kernel.is_trained else passes._replace(weight_grad_s=0.0)
        return passes

    def prepared(self, layer: Layer) -> LayerKernels:
        """The layer's kernels, cached by the identity of its operators.

        With expert parallelism they are not cached, as layers are made anew for every work.
        """
        if self._grid.ep > 1:
            return self._prepare(layer)
        key = id(layer.operators), layer.kind
        kernels = self._layers.get(key)
        if kernels is None or kernels.operators is not layer.operators:  # an id from another process
            kernels = self._layers[key] = self._prepare(layer)  # holds operators, so the id stays theirs
        return kernels

    def _prepare(self, layer: Layer) -> LayerKernels:
        operators, run = layer.operators, self._cost.execution
        groups = list(map(group_of, operators))
        counts = Counter(groups)
        kernels: list[Kernel] = []
        is_interior: list[bool] = []
        first, is_trained = first_trained(layer), not layer.has_adapters
        for index, (operator, group) in enumerate(zip(operators, groups, strict=True)):
            count = 1 if group is None else counts.pop(group, 0)
            if count:
                narrow = self._format(layer, operator)
                kernels.append(self._kernel(operator, count, narrow, is_trained=is_trained))
                is_interior.append(index > first)
            if adapter := adapter_kernels(operator, self._grid.tp):
                kernels += [self._kernel(each, 1, ProductFormat.SAME) for each in adapter]
                is_interior += [index > first, True, True]
        launched = tuple(map(_without_indexer, kernels_of(layer)))
        adapters = [kernel.operator for kernel in kernels if kernel.is_trained] if layer.has_adapters else []
        backward = [run.num_backward_kernels(each, is_trained=is_trained) for each in launched]
        return LayerKernels(
            operators,
            tuple(kernels),
            sum(map(run.num_kernels, (*launched, *adapters))) + layer.has_indexer * INDEXER_KERNELS,
            sum(backward) + sum(map(run.num_backward_kernels, adapters)),
            self._casts(kernels, (*launched, *adapters)),
            first,
            tuple(is_interior),
            any(operator.name == ROUTER for operator in operators),
        )

    def _casts(self, kernels: Iterable[Kernel], launched: Iterable[Operator]) -> CastKernels:
        """Kernels of casts to narrow formats, and of those that PyTorch makes by itself."""
        own = [self._cost.execution.num_casts(operator) for operator in launched]
        casts = (cast_kernels(kernel.narrow for kernel in kernels), *own)
        return CastKernels(*map(sum, zip(*casts, strict=True)))

    def _kernel(
        self, operator: Operator, count: int, narrow: ProductFormat, *, is_trained: bool = True
    ) -> Kernel:
        kernel = Kernel(operator, count, narrow, is_trained)
        if self._grid.ep > 1:
            return kernel
        return self._kernels.setdefault((operator, count, narrow, is_trained), kernel)

    def of(
        self,
        operator: Operator,
        work: Work,
        count: int = 1,
        narrow: ProductFormat = ProductFormat.SAME,
    ) -> Passes:
        """The passes of `count` alike operators in one kernel, with product operands in that format."""
        if isinstance(operator, Matmul):
            return self._matmul(operator, work, count, narrow)
        if isinstance(operator, Attention):
            return self._attention(operator, work)
        if isinstance(operator, Recurrence):
            return self._recurrence(operator, work)
        if isinstance(operator, Lookup) and self._cost.execution.lookups is Lookups.PRODUCTS:
            return self._looked_up(operator, work)
        return self._moved(operator, work, count)

    def _looked_up(self, table: Lookup, work: Work) -> Passes:
        """Passes of a lookup as products with a one-hot matrix, which each pass writes anew."""
        rows = table.num_rows / (1 if table.shard is Shard.REPLICATED else self._grid.tp)
        gemm = Gemm(operator_tokens(table, work, self._grid), table.width, rows)
        ones_s = self._cost.moved_s(gemm.m * gemm.k * self._bytes)
        forward_s, weight_grad_s = (
            ones_s + self._cost.product_s(gemm, direction, self._precision)[0]
            for direction in (Direction.FORWARD, Direction.WEIGHT_GRAD)
        )
        return Passes(forward_s, 0.0, weight_grad_s)

    def _format(self, layer: Layer, operator: Operator) -> ProductFormat:
        narrows = self._bytes < WIDE_BYTES and is_narrowed(layer, operator)
        return self._cost.execution.products if narrows else ProductFormat.SAME

    def _moved(self, operator: Pointwise | Lookup, work: Work, count: int) -> Passes:
        doubts = {*self._table_doubts(self._cost.profile.pointwise, "memory-bound kernels")}
        doubts.add("backward of memory-bound kernels")
        moved = [count * num_bytes for num_bytes in self.moved_bytes(operator, work)]
        forward_s, input_grad_s, weight_grad_s = [self._cost.moved_s(each, operator) for each in moved]
        return Passes(forward_s, input_grad_s, weight_grad_s, frozenset(doubts))

    def moved_bytes(self, operator: Pointwise | Lookup, work: Work) -> PassBytes:
        """Bytes that one memory-bound kernel moves in each pass, on one rank."""
        run, grid = self._cost.execution, self._grid
        if isinstance(operator, Lookup):
            moved = lookup_bytes(operator, work, grid, WIDE_BYTES if self._casts_weights else self._bytes)
        elif is_cross_entropy(operator):
            logits = operator_tokens(operator, work, grid) * operator.width / grid.tp
            moved = loss_bytes(logits, self._bytes, run.loss)
        elif calls := run.eager_calls(operator):
            moved = eager_bytes(calls, operator, work, grid, self._bytes)
        else:
            moved = pointwise_bytes(operator, work, grid, self._bytes, run.dropout)
        scale = run.loss_passes if operator.name == LOSS else 1.0
        if run.cuts_sequence and operator.shard is Shard.REPLICATED:
            scale /= grid.tp
        return PassBytes(*(num_bytes * scale for num_bytes in moved))

    def _matmul(self, operator: Matmul, work: Work, count: int, narrow: ProductFormat) -> Passes:
        """Passes of a matmul: the three products, casts, sums over tokens for a bias, and main gradients."""
        cost, gemm = self._cost, gemm_of(operator, work, self._grid)
        times = [
            cost.linear_s(gemm, direction, self._precision, narrow, num_grouped=count)
            for direction in Direction
        ]
        (forward_s, input_grad_s, weight_grad_s), inside = zip(*times, strict=True)
        doubts = self._product_doubts(narrow, all(inside), count)
        casts_s = cost.casts_s(gemm, narrow, count)
        weights_bytes = (
            weight_cast_bytes(count * gemm.n * gemm.k, self._bytes) if self._casts_weights else 0.0
        )
        forward_s, input_grad_s, weight_grad_s = (
            forward_s + casts_s[0] + cost.moved_s(weights_bytes),
            input_grad_s + casts_s[1],
            weight_grad_s + casts_s[2] + cost.moved_s(count * self.main_gradient_bytes(gemm)),
        )
        if operator.bias:
            weight_grad_s += cost.moved_s(count * gemm.m * gemm.n * self._bytes)
        return Passes(forward_s, input_grad_s, weight_grad_s, frozenset(doubts))

    @property
    def _casts_weights(self) -> bool:
        """Whether weights are in float32 and cast for every product."""
        return self._cost.execution.autocast is Autocast.ON and self._bytes < WIDE_BYTES

    def main_gradient_bytes(self, gemm: Gemm) -> float:
        """Extra bytes that a product moves when it adds into float32 instead of writing its own format.

        Under autocast a kernel behind it casts to float32.
        """
        if self._casts_weights:
            return weight_cast_bytes(gemm.n * gemm.k, self._bytes) if gemm.m else 0.0
        if self._cost.execution.gradient_sum is GradientSum.OWN or self._bytes >= WIDE_BYTES or not gemm.m:
            return 0.0
        return gemm.n * gemm.k * (2 * WIDE_BYTES - self._bytes)

    def _attention(self, operator: Attention, work: Work) -> Passes:
        """Passes of an attention; the forward is with that of its indexer, whose kernels are fused ones."""
        passes = self._attended(operator, work)
        if operator.indexer is None:
            return passes
        doubts = frozenset({"scores of an indexer: at the rate of products of its heads"})
        forward_s = passes.forward_s + indexer_s(self._cost, operator, work, self._grid, self._precision)
        return passes._replace(forward_s=forward_s, unmeasured=passes.unmeasured | doubts)

    def _attended(self, operator: Attention, work: Work) -> Passes:
        forward_s, inside = self._cost.attention_s(operator, work, self._grid, self._precision)
        doubts = {*self._table_doubts(self._cost.profile.attention, "attention")}
        doubts.update(self._cost.attention_doubts(operator))
        if not inside:
            doubts.add("attention outside the measured shapes")
        if work.reach(operator) != ANY:
            kind = "in a window" if operator.top_k is None else "to chosen keys"
            doubts.add(f"attention {kind}: at the rate of causal rows with as many keys")
        kernel = self._cost.execution.attention
        if kernel is AttentionKernel.FUSED:
            rate = self._cost.attention_backward_rate(operator, work, self._grid)
            return Passes(forward_s, forward_s * ATTENTION_BACKWARD_FLOP / rate, 0.0, frozenset(doubts))
        doubts.add("attention with stored scores")
        backward_s = self._cost.stored_backward_s(operator, work, self._grid, self._precision)
        again_s = forward_s if kernel is AttentionKernel.RECOMPUTED else 0.0
        return Passes(forward_s, backward_s + again_s, 0.0, frozenset(doubts))

    def _recurrence(self, rule: AnyRecurrence, work: Work) -> Passes:
        """Passes of fused kernels over chunks, at the rate of products of a chunk's scores; not measured."""
        tokens, tp = operator_tokens(rule, work, self._grid), self._grid.tp
        flop, moved = recurrence_flop(rule, tokens, tp), recurrence_bytes(rule, tokens, self._bytes, tp)
        product = Gemm(tokens * rule.num_heads / tp, chunk_of(rule), rule.key_dim)
        forward_s, backward_s = (
            self._cost.chunks_s(pass_flop, pass_bytes, product, self._precision)
            for pass_flop, pass_bytes in zip(flop, moved, strict=True)
        )
        doubts = frozenset({f"{rule.title}: at the rate of products of its chunks"})
        return Passes(forward_s, backward_s, 0.0, doubts)

    def _product_doubts(self, narrow: ProductFormat, inside: bool, count: int) -> Iterator[str]:  # noqa: FBT001
        profile = self._cost.profile
        yield from self._table_doubts(profile.matmul, "matmul")
        if len(profile.sustained_products) < len(Direction):
            yield "backward of matmul"
        if not inside:
            yield "matmul outside the measured shapes"
        if count > 1:
            yield "products of several experts in one kernel"
        if narrow is not ProductFormat.SAME and not is_measured(profile, narrow):
            rated = rated_format(narrow)
            yield f"products in {narrow}" + ("" if rated is narrow else f": at the rate of {rated}")

    def _table_doubts(self, table: Table, name: str) -> Iterator[str]:
        if not table.points:
            yield f"{name}: peak rate assumed"
        elif not table.measured:
            yield f"{name}: scaled from another machine"
        if table.points and self._precision != self._cost.profile.table_precision:
            yield f"{name} in {self._precision}"


def _without_indexer(operator: Operator) -> Operator:
    """The operator as it is in a backward."""
    if not isinstance(operator, Attention) or operator.indexer is None:
        return operator
    return replace(operator, indexer=None)


def adapter_kernels(operator: Operator, tp: int) -> tuple[Operator, ...]:
    """The kernels of an operator's adapter: its two products, and their result scaled and added.

    Backward, its gradient is scaled, and gradients of what both products read are added. A row-cut product's
    result is a part of a sum over ranks, to which the adapter's is added before.
    """
    if not isinstance(operator, Matmul) or operator.lora is None:
        return ()
    return (
        *operator.adapter,
        Pointwise(
            name=f"{operator.name}.{SUM}",
            width=operator.out_features * (tp if operator.shard is Shard.ROW else 1),
            num_passes=3,
            shard=Shard.REPLICATED if operator.shard is Shard.REPLICATED else Shard.COLUMN,
            tokens=operator.tokens,
            tokens_scale=operator.tokens_scale,
        ),
    )


def group_of(operator: Operator) -> str | None:
    """The operator's position in an expert, whose kernels are grouped by it; None: not of an expert."""
    return role_in_expert(operator) if is_of_expert(operator) else None


def kernels_of(layer: Layer) -> tuple[Operator, ...]:
    """The layer's operators, with those in the same position of several experts once."""
    grouped = {group_of(operator): operator for operator in reversed(layer.operators)}
    alone = (operator for operator in layer.operators if group_of(operator) is None)
    return (*alone, *(operator for group, operator in grouped.items() if group is not None))
