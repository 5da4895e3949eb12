"""Times what is not a layer: products, copies, messages, all-reduces, and the executor itself."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.adapters.choose import adapter_of
from runtime.bench_layers import quartile_spread
from runtime.launch import run_lowered
from runtime.pool import Place, Pool
from runtime.rank_job import TORCH_TYPE, RunSettings
from runtime.stage_module import StageInput
from workbench.calibrate.measurement import CollectiveRow, CopyRow, LinkRow, MatmulRow, OverheadRow
from workbench.graph.layer import TokenCount
from workbench.graph.model_graph import TEXT
from workbench.plan.lower import lower
from workbench.plan.lowered import Weights
from workbench.plan.plan import Plan, Precision, Stage
from workbench.schedule.action import Pass

MESSAGE_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
REDUCED_BYTES = (2**12, 2**18, 2**22, 2**24)
PRODUCTS = ((256, 256, 256), (256, 1024, 512), (512, 512, 2048), (1024, 1024, 1024))  # m, n, k
COPIED_BYTES = (2**16, 2**20, 2**23, 2**25)
REPEATS = 15
WARMUP = 2


def time_products(place: Place, precision: Precision) -> list[MatmulRow]:
    """y[m, n] = x[m, k] w[k, n] in several sizes."""
    del place
    dtype = TORCH_TYPE[precision]
    rows = []
    for m, n, k in PRODUCTS:
        x, w = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        seconds = _repeat(lambda x=x, w=w: x @ w)  # type: ignore[misc]
        rows.append(MatmulRow(precision=str(precision), m=m, n=n, k=k, **_summary(seconds)))
    return rows


def time_copies(place: Place) -> list[CopyRow]:
    """A kernel that reads half of the bytes and writes the other half."""
    del place
    rows = []
    for num_bytes in COPIED_BYTES:
        source = torch.ones(num_bytes // 8)
        target = torch.empty_like(source)
        seconds = _repeat(lambda s=source, t=target: torch.add(s, 1.0, out=t))  # type: ignore[misc]
        rows.append(CopyRow(num_bytes=num_bytes, **_summary(seconds)))
    return rows


def time_messages(place: Place) -> list[LinkRow]:
    """Half of a round trip between the first two processes, as the executor sends: isend and irecv."""

    def round_trip(buffer: Tensor) -> None:
        if place.process == 0:
            _must(dist.isend(buffer, 1, tag=1)).wait()
            _must(dist.irecv(buffer, 1, tag=2)).wait()
        elif place.process == 1:
            _must(dist.irecv(buffer, 0, tag=1)).wait()
            _must(dist.isend(buffer, 0, tag=2)).wait()

    return [
        LinkRow(link="intra", num_bytes=num_bytes, **_summary([second / 2 for second in seconds]))
        for num_bytes, seconds in _in_turn(MESSAGE_BYTES, round_trip).items()
    ]


def time_reductions(place: Place) -> list[CollectiveRow]:
    """All-reduces among all processes of the world."""

    def reduce(buffer: Tensor) -> None:
        dist.all_reduce(buffer)

    return [
        CollectiveRow(
            collective="all_reduce",
            link="intra",
            num_ranks=place.size,
            num_bytes=num_bytes,
            **_summary(seconds),
        )
        for num_bytes, seconds in _in_turn(REDUCED_BYTES, reduce).items()
    ]


def _in_turn(sizes: Sequence[int], call: Callable[[Tensor], None]) -> dict[int, list[float]]:
    """Seconds by size; sizes take turns, so that a disturbance falls on all of them alike."""
    found: dict[int, list[float]] = {size: [] for size in sizes}
    buffers = {size: torch.zeros(size // 4) for size in sizes}
    for turn in range(WARMUP + REPEATS):
        for size in sizes:
            dist.barrier()
            start_s = time.perf_counter()
            call(buffers[size])
            if turn >= WARMUP:
                found[size].append(time.perf_counter() - start_s)
    return found


def _must(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _repeat(call: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(WARMUP + REPEATS):
        start_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - start_s)
    return found[WARMUP:]


def _summary(seconds: list[float]) -> dict[str, Any]:
    return {"seconds": statistics.median(seconds), "spread": quartile_spread(seconds)}


class EmptyStage(nn.Module):
    """A stage without layers, in the right shape: what is left of an action is the executor.

    It makes the context that the layers of a stage share, such as rotary angles: that is paid
    once a pass, and layers are timed without it.
    """

    def __init__(self, plan: Plan, stage: Stage, dtype: torch.dtype) -> None:
        super().__init__()
        module = plan.model.module(stage.module)
        self.stage = stage
        self._adapter = adapter_of(module)
        self._dtype = dtype
        last = module.layers[stage.layers[1] - 1]
        self._emits, self._width = last.emits, last.out_width
        self._is_loss = module.modality == TEXT and stage.layers[1] == len(module.layers)
        self._weights: dict[Weights, list[nn.Parameter]] = {}
        for index in range(*stage.layers):
            layer = module.layers[index]
            for key in (Weights(module.name, index), *(Weights(module.name, None, n) for _, n in layer.tied)):
                empty = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=layer.trainable)
                self._weights.setdefault(key, [empty])
        self._held = nn.ParameterList(p for held in self._weights.values() for p in held)

    def forward(self, inputs: StageInput) -> Tensor:
        """Zeros: packed [T, D], or a scalar on the last stage of the LLM."""
        data = inputs.data
        self._adapter.context(data, self._held[0].device, self._dtype)
        tokens = data.tokens_in if self._emits is TokenCount.IN else data.tokens_out
        shape = () if self._is_loss else (sum(tokens), self._width)
        leaves = [leaf for leaf in (inputs.hidden, *inputs.features.values()) if leaf is not None]
        output: Tensor = _Zeros.apply(shape, self._dtype, *leaves, *self._held)  # type: ignore[no-untyped-call]
        return output

    def weights(self) -> dict[Weights, list[nn.Parameter]]:
        """One element for every layer and every tied weight."""
        return self._weights

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Nothing that anybody would want to keep."""
        return iter(())


class _Zeros(torch.autograd.Function):
    """Zeros forward, zeros backward, in the shapes asked for."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes))


def build_empty(
    plan: Plan,
    stage: Stage,
    *,
    seed: int,
    dtype: torch.dtype,
    weights: Path | None,
    device: torch.device | str,
) -> EmptyStage:
    """A stage for `run_lowered` that costs nothing."""
    del seed, weights
    return EmptyStage(plan, stage, dtype).to(device)


def time_executor(plan: Plan, pool: Pool, *, steps: int = 5) -> list[OverheadRow]:
    """Seconds of each kind of action of a plan whose stages do nothing: medians over all of them.

    Messages, slices and joins are the plan's own, so their copies are part of it. REDUCE_GRAD
    is left out: what an empty one takes is its collective's latency, which has rows of its own.
    """
    settings = RunSettings(steps=steps, warmup=1, precision=plan.settings.precision)
    result = run_lowered(lower(plan), settings, pool=pool, build=build_empty)
    seconds: dict[Pass, list[float]] = {}
    for trace in result.traces:
        for span in trace.spans:
            seconds.setdefault(span.action.kind, []).append(span.end_s - span.start_s)
    return [
        OverheadRow(action=str(kind), **_summary(found))
        for kind, found in sorted(seconds.items())
        if kind is not Pass.REDUCE_GRAD
    ]
