"""Times the executor itself: the cost of actions whose stages have no layers."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from runtime.emulation.emulate import emulate
from runtime.launch import run_lowered
from runtime.measure.clock import summary
from runtime.models.choose import adapter_of
from runtime.parallel.tensor.group import SharedWeights
from runtime.rank_job import Build
from runtime.run_settings import RunSettings
from runtime.step.stage_edges import edges_before_the_end
from runtime.step.stage_module import StageInput
from runtime.world.device import CPU
from runtime.world.pool import Pool
from workbench.calibrate.measurement import OverheadRow
from workbench.model.layer import TokenCount
from workbench.plan.lower import lower
from workbench.plan.lowered import Weights
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.schedule.action import COLLECTIVES, Pass


class EmptyStage(nn.Module):
    """A stage without layers but with the right shapes, so that an action costs only the executor's work.

    It computes the context that the layers of a stage share, such as rotary angles: that is a cost per pass,
    and layers are timed without it.
    """

    def __init__(self, plan: Plan, stage: Stage, dtype: torch.dtype) -> None:
        super().__init__()
        module = plan.model.module(stage.module)
        self.stage = stage
        self.shared: SharedWeights | None = None
        self._adapter = adapter_of(module)
        self._dtype = dtype
        last = module.layers[stage.layers[1] - 1]
        self._emits, self._width = last.emits, last.out_width
        self._is_loss = module.has_loss and stage.layers[1] == len(module.layers)
        self._leaving = {
            edge.name: module.layers[edge.after_layer].out_width for edge in edges_before_the_end(plan, stage)
        }
        self._weights: dict[Weights, list[nn.Parameter]] = {}
        for index in range(*stage.layers):
            layer = module.layers[index]
            for key in (Weights(module.name, index), *(Weights(module.name, None, n) for _, n in layer.tied)):
                empty = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=layer.trainable)
                self._weights.setdefault(key, [empty])
        self._held = nn.ParameterList(p for parameters in self._weights.values() for p in parameters)

    def forward(self, inputs: StageInput) -> Tensor:
        """Zeros: packed [T, D], or a scalar on the last stage of a module with a loss."""
        return self.run(inputs)[0]

    def run(self, inputs: StageInput) -> tuple[Tensor, dict[str, Tensor]]:
        """As `forward`, with zeros of the states that leave before the last layer, by edge."""
        data = inputs.data
        device = self._held[0].device
        self._adapter.context(data, device, self._dtype)
        tokens = data.tokens_in if self._emits is TokenCount.IN else data.tokens_out
        shape = () if self._is_loss else (sum(tokens), self._width)
        leaves = [leaf for leaf in (inputs.hidden, *inputs.features.values()) if leaf is not None]

        def zeros(shape: tuple[int, ...]) -> Tensor:
            output: Tensor = _Zeros.apply(shape, self._dtype, device, *leaves, *self._held)
            return output

        left = {edge: zeros((sum(data.tokens_in), width)) for edge, width in self._leaving.items()}
        return zeros(shape), left

    def weights(self) -> dict[Weights, list[nn.Parameter]]:
        """One element for every layer and every tied weight."""
        return self._weights

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """No weights, as there is nothing to keep."""
        return iter(())

    def named_constants(self) -> dict[str, Tensor]:
        """No constants, as there is nothing to keep."""
        return {}


class _Zeros(torch.autograd.Function):
    """Zeros forward and backward, in the requested shapes, on the device."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *inputs: Tensor
    ) -> Tensor:
        ctx.shapes, ctx.device = [(tensor.shape, tensor.dtype) for tensor in inputs], device
        return torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=ctx.device) for shape, dtype in ctx.shapes)
        return (None, None, None, *zeros)


def build_empty(
    plan: Plan, stage: Stage, *, dtype: torch.dtype, device: torch.device | str, **_: object
) -> EmptyStage:
    """A stage without work, for `run_lowered`; arguments as of `Build`."""
    return EmptyStage(plan, stage, dtype).to(device)


def time_executor(
    plan: Plan, pool: Pool | None, *, device: torch.device = CPU, steps: int = 5
) -> list[OverheadRow]:
    """Median seconds of each kind of action of a plan, with stages that do nothing.

    Messages, slices and joins are the plan's own, so their copies are included. Collectives are left out: an
    empty one takes its latency, which has rows of its own.

    Args:
        pool: runs the ranks on a CPU; None: this process emulates all of them on the device, and
            communication does not count.
    """
    settings = RunSettings(steps=steps, warmup=1, precision=plan.settings.precision)
    timed = _emulated(plan, settings, device) if pool is None else _executed(plan, settings, pool)
    seconds: dict[Pass, list[float]] = {}
    for kind, took_s in timed:
        seconds.setdefault(kind, []).append(took_s)
    return [
        OverheadRow(action=str(kind), **summary(times_s))
        for kind, times_s in sorted(seconds.items())
        if kind not in COLLECTIVES
    ]


def _executed(plan: Plan, settings: RunSettings, pool: Pool) -> Iterator[tuple[Pass, float]]:
    result = run_lowered(lower(plan), settings, pool=pool, build=cast(Build, build_empty))
    for trace in result.traces:
        for span in trace.spans:
            yield span.action.kind, span.end_s - span.start_s


def _emulated(plan: Plan, settings: RunSettings, device: torch.device) -> Iterator[tuple[Pass, float]]:
    for timings in emulate(lower(plan), settings, device=device, build=cast(Build, build_empty)).timed:
        for action, by_rank in timings.works.items():
            yield from ((action.kind, work.own_s) for work in by_rank.values())
        yield from ((Pass.STEP, step_s) for step_s in timings.steps_s.values())
