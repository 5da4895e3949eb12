"""Rows of a calibration, from the times of layers on all processes of a window."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from runtime.measure.clock import quartile_spread, summary
from runtime.measure.layers import LayerKind, Part, WindowTimes
from runtime.measure.windows import Window
from workbench.calibrate.measurement import LayerRow, OptimizerRow
from workbench.cost.roofline import RowWork
from workbench.cost.signature import signature
from workbench.model.layer import Layer
from workbench.plan.plan import Plan


def rows_of(plan: Plan, window: Window, times: Sequence[WindowTimes]) -> Iterator[LayerRow | OptimizerRow]:
    """Yield one row per distinct layer of a window, from the times of all processes."""
    layers = plan.model.module(window.module).layers
    names = [signature(layers[index]) for index in range(*window.layers)]
    for name in dict.fromkeys(names):
        alike = [window.layers[0] + i for i, other in enumerate(names) if other == name]
        layer = layers[alike[0]]
        row = _layer_row(layer, window, _CallTimes(alike, times, together=window.num_processes > 1))
        row = replace(row, **asdict(times[0].notes))
        yield _with_context(row, window.row) if layer.reads_context else row
    for sizes_and_times in zip(*(t.optimizer_s for t in times), strict=True):
        steps_s = [second for _, seconds in sizes_and_times for second in seconds]
        yield OptimizerRow(
            precision=str(window.precision),
            num_parameters=sizes_and_times[0][0],
            **summary(steps_s),
            update=times[0].update,
        )


class _CallTimes:
    """Times of equal layers of one window on all processes; `together`: each ran its share of a layer.

    A process with less work waits for the others at the next exchange, so shares take equally long on
    average. Occasionally one also waits for a time slice of a core: a step includes its part of such waits,
    and is judged by its median. So times are averaged over layers and processes per round, and the median
    round counts.
    """

    def __init__(self, layers: Sequence[int], times: Sequence[WindowTimes], *, together: bool) -> None:
        self._layers, self._times, self._together = layers, times, together

    def all_s(self, kind: LayerKind, part: Part) -> list[float]:
        return [second for seconds in self._by_call(kind, part) for second in seconds]

    def of(self, kind: LayerKind, part: Part) -> float:
        """Median seconds; 0 where nothing ran."""
        seconds = self.all_s(kind, part)
        if self._together:
            seconds = [statistics.mean(of_round) for of_round in zip(*self._by_call(kind, part), strict=True)]
        return statistics.median(seconds) if seconds else 0.0

    def if_timed(self, kind: LayerKind, part: Part) -> float | None:
        """As `of`; None where no pass of the kind was timed."""
        return self.of(kind, part) if self.all_s(kind, Part.FORWARD) else None

    def _by_call(self, kind: LayerKind, part: Part) -> list[list[float]]:
        """[layers and processes that ran] seconds per round."""
        keys = [(layer, kind, part) for layer in self._layers]
        return [times.seconds[key] for times in self._times for key in keys if key in times.seconds]


def _with_context(row: LayerRow, size: RowWork) -> LayerRow:
    """The row with the context that cross-attention read; other layers of the window read none of it."""
    return replace(
        row,
        context_tokens=size.context_tokens,
        reader_tokens=size.reader_tokens,
        context_area=size.context_area,
    )


def _layer_row(layer: Layer, window: Window, calls: _CallTimes) -> LayerRow:
    forward_s = calls.all_s(LayerKind.WHOLE, Part.FORWARD)
    whole_s = calls.of(LayerKind.WHOLE, Part.BACKWARD)
    input_grad_s = min(calls.of(LayerKind.INPUT, Part.BACKWARD), whole_s)
    return LayerRow(
        signature=signature(layer),
        precision=str(window.precision),
        rows=window.num_rows,
        tokens_in=window.row.tokens_in,
        tokens_out=window.row.tokens_out,
        attention_area=window.row.attention_area,
        forward_s=calls.of(LayerKind.WHOLE, Part.FORWARD),
        forward_only_s=calls.of(LayerKind.PLAIN, Part.FORWARD),
        input_grad_s=input_grad_s,
        weight_grad_s=whole_s - input_grad_s,
        weight_only_s=calls.of(LayerKind.WEIGHTS, Part.BACKWARD),
        split_input_s=calls.of(LayerKind.SPLIT, Part.BACKWARD),
        split_weight_s=calls.of(LayerKind.SPLIT, Part.LATER),
        recompute_forward_s=calls.if_timed(LayerKind.RECOMPUTED, Part.FORWARD),
        recompute_backward_s=calls.if_timed(LayerKind.RECOMPUTED, Part.BACKWARD),
        recompute_idle_s=calls.if_timed(LayerKind.RECOMPUTED_IDLE, Part.FORWARD),
        spread=quartile_spread(forward_s),
        repeats=len(forward_s),
        tp=window.tp,
        cp=window.cp,
        ep=window.ep_of(layer),
        sequence_parallel=window.divides(layer),
    )
