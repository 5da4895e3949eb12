"""Times the layers of a plan in place: within stage passes, as the executor runs them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.measure.clock import Clock, Stamp, notes_of
from runtime.measure.windows import Window, feature_rows, tokens_held
from runtime.models.adapter import Context, MicrobatchData
from runtime.parallel.context.group import ContextGroup
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.tensor.group import TensorGroup
from runtime.run_settings import TORCH_TYPE
from runtime.step.first_weights import DrawnWeights
from runtime.step.optimizer import OptimizerSettings, Update, build_adamw, update_of
from runtime.step.stage_module import StageInput, build_stage_module, recomputed
from runtime.step.weight_gradient import SplitBackward
from runtime.world.pool import Place
from workbench.calibrate.sustained_rows import DeviceNotes
from workbench.cost.signature import signature
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

# Shape suffixes: T = packed tokens, E = packed tokens of one edge, D = width.

WARMUP = 1
LEAST_ROUNDS = 3
LEAST_ROUNDS_TOGETHER = 16  # of a shared window, where some passes wait for a time slice of a core
SMALL = 1e-3  # typical magnitude of elements of an output's gradient


class LayerKind(Enum):
    """The kinds of passes whose layers are timed."""

    PLAIN = "forward that keeps nothing"
    WHOLE = "forward and full backward"
    INPUT = "forward and backward with frozen weights"
    WEIGHTS = "forward and backward of each layer to its weights alone"
    SPLIT = "forward, then input gradients, then weight gradients"
    RECOMPUTED = "forward and full backward of layers that it runs again"
    RECOMPUTED_IDLE = "forward of layers that would be run again, and no gradient runs through them"


APART = (LayerKind.PLAIN, LayerKind.WHOLE, LayerKind.INPUT, LayerKind.WEIGHTS)
RECOMPUTED = (LayerKind.RECOMPUTED, LayerKind.RECOMPUTED_IDLE)
TRAINED = (LayerKind.WHOLE, LayerKind.WEIGHTS, LayerKind.SPLIT, LayerKind.RECOMPUTED)
FORWARD_ONLY = (LayerKind.PLAIN, LayerKind.RECOMPUTED_IDLE)


class Part(Enum):
    """The timed parts of a layer in such a pass."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LATER = "weight gradients left by the backward"


Seconds = dict[tuple[int, LayerKind, Part], list[float]]  # (layer, kind, part) -> seconds per call


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTimes:
    """The measurements of one process in one window."""

    seconds: Seconds
    optimizer_s: tuple[tuple[int, tuple[float, ...]], ...]  # (number of parameters, seconds per call)
    update: str = Update.SINGLE  # of the optimizer
    notes: DeviceNotes = field(default_factory=DeviceNotes)


def time_window(
    place: Place,
    plan: Plan,
    window: Window,
    budget_s: float,
    device: str = "cpu",
    drawn: DrawnWeights | None = None,
) -> WindowTimes:
    """Time one window on this process, while all others of the world run it too.

    Each runs it on its own, or its share of the tokens or weights where the window is divided among them.

    Kinds of passes alternate, so that disturbances affect all of them, and none finds caches as it left them.
    Split backwards come last: they change the modules permanently. Recomputation is timed by one process
    alone: a checkpoint's overhead is on the host, however many ranks share a layer.

    Args:
        place: of the process; the world synchronises before the first round of each part.
        budget_s: of each kind of pass; at least three rounds are timed, of a shared window sixteen.
        drawn: cache of weights for later windows; None: they are not kept.
    """
    together: Callable[[], object] = dist.barrier if place.size > 1 else _no_barrier
    bench = _Bench(plan, window, device, place.process, drawn)
    is_shared = window.num_processes > 1
    agree = _first_decides if is_shared else _own_clock  # whose clock ends the rounds
    least_rounds = LEAST_ROUNDS_TOGETHER if is_shared else LEAST_ROUNDS
    take_turns = partial(_take_turns, bench, budget_s=budget_s, least_rounds=least_rounds, agree=agree)
    together()
    before = bench.clock.gauge()
    take_turns((*APART, *RECOMPUTED) if window.is_recomputed and not is_shared else APART)
    during = bench.clock.gauge()
    bench.split()
    together()
    take_turns((LayerKind.SPLIT,))
    notes = notes_of(before, during, bench.clock.gauge())
    together()
    steps_s = tuple(bench.optimizer_s())
    return WindowTimes(seconds=bench.seconds, optimizer_s=steps_s, update=bench.update, notes=notes)


def _no_barrier() -> None:
    """A barrier of one process."""


def _own_clock(go_on: bool) -> bool:  # noqa: FBT001  (the answer itself)
    return go_on


def _first_decides(go_on: bool) -> bool:  # noqa: FBT001  (the answer itself)
    """The first process's decision, on all: they need equally many rounds, as they meet within layers."""
    answer = torch.tensor(int(go_on))
    dist.broadcast(answer, 0)
    return bool(answer)


def _take_turns(
    bench: "_Bench",
    kinds: Sequence[LayerKind],
    *,
    budget_s: float,
    least_rounds: int,
    agree: Callable[[bool], bool],
) -> None:
    settled_s = time.perf_counter() + bench.clock.settle_s
    for kind in kinds:
        for _ in range(WARMUP):
            bench.run(kind)
    while time.perf_counter() < settled_s:
        bench.run(kinds[0])
    bench.forget(kinds)
    stop_s = time.perf_counter() + budget_s * len(kinds)
    rounds = 0
    while agree(rounds < least_rounds or time.perf_counter() < stop_s):
        for kind in kinds:
            bench.run(kind)
        rounds += 1


class _Bench:
    """A stage of the window's layers, with a time stamp at every boundary between two of them.

    A GPU's queue is empty before a pass begins, and before the first of several equal layers: a stage has
    many of these, so each takes its device time, or the host's time to launch it where that is more. With
    another layer's work still queued, launching would seem to take no time.
    """

    def __init__(
        self, plan: Plan, window: Window, device: str, process: int, drawn: DrawnWeights | None
    ) -> None:
        self.clock = Clock(device)
        self._dtype = TORCH_TYPE[window.precision]
        self._first = window.layers[0]
        names = [signature(layer) for layer in plan.model.module(window.module).layers[slice(*window.layers)]]
        self._first_of_kind = {i for i, name in enumerate(names) if i == 0 or name != names[i - 1]}
        replica = window.microbatch.replica
        members = tuple(range(window.num_processes))
        ranks = tuple(members[first : first + window.tp] for first in members[:: window.tp])
        stage = Stage(
            id=0, module=window.module, replica=replica, layers=window.layers, ranks=ranks, ep=window.ep
        )
        context = ContextGroup(members, process, None) if window.cp > 1 else None
        self._module = build_stage_module(
            plan,
            stage,
            seed=0,
            dtype=self._dtype,
            device=self.clock.device,
            tensor=TensorGroup(members, process, None) if window.tp > 1 else None,
            experts=ExpertGroup(members, process, None) if window.ep > 1 else None,
            drawn=drawn,
        )
        self._module.call_recomputed = self._call_recomputed
        self._data: MicrobatchData = microbatch_data(
            plan,
            stage,
            window.microbatch,
            SyntheticSource(0),
            dtype=self._dtype,
            device=self.clock.device,
            context=context,
        )
        self._num_tokens = tokens_held(plan, window, process)
        self._features = {
            edge: feature_rows(plan, self._data, edge)
            for edge in (*self._data.placed, *self._data.context_images)
        }
        self._width = plan.model.module(window.module).layers[max(self._first - 1, 0)].out_width
        self._source = torch.Generator(self.clock.device).manual_seed(0)  # the same tokens on all ranks
        self._parameters = list(dict.fromkeys(self._module.parameters()))
        self._splits: list[SplitBackward] = []
        self._kind = LayerKind.PLAIN
        self._starts: list[Stamp] = []
        self._ends: list[Stamp] = []
        self._outputs: list[Tensor] = []  # of layers, before a boundary cuts the graph
        self._back: dict[int, Stamp] = {}  # layer -> when its output's gradient arrived
        self._stamps: list[tuple[int, Part, Stamp, Stamp]] = []
        self.seconds: Seconds = {}
        self.update = Update.SINGLE
        for layer in self._module.layers:
            layer.register_forward_pre_hook(self._on_start)
            layer.register_forward_hook(self._on_end)

    def forget(self, kinds: Sequence[LayerKind]) -> None:
        """Drop the times of these kinds so far, as warm-up."""
        self.seconds = {key: times for key, times in self.seconds.items() if key[1] not in kinds}

    def split(self) -> None:
        """Let backwards defer weight gradients from now on, layer by layer."""
        self._splits = [SplitBackward(layer) for layer in self._module.layers]

    def run(self, kind: LayerKind) -> None:
        """Run one forward and its backward.

        The backward runs on this thread, as in an emulation: otherwise that of one layer would include its
        hand-over to autograd's thread of a GPU, which a pass of a stage pays only once.
        """
        with torch.autograd.set_multithreading_enabled(False):
            self._run(kind)

    def _run(self, kind: LayerKind) -> None:
        self._kind = kind
        self._starts, self._ends, self._outputs, self._back = [], [], [], {}
        self._module.recomputed = (kind in RECOMPUTED,) * len(self._module.layers)
        trained = kind in TRAINED
        for parameter in self._parameters:
            parameter.requires_grad_(trained)
            parameter.grad = torch.zeros_like(parameter) if trained else None
        inputs = self._inputs()
        with torch.set_grad_enabled(kind is not LayerKind.PLAIN):
            output = self._module(inputs)
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            self._note(index, Part.FORWARD, start, end)
        if kind is LayerKind.WEIGHTS:
            self._backward_by_layer()
        elif kind is LayerKind.SPLIT:
            self._backward_in_two(output)
        elif kind not in FORWARD_ONLY and output.requires_grad:
            self._backward_at_once(output)
        self._read()

    def _on_start(self, layer: nn.Module, arguments: object) -> None:
        del layer, arguments
        if self._kind not in RECOMPUTED:
            self._start()

    def _on_end(self, layer: nn.Module, arguments: object, output: Tensor) -> Tensor:
        del layer, arguments
        return output if self._kind in RECOMPUTED else self._end(output)

    def _call_recomputed(
        self, layer: nn.Module, hidden: Tensor | None, features: Mapping[str, Tensor], context: Context
    ) -> Tensor:
        """Take stamps around the checkpoint; a layer's own hooks run within it, and again in the backward."""
        self._start()
        return self._end(recomputed(layer, hidden, features, context))

    def _start(self) -> None:
        if len(self._starts) in self._first_of_kind:
            self.clock.wait()
        self._starts.append(self.clock.stamp())

    def _end(self, output: Tensor) -> Tensor:
        """Take a stamp, and cut the graph where the next layer's backward must not reach this one."""
        self._ends.append(self.clock.stamp())
        index = len(self._outputs)
        self._outputs.append(output)
        if self._kind in FORWARD_ONLY:
            return output
        if self._kind is LayerKind.WEIGHTS:
            return output.detach()
        if not output.requires_grad and self._kind is LayerKind.INPUT:  # nothing upstream requires it
            return output.detach().requires_grad_()
        output.register_hook(lambda gradient: self._on_gradient(index))
        return output

    def _on_gradient(self, index: int) -> None:
        self._back[index] = self.clock.stamp()

    def _backward_at_once(self, output: Tensor) -> None:
        gradient = _small_like(output)
        self.clock.wait()
        torch.autograd.backward([output], [gradient])
        self._note_backward(self.clock.stamp())

    def _backward_in_two(self, output: Tensor) -> None:
        gradient = _small_like(output)
        with ExitStack() as stack:
            works = [stack.enter_context(split.leaving()) for split in self._splits]
            self.clock.wait()
            torch.autograd.backward([output], [gradient])
            end = self.clock.stamp()
        self._note_backward(end)
        self.clock.wait()
        for index in reversed(range(len(works))):
            start = self.clock.stamp()
            works[index].run()
            self._note(index, Part.LATER, start, self.clock.stamp())

    def _backward_by_layer(self) -> None:
        self.clock.wait()
        for index, output in reversed(list(enumerate(self._outputs))):
            if output.requires_grad:
                gradient = _small_like(output)
                start = self.clock.stamp()
                torch.autograd.backward([output], [gradient])
                self._note(index, Part.BACKWARD, start, self.clock.stamp())

    def _note_backward(self, end: Stamp) -> None:
        """Record backwards, each from its output's gradient to its input's."""
        for index in sorted(self._back):
            self._note(index, Part.BACKWARD, self._back[index], end)
            end = self._back[index]

    def _note(self, index: int, part: Part, start: Stamp, end: Stamp) -> None:
        self._stamps.append((index, part, start, end))

    def _read(self) -> None:
        """Read all stamps at the end: reading waits for the GPU, which would leave it idle in between."""
        for index, part, start, end in self._stamps:
            key = (self._first + index, self._kind, part)
            self.seconds.setdefault(key, []).append(self.clock.between_s(start, end))
        self._stamps = []

    def _inputs(self) -> StageInput:
        """Random activations, which require a gradient wherever an earlier layer could."""
        wants = self._kind not in (*FORWARD_ONLY, LayerKind.WEIGHTS)
        hidden_TD = None
        if self._first > 0 and self._num_tokens:
            hidden_TD = self._random(self._num_tokens, wants)
        features = {edge: self._random(rows, wants) for edge, rows in self._features.items()}
        return StageInput(hidden=hidden_TD, features=features, data=self._data)

    def _random(self, num_tokens: int, wants_gradient: bool) -> Tensor:  # noqa: FBT001  (torch's word)
        size, device = (num_tokens, self._width), self.clock.device
        activations = torch.randn(size, dtype=self._dtype, device=device, generator=self._source)
        return activations.requires_grad_(wants_gradient)

    def optimizer_s(self) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield (number of parameters, seconds of AdamW per call), for one layer and for all layers."""
        groups = [list(self._module.layers[-1].parameters()), self._parameters]
        for parameters in groups:
            for parameter in parameters:
                parameter.requires_grad_(True)  # noqa: FBT003  (torch's signature)
                parameter.grad = _small_like(parameter.detach())
            adamw = build_adamw(parameters, OptimizerSettings())
            if adamw is not None:
                self.update = update_of(adamw)
                self.clock.wait()
                seconds = [self.clock.time_s(adamw.step) for _ in range(WARMUP + LEAST_ROUNDS)]
                yield sum(p.numel() for p in parameters), tuple(seconds[WARMUP:])


def _small_like(tensor: Tensor) -> Tensor:
    return torch.randn_like(tensor).mul_(SMALL)
