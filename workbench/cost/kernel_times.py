"""Seconds of single kernels on the machine of one profile, under one execution."""

from workbench.cost.execution import AttentionKernel, Execution
from workbench.cost.interpolate import Surface
from workbench.cost.profile import Profile, Table
from workbench.cost.roofline import Gemm, Grid, Work, attention_flop, attention_pairs, operator_tokens
from workbench.graph.layer import Attention, Lookup, Pointwise

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class KernelTimes:
    """Times of products, attentions and memory-bound kernels, read from a profile's tables."""

    def __init__(self, profile: Profile, execution: Execution | None = None) -> None:
        self.profile = profile
        self.execution = execution or Execution()
        self._matmul = _surface(profile.matmul)
        self._attention = _surface(profile.attention)
        self._pointwise = _surface(profile.pointwise)
        self._normalization = _surface(profile.normalization) or self._pointwise

    def matmul_s(self, gemm: Gemm, precision: str) -> tuple[float, bool]:
        """Seconds of one product, and whether its shape lies among the measured ones.

        A shape below the smallest measured one takes the time of the smallest; one without rows, none.
        """
        if gemm.flop == 0:
            return 0.0, True
        run, size = self.execution, ELEMENT_BYTES[precision]
        factor = run.matmul_factor(*gemm, element_bytes=size)
        peak = self.profile.peak(precision) * factor
        if self._matmul is None:
            moved_s = gemm.num_bytes(size) / self.profile.memory_bytes_per_s
            return self._floor(max(gemm.flop / peak, moved_s)), True
        padded = Gemm(*(max(size, low) for size, low in zip(gemm, self._matmul.low, strict=True)))
        reading = self._matmul.read(*padded)
        rate = reading.rate * peak / self.profile.peak(self.profile.table_precision)
        inside = reading.inside and padded == gemm
        return self._floor(padded.flop / rate), inside

    def attention_s(self, operator: Attention, work: Work, grid: Grid, precision: str) -> tuple[float, bool]:
        """Seconds of the forward kernel, and whether its shape lies among the measured ones.

        A row of several sequences is as many heads of their mean length.
        """
        flop = attention_flop(operator, work, grid)
        peak = self.profile.peak(precision) * self.execution.attention_rate
        if operator_tokens(operator, work, grid) == 0:
            return 0.0, True
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
        rate = self._rate(Gemm(scores / keys, keys, operator.head_dim), precision) * run.attention_rate
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
        if num_bytes == 0:
            return 0.0
        rate = self._pointwise.read(num_bytes).rate if self._pointwise else self.profile.memory_bytes_per_s
        run = self.execution
        return self._floor(num_bytes / (rate * run.step_rate)) + run.step_start_s

    def _floor(self, seconds: float) -> float:
        return max(seconds, self.profile.kernel_floor_s)


def _surface(table: Table) -> Surface | None:
    return Surface(table.points) if table.points else None
