"""Times the layers of a plan one by one, through the stage modules that the executor runs."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.batches import SyntheticSource, microbatch_data
from runtime.optimizer import OptimizerSettings, build_adamw
from runtime.pool import Place
from runtime.rank_job import TORCH_TYPE
from runtime.stage_module import StageInput, StageModule, build_stage_module
from workbench.calibrate.measurement import LayerRow, OptimizerRow
from workbench.cost.roofline import RowWork
from workbench.cost.signature import signature
from workbench.plan.plan import Microbatch, Plan, Precision, Stage
from workbench.plan.work import work_of

# Shape suffixes: T = packed tokens, E = packed tokens of one edge, D = width.

WARMUP = 1
LEAST_REPEATS = 3
MAX_CHAIN = 2  # equal layers timed in one chain, so that weights come from memory as they do in a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One layer over one microbatch of the plan; `chain` equal layers from `layer` on are timed at once."""

    module: str
    layer: int
    chain: int
    microbatch: Microbatch
    row: RowWork  # the mean row: tokens and query-key pairs
    precision: Precision

    @property
    def num_rows(self) -> int:
        return len(self.microbatch.rows)

    def key(self, plan: Plan) -> tuple[str, str, int, int, int]:
        """What tells it from other points: signature, precision, rows, tokens and pairs of a row."""
        layer = plan.model.module(self.module).layers[self.layer]
        return (
            signature(layer),
            str(self.precision),
            self.num_rows,
            self.row.tokens_in,
            self.row.attention_area,
        )


class Asked(Enum):
    """Which gradients a timed backward computes."""

    INPUT = "input"
    WEIGHTS = "weights"
    BOTH = "both"


def points_of(plan: Plan, *, sizes: int) -> tuple[Point, ...]:
    """Every distinct layer of every module, over up to `sizes` microbatches from small to large.

    Layers with one signature are timed once. Rows of unequal size count as so many mean rows:
    tokens and query-key pairs, which the cost model is linear in, keep their sums.
    """
    found: dict[tuple[str, str, int, int, int], Point] = {}
    for module in plan.model.modules:
        works = {_mean(plan, m): m for m in plan.microbatches if m.module == module.name}
        spread = _spread(sorted(works, key=lambda key: (key[0] * key[1].tokens_in, key)), sizes)
        for index, layer in enumerate(module.layers):
            name = signature(layer)
            alike = [signature(other) == name for other in module.layers[index : index + MAX_CHAIN]]
            chain = [*alike, False].index(False)
            for num_rows, row in spread:
                point = Point(
                    module=module.name,
                    layer=index,
                    chain=chain,
                    microbatch=works[num_rows, row],
                    row=row,
                    precision=plan.settings.precision,
                )
                found.setdefault(point.key(plan), point)
    return tuple(found.values())


def _mean(plan: Plan, microbatch: Microbatch) -> tuple[int, RowWork]:
    rows = work_of(plan, microbatch).rows
    mean = RowWork(*(round(sum(values) / len(rows)) for values in zip(*map(_sizes, rows), strict=True)))
    return len(rows), mean


def _sizes(row: RowWork) -> tuple[int, int, int]:
    return row.tokens_in, row.tokens_out, row.attention_area


def _spread(values: Sequence[tuple[int, RowWork]], count: int) -> list[tuple[int, RowWork]]:
    """Up to `count` of the values: first, last, and evenly between."""
    if len(values) <= count:
        return list(values)
    if count == 1:
        return [values[len(values) // 2]]
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointTimes:
    """What one process measured of one point; seconds of each timed call, per layer."""

    forward_s: tuple[float, ...]
    backward_s: dict[Asked, tuple[float, ...]]
    context_s: float
    optimizer_s: tuple[float, ...]
    num_parameters: int


def time_point(place: Place, plan: Plan, point: Point, budget_s: float, device: str = "cpu") -> PointTimes:
    """Time one point on this process. With others in the world, all of them run it at the same time.

    Args:
        place: of the process; the world aligns before each kind of pass.
        budget_s: of each kind of pass; at least three calls are timed all the same.
    """
    together = dist.barrier if place.size > 1 else _alone
    bench = _Bench(plan, point, device)
    backward_s: dict[Asked, tuple[float, ...]] = {}
    forward_s: tuple[float, ...] = ()
    for asked in Asked:
        if asked is not Asked.WEIGHTS and not bench.has_inputs:
            continue
        together()
        passes = bench.timed(asked, budget_s)
        backward_s[asked] = tuple(times[1] for times in passes)
        forward_s = tuple(times[0] for times in passes)
    together()
    return PointTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        context_s=bench.context_s,
        optimizer_s=bench.optimizer_s(),
        num_parameters=bench.num_parameters,
    )


def _alone() -> None:
    """Nobody to wait for."""


class _Bench:
    """The stage modules of one point: a chain, and its layers one by one."""

    def __init__(self, plan: Plan, point: Point, device: str) -> None:
        self._dtype = TORCH_TYPE[point.precision]
        self._device = torch.device(device)
        first, last = point.layer, point.layer + point.chain
        replica = point.microbatch.replica
        whole = Stage(id=0, module=point.module, replica=replica, layers=(first, last), ranks=((0,),))
        stages = [replace(whole, layers=(index, index + 1)) for index in range(first, last)]
        self._chain = self._build(plan, whole)
        self._singles = [self._build(plan, stage) for stage in stages] if point.chain > 1 else [self._chain]
        source = SyntheticSource(0)
        self._data = {
            module: microbatch_data(
                plan, module.stage, point.microbatch, source, dtype=self._dtype, device=self._device
            )
            for module in (self._chain, *self._singles)
        }
        self._width = plan.model.module(point.module).layers[max(first - 1, 0)].out_width
        self.has_inputs = first > 0 or bool(self._data[self._chain].placed)
        self.num_parameters = sum(p.numel() for p in self._parameters(self._chain))
        self.context_s = statistics.median(self._context_s() for _ in range(WARMUP + LEAST_REPEATS))

    def _build(self, plan: Plan, stage: Stage) -> StageModule:
        return build_stage_module(plan, stage, seed=0, dtype=self._dtype, device=self._device)

    def _parameters(self, module: StageModule) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in module.named_weights()]

    def _context_s(self) -> float:
        start_s = self._now_s()
        self._chain.adapter.context(self._data[self._chain], self._device, self._dtype)
        return self._now_s() - start_s

    def timed(self, asked: Asked, budget_s: float) -> list[tuple[float, float]]:
        """(forward, backward) seconds of one layer, call by call; the context is taken off.

        Only the first layer of a stage may have no input gradient, so weights alone are timed
        layer by layer; everything else in a chain.
        """
        modules = self._singles if asked is Asked.WEIGHTS else [self._chain]
        num_layers = sum(module.stage.layers[1] - module.stage.layers[0] for module in modules)
        for module in modules:
            for parameter in self._parameters(module):
                parameter.requires_grad_(asked is not Asked.INPUT)
                parameter.grad = torch.zeros_like(parameter) if asked is not Asked.INPUT else None
        kept: list[tuple[float, float]] = []
        stop_s = time.perf_counter() + budget_s
        calls = 0
        while calls < WARMUP + LEAST_REPEATS or time.perf_counter() < stop_s:
            passes = [self._pass(module, asked) for module in modules]
            forward_s = sum(times[0] for times in passes) - self.context_s * len(modules)
            calls += 1
            if calls > WARMUP:
                kept.append((max(0.0, forward_s) / num_layers, sum(t[1] for t in passes) / num_layers))
        return kept

    def _pass(self, module: StageModule, asked: Asked) -> tuple[float, float]:
        inputs = self._inputs(module, asked)
        start_s = self._now_s()
        output = module(inputs)
        middle_s = self._now_s()
        gradient = torch.full_like(output, 1e-3)
        backward_start_s = self._now_s()
        torch.autograd.backward([output], [gradient])
        return middle_s - start_s, self._now_s() - backward_start_s

    def _inputs(self, module: StageModule, asked: Asked) -> StageInput:
        data = self._data[module]
        wants = asked is not Asked.WEIGHTS
        hidden_TD = None
        if module.stage.layers[0] > 0:
            hidden_TD = self._random(sum(data.tokens_in), self._width, requires_grad=wants)
        features = {
            edge: self._random(len(places), self._width, requires_grad=wants)
            for edge, places in data.placed.items()
        }
        return StageInput(hidden=hidden_TD, features=features, data=data)

    def _random(self, num_tokens: int, width: int, *, requires_grad: bool) -> Tensor:
        made = torch.randn(num_tokens, width, dtype=self._dtype, device=self._device)
        return made.requires_grad_(requires_grad)

    def optimizer_s(self) -> tuple[float, ...]:
        """Seconds of AdamW over the chain's weights, call by call."""
        parameters = self._parameters(self._chain)
        for parameter in parameters:
            parameter.requires_grad_(True)  # noqa: FBT003  (torch's signature)
            parameter.grad = torch.full_like(parameter, 1e-3)
        adamw = build_adamw(parameters, OptimizerSettings())
        assert adamw is not None
        found = []
        for _ in range(WARMUP + LEAST_REPEATS):
            start_s = self._now_s()
            adamw.step()
            found.append(self._now_s() - start_s)
        return tuple(found[WARMUP:])

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def rows_of(plan: Plan, point: Point, times: Sequence[PointTimes]) -> Iterator[LayerRow | OptimizerRow]:
    """The measured rows of one point, out of what all processes saw."""
    middle = {asked: _middle([t.backward_s.get(asked, ()) for t in times]) for asked in Asked}
    forward_s = [second for t in times for second in t.forward_s]
    has_inputs = Asked.BOTH in times[0].backward_s
    input_grad_s = min(middle[Asked.INPUT], middle[Asked.BOTH]) if has_inputs else 0.0
    whole_s = middle[Asked.BOTH] if has_inputs else middle[Asked.WEIGHTS]
    yield LayerRow(
        signature=signature(plan.model.module(point.module).layers[point.layer]),
        precision=str(point.precision),
        rows=point.num_rows,
        tokens_in=point.row.tokens_in,
        tokens_out=point.row.tokens_out,
        attention_area=point.row.attention_area,
        forward_s=statistics.median(forward_s),
        input_grad_s=input_grad_s,
        weight_grad_s=whole_s - input_grad_s,
        weight_only_s=middle[Asked.WEIGHTS],
        spread=quartile_spread(forward_s),
        repeats=len(forward_s),
    )
    steps_s = [second for t in times for second in t.optimizer_s]
    yield OptimizerRow(
        precision=str(point.precision),
        num_parameters=times[0].num_parameters,
        seconds=statistics.median(steps_s),
        spread=quartile_spread(steps_s),
    )


def _middle(seconds: Sequence[Sequence[float]]) -> float:
    flat = [second for process in seconds for second in process]
    return statistics.median(flat) if flat else 0.0


def quartile_spread(seconds: Sequence[float]) -> float:
    """(third quartile - first quartile) / median; 0 for fewer than two values."""
    if len(seconds) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / middle if middle > 0 else 0.0
