"""The cost model: seconds of one layer on one machine, forward and gradient by gradient."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

from workbench.cost.collectives import Collective, Collectives
from workbench.cost.execution import ActivationCut, AttentionKernel, Execution
from workbench.cost.hardware import Link
from workbench.cost.interpolate import Surface
from workbench.cost.measured import MeasuredLayer
from workbench.cost.profile import Profile, Table
from workbench.cost.roofline import (
    ATTENTION_BACKWARD_FLOP,
    Gemm,
    Grid,
    RowWork,
    Work,
    attention_flop,
    attention_pairs,
    gemm_of,
    key_value_bytes,
    layer_flop,
    operator_tokens,
    pass_bytes,
    tensor_parallel_messages,
)
from workbench.cost.signature import signature
from workbench.graph.frozen import Needs
from workbench.graph.layer import Attention, Layer, Lookup, Matmul, Operator, Pointwise, Shard

__all__ = ["CostModel", "LayerTime", "RowWork", "Work", "unmeasured_of"]

LOSS = "loss"
STORED_BACKWARD = 2.0  # of the forward: two products a product
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one call of a layer, its tensor- and context-parallel collectives included.

    Args:
        forward_s: forward; a recompute costs as much again.
        input_grad_s: gradients through the layer to its input.
        weight_grad_s: gradients of its weights, on top of those.
        unmeasured: what went into it that was not measured on that machine.
        interior_grad_s: gradients through the layer as far as its first weights, which
            weight gradients need even when the input asks for none.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    unmeasured: frozenset[str] = frozenset()
    interior_grad_s: float = 0.0

    def through_s(self, needs: Needs) -> float:
        """The `I` half of a backward: 0 when no gradient runs."""
        if needs.input_grad:
            return self.input_grad_s
        return self.interior_grad_s if needs.weight_grad else 0.0

    def weights_s(self, needs: Needs) -> float:
        """The `W` half of a backward: 0 when the layer is frozen."""
        return self.weight_grad_s if needs.weight_grad else 0.0

    def backward_s(self, needs: Needs) -> float:
        """A whole backward without recompute: frozen and nothing upstream 0, frozen I, trainable I + W."""
        return self.through_s(needs) + self.weights_s(needs)


class CostModel:
    """Times of layers on the machine of one profile.

    A layer with rows of its own in the profile is read from them; any other is the sum of
    its operators, each read from the tables of matmuls, attention and memory-bound kernels.
    An execution changes the sums of operators, and no time of a layer that was measured whole.
    """

    def __init__(self, profile: Profile, execution: Execution | None = None) -> None:
        self.profile = profile
        self.execution = execution or Execution()
        self.collectives = Collectives(profile)
        self._matmul = _surface(profile.matmul)
        self._attention = _surface(profile.attention)
        self._pointwise = _surface(profile.pointwise)
        self._normalization = _surface(profile.normalization) or self._pointwise
        self._layers = {
            (table.signature, table.precision, table.tp, table.cp): MeasuredLayer(table)
            for table in profile.layers
        }
        self._known: dict[tuple[object, ...], LayerTime] = {}

    def executed(self, execution: Execution) -> "CostModel":
        """The same machine under another execution; tables are shared, not read again."""
        other = copy(self)
        other.execution, other._known = execution, {}
        return other

    def layer_time(
        self, layer: Layer, work: Work, *, tp: int, cp: int, precision: str, link: Link | None = None
    ) -> LayerTime:
        """Time of one call of the layer on each rank of a tp x cp grid.

        Args:
            layer: any layer; its name and trainability do not matter.
            work: the packed rows.
            tp, cp: degrees of tensor and context parallelism, shared out evenly.
            precision: "bfloat16", "float32" or "float64".
            link: that joins the grid; None: the profile's intra-node link.

        Raises:
            ValueError: unknown precision, or a grid without any link.

        Complexity: O(operators x table points), once per distinct argument.
        """
        name = _signature(layer)
        key = (name, work, tp, cp, str(precision), link)
        if key not in self._known:
            if str(precision) not in ELEMENT_BYTES:
                raise ValueError(f"precision {precision!r}: want one of {', '.join(ELEMENT_BYTES)}")
            self._known[key] = self._time(layer, name, work, Grid(tp, cp), str(precision), link)
        return self._known[key]

    def _time(
        self, layer: Layer, name: str, work: Work, grid: Grid, precision: str, link: Link | None
    ) -> LayerTime:
        measured = self._layers.get((name, precision, *grid))
        if measured is not None:
            return _from_measured(layer, measured, work)
        whole = self._layers.get((name, precision, 1, 1))
        joined = self._link(grid, link)
        sums = _OperatorSums(self, work, grid, precision, joined)
        if whole is None:
            return sums.layer(layer)
        return _scaled(_from_measured(layer, whole, work), sums, layer, work, grid)

    def _link(self, grid: Grid, link: Link | None) -> Link | None:
        if grid == Grid(1, 1) or link is not None:
            return link
        return self.profile.machine_link("intra").link

    def matmul_s(self, gemm: Gemm, precision: str) -> tuple[float, bool]:
        """Seconds of one product, and whether its shape lies among the measured ones.

        A shape below the smallest measured one takes the time of the smallest.
        """
        run, size = self.execution, ELEMENT_BYTES[precision]
        factor = run.matmul_factor(*gemm, element_bytes=size)
        peak = self.profile.peak(precision) * factor
        if self._matmul is None:
            moved_s = gemm.num_bytes(size) / self.profile.memory_bytes_per_s
            return self._floor(max(gemm.flop / peak, moved_s)) + run.matmul_start_s, True
        padded = Gemm(*(max(size, low) for size, low in zip(gemm, self._matmul.low, strict=True)))
        reading = self._matmul.read(*padded)
        rate = reading.rate * peak / self.profile.peak(self.profile.table_precision)
        inside = reading.inside and padded == gemm
        return self._floor(padded.flop / rate) + run.matmul_start_s, inside

    def attention_s(self, operator: Attention, work: Work, grid: Grid, precision: str) -> tuple[float, bool]:
        """Seconds of the forward kernel, and whether its shape lies among the measured ones.

        A row of several sequences is as many heads of their mean length.
        """
        flop = attention_flop(operator, work, grid)
        peak = self.profile.peak(precision) * self.execution.attention_rate
        if self.execution.attention is not AttentionKernel.FUSED:
            return self._stored_attention_s(operator, work, grid, precision), True
        if self._attention is None or flop == 0:
            return self._floor(flop / peak), True
        queries = operator_tokens(operator, work, grid) * grid.cp
        keys = attention_pairs(operator, work, grid) * grid.cp / queries
        length = max(1.0, keys * 2.0 if operator.causal else keys)
        heads = operator.num_heads / grid.tp * max(1.0, queries / length)
        reading = self._attention.read(length, heads, operator.num_heads / operator.num_kv_heads)
        rate = reading.rate * peak / self.profile.peak(self.profile.table_precision)
        return self._floor(flop / rate), reading.inside

    def _stored_attention_s(self, operator: Attention, work: Work, grid: Grid, precision: str) -> float:
        """Two batched products over every score, masked ones too, and passes over the stored scores."""
        run, queries = self.execution, operator_tokens(operator, work, grid)
        keys = operator.num_keys or max(row.tokens_in for row in work.rows)
        scores = queries * keys * operator.num_heads / grid.tp
        length = min(keys, work.tokens(operator.tokens) / len(work.rows))
        rate = self._rate(Gemm(length, keys, operator.head_dim), precision) * run.attention_rate
        return self._floor(4.0 * operator.head_dim * scores / rate) + self.moved_s(
            run.scores_passes * scores * ELEMENT_BYTES[precision]
        )

    def _rate(self, gemm: Gemm, precision: str) -> float:
        """FLOP/s of a batch of such products: the table's at the batch's size, the peak without one."""
        peak = self.profile.peak(precision)
        if self._matmul is None:
            return peak
        most = float(self._matmul.low[0])
        reading = self._matmul.read(max(gemm.m, most), *map(max, gemm[1:], self._matmul.low[1:]))
        return reading.rate * peak / self.profile.peak(self.profile.table_precision)

    def moved_s(self, num_bytes: float, operator: Pointwise | Lookup | None = None) -> float:
        """Seconds of one memory-bound kernel; norms have rates of their own."""
        if num_bytes == 0:
            return 0.0
        is_norm = isinstance(operator, Pointwise) and operator.weights
        surface = self._normalization if is_norm else self._pointwise
        rate = surface.read(num_bytes).rate if surface else self.profile.memory_bytes_per_s
        return self._floor(num_bytes / (rate * self.execution.memory_rate))

    def update_s(self, num_bytes: float) -> float:
        """Seconds of an optimizer step that moves so many bytes."""
        rate = self._pointwise.read(num_bytes).rate if self._pointwise else self.profile.memory_bytes_per_s
        run = self.execution
        return self._floor(num_bytes / (rate * run.step_rate)) + run.step_start_s if num_bytes else 0.0

    def between_ranks_s(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Seconds of a collective over gradients or updated weights."""
        return self.collectives.seconds(kind, num_bytes, num_ranks, link) / self.execution.reduction_rate

    def _floor(self, seconds: float) -> float:
        return max(seconds, self.profile.kernel_floor_s)


@dataclass(slots=True)
class _Passes:
    """Seconds of an operator or a layer, pass by pass."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0


class _OperatorSums:
    """A layer's time as the sum of its operators, with the reasons why that may be off."""

    def __init__(self, cost: CostModel, work: Work, grid: Grid, precision: str, link: Link | None) -> None:
        self._cost, self._work, self._grid, self._precision, self._link = cost, work, grid, precision, link
        self._bytes = ELEMENT_BYTES[precision]
        self.unmeasured: set[str] = set()

    def layer(self, layer: Layer) -> LayerTime:
        operators = [self._operator(operator) for operator in layer.operators]
        forward_comm, backward_comm = self._communication(layer)
        first = next(
            (i for i, operator in enumerate(layer.operators) if operator.parameters()), len(operators)
        )
        interior = sum(passes.input_grad_s for passes in operators[first + 1 :])
        interior += sum(seconds for index, seconds in backward_comm if index > first)
        time = LayerTime(
            sum(passes.forward_s for passes in operators) + forward_comm,
            sum(passes.input_grad_s for passes in operators) + sum(seconds for _, seconds in backward_comm),
            sum(passes.weight_grad_s for passes in operators),
            frozenset(self.unmeasured),
            interior,
        )
        return self._launched(time, layer)

    def _launched(self, time: LayerTime, layer: Layer) -> LayerTime:
        """No pass is shorter than the host takes to launch its kernels; a slow host slows I and W alike."""
        run, grid = self._cost.execution, self._grid
        messages = tensor_parallel_messages(layer, self._work, grid, self._bytes)
        forward = sum(run.num_kernels(operator) for operator in layer.operators)
        weights = sum(bool(operator.parameters()) for operator in layer.operators)
        forward_s = run.host_s(forward, len(messages.forward), grid.tp)
        backward_s = run.host_s(forward + weights, len(messages.backward), grid.tp)
        device_s = time.input_grad_s + time.weight_grad_s
        if device_s == 0 or (time.forward_s >= forward_s and device_s >= backward_s):
            return replace(time, forward_s=max(time.forward_s, forward_s))
        slower = max(1.0, backward_s / device_s)
        return replace(
            time,
            forward_s=max(time.forward_s, forward_s),
            input_grad_s=time.input_grad_s * slower,
            weight_grad_s=time.weight_grad_s * slower,
            interior_grad_s=time.interior_grad_s * slower,
        )

    def _operator(self, operator: Operator) -> _Passes:
        if isinstance(operator, Matmul):
            return self._matmul(operator)
        if isinstance(operator, Attention):
            return self._attention(operator)
        cost = self._cost
        scale = cost.execution.loss_passes if operator.name == LOSS else 1.0
        if cost.execution.activations is ActivationCut.SEQUENCE and operator.shard is Shard.REPLICATED:
            scale /= self._grid.tp
        moved = [n * scale for n in pass_bytes(operator, self._work, self._grid, self._bytes)]
        self._note(cost.profile.pointwise, "memory-bound kernels")
        self.unmeasured.add("backward of memory-bound kernels")
        return _Passes(*(cost.moved_s(num_bytes, operator) for num_bytes in moved))

    def _matmul(self, operator: Matmul) -> _Passes:
        gemm = gemm_of(operator, self._work, self._grid)
        shapes = (gemm, gemm.input_grad, gemm.weight_grad)
        times = [self._cost.matmul_s(shape, self._precision) for shape in shapes]
        self._note(self._cost.profile.matmul, "matmul")
        self.unmeasured.add("backward of matmul")
        if not all(inside for _, inside in times):
            self.unmeasured.add("matmul outside the measured shapes")
        return _Passes(*(seconds for seconds, _ in times))

    def _attention(self, operator: Attention) -> _Passes:
        profile = self._cost.profile
        forward_s, inside = self._cost.attention_s(operator, self._work, self._grid, self._precision)
        self._note(profile.attention, "attention")
        self.unmeasured.add("backward of attention")
        if not inside:
            self.unmeasured.add("attention outside the measured shapes")
        if profile.attention.points and not operator.causal:
            self.unmeasured.add("attention without a causal mask")
        if profile.attention_head_dim not in (None, operator.head_dim):
            self.unmeasured.add(f"attention with heads of {operator.head_dim}")
        kernel = self._cost.execution.attention
        if kernel is AttentionKernel.FUSED:
            backward_s = forward_s * ATTENTION_BACKWARD_FLOP / profile.attention_backward_rate
            return _Passes(forward_s, backward_s, 0.0)
        self.unmeasured.add("attention with stored scores")
        again = 1.0 if kernel is AttentionKernel.RECOMPUTED else 0.0
        return _Passes(forward_s, forward_s * (STORED_BACKWARD + again), 0.0)

    def _communication(self, layer: Layer) -> tuple[float, list[tuple[int, float]]]:
        """Seconds of collectives: of the forward, and (operator, seconds) of the backward."""
        grid, link = self._grid, self._link
        if link is None:
            return 0.0, []
        messages = tensor_parallel_messages(layer, self._work, grid, self._bytes)
        reduced = [
            self._collective_s(Collective.ALL_REDUCE, num_bytes, grid.tp) for num_bytes in messages.forward
        ]
        backward = [
            (index, self._collective_s(Collective.ALL_REDUCE, num_bytes, grid.tp))
            for index, num_bytes in messages.backward
        ]
        forward_s = sum(reduced)
        for index, operator in enumerate(layer.operators):
            if grid.cp > 1 and isinstance(operator, Attention):
                gathered = key_value_bytes(operator, self._work, grid, self._bytes)
                forward_s += self._collective_s(Collective.ALL_GATHER, gathered, grid.cp)
                backward.append((index, self._collective_s(Collective.REDUCE_SCATTER, gathered, grid.cp)))
        return forward_s, backward

    def _collective_s(self, kind: Collective, num_bytes: float, num_ranks: int) -> float:
        assert self._link is not None
        if not self._cost.collectives.is_measured(kind, num_ranks, self._link):
            self.unmeasured.add("collectives inside a layer: ring formula")
        run = self._cost.execution
        seconds = self._cost.collectives.seconds(kind, num_bytes, num_ranks, self._link)
        return seconds / run.collective_rate + run.collective_start_s

    def _note(self, table: Table, name: str) -> None:
        if not table.points:
            self.unmeasured.add(f"{name}: peak rate assumed")
        elif not table.measured:
            self.unmeasured.add(f"{name}: scaled from another machine")
        profile = self._cost.profile
        if table.points and self._precision != profile.table_precision:
            self.unmeasured.add(f"{name} in {self._precision}")


def _from_measured(layer: Layer, measured: MeasuredLayer, work: Work) -> LayerTime:
    time = measured.read(work)
    reasons = () if time.inside else (f"{layer.kind} layer outside the measured sizes",)
    return LayerTime(
        time.forward_s,
        time.input_grad_s,
        time.weight_grad_s,
        frozenset(reasons),
        min(time.input_grad_s, max(0.0, time.weight_only_s - time.weight_grad_s)),
    )


def _scaled(time: LayerTime, sums: _OperatorSums, layer: Layer, work: Work, grid: Grid) -> LayerTime:
    """A time measured on one rank, on a grid: shrunk like the FLOP, plus the collectives."""
    forward_comm_s, backward_comm = sums._communication(layer)
    whole = layer_flop(layer, work)
    share = layer_flop(layer, work, grid) / whole if whole else 1.0 / grid.cp
    backward_comm_s = sum(seconds for _, seconds in backward_comm)
    return LayerTime(
        time.forward_s * share + forward_comm_s,
        time.input_grad_s * share + backward_comm_s,
        time.weight_grad_s * share,
        time.unmeasured | sums.unmeasured | {f"tp{grid.tp} x cp{grid.cp} scaled from one rank"},
        time.interior_grad_s * share + backward_comm_s,
    )


def unmeasured_of(times: Iterable[LayerTime]) -> tuple[str, ...]:
    """All reasons of several times, sorted."""
    return tuple(sorted({reason for time in times for reason in time.unmeasured}))


def _surface(table: Table) -> Surface | None:
    return Surface(table.points) if table.points else None


@cache
def _signature(layer: Layer) -> str:
    return signature(layer)
