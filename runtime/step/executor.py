"""Executes one rank's program. Order, rows and groups all come from the lowered plan."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.adapter import MicrobatchData
from runtime.step.activations import Watched
from runtime.step.annotations import annotated
from runtime.step.fsdp.stages import ShardedStages
from runtime.step.gradients import Gradients
from runtime.step.muon import Sharded, build_optimizer
from runtime.step.offload import Offload
from runtime.step.optimizer import OptimizerSettings
from runtime.step.stage_edges import edges_before_the_end
from runtime.step.stage_module import StageInput, StageModule
from runtime.step.timing import Recorder
from runtime.step.transfers import Wires, accumulate, join
from runtime.step.weight_gradient import SplitBackward, WeightWork
from runtime.world.clock import Stamp
from runtime.world.failure import RankError
from workbench.plan.lowered import Direction, Lowered, Route, Transfer
from workbench.plan.stage import Stage
from workbench.schedule.action import COMPUTE, ROUND, Action, Pass
from workbench.trace import Lane

# Shape suffixes: T = tokens of a packed tensor, D = width.


Arrived = dict[str, list[tuple[Transfer, Tensor]]]  # edge -> rows with their packed tensors


@dataclass(slots=True)
class _Kept:
    """Tensors that a pass keeps for its backward: leaves by edge, the output, early outputs by edge."""

    leaves: dict[str, Tensor]
    output: Tensor
    left: dict[str, Tensor]


class Executor:
    """Executes steps of one rank.

    Args:
        lowered: the plan.
        rank: of the plan.
        modules: stage id -> module, for the stages of this rank: maps packed tokens to packed tokens, or to
            the loss sum. Where the program splits a stage's backward, its module is modified for that.
        feed: (stage, microbatch) -> data of that microbatch, for F actions. Absent: this rank has no part in
            its passes and skips them.
        wires, gradients, recorder: of this rank.
        optimizer: settings of the step.
        loss_scale: 1 / number of predicted tokens of the global batch.
        progress: called with the position in the program before each action.
        on_gradients: called in STEP when gradients are complete and not yet clipped.
        memory: counts this rank's memory; None: memory is not counted.
        sharded: stages with sharded weights, the same as in `gradients`; None: there are none.
    """

    def __init__(
        self,
        lowered: Lowered,
        rank: int,
        *,
        modules: Mapping[int, StageModule],
        feed: Mapping[tuple[int, int], MicrobatchData],
        wires: Wires,
        gradients: Gradients,
        recorder: Recorder,
        optimizer: OptimizerSettings,
        loss_scale: float,
        progress: Callable[[int], None] = lambda position: None,
        on_gradients: Callable[[], None] = lambda: None,
        memory: Watched | None = None,
        sharded: ShardedStages | None = None,
    ) -> None:
        self.lowered = lowered
        self.rank = rank
        self.program = lowered.plan.program.get(rank, ())
        self._modules, self._feed = modules, feed
        self._wires, self._gradients, self._recorder = wires, gradients, recorder
        self._sharded = sharded or ShardedStages.none()
        self._settings = optimizer
        parts = Sharded(list(gradients.flat_parts()), gradients.exchange)
        self._optimizer = build_optimizer(
            lowered.plan, modules.values(), gradients.parameters(), optimizer, parts
        )
        self._loss_scale = loss_scale
        self._progress = progress
        self._on_gradients = on_gradients
        self._memory = memory
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._left: dict[tuple[int, int], WeightWork] = {}  # by I for W
        stages = (lowered.plan.stage[stage] for stage in modules)
        self._left_early = {stage.id for stage in stages if edges_before_the_end(lowered.plan, stage)}
        self._backward_of = {
            (_id(action), _microbatch(action)): action
            for action in self.program
            if action.kind in (Pass.B, Pass.I)
        }
        self._splits = {
            stage: SplitBackward(modules[stage])
            for stage in dict.fromkeys(_id(action) for action in self.program if action.kind is Pass.I)
        }
        self._offload = Offload(modules)
        self._inputs = rows_by_action(
            lowered.inputs, lambda row: rank in lowered.transfers[row].destination_ranks
        )
        self._outputs = rows_by_action(lowered.outputs, lambda row: _sends(lowered.transfers[row], rank))
        self._next_rows = (
            _receives_ahead(self.program, lowered, self._inputs)
            if recorder.clock.posts_before
            else _receives_next(self.program, self._inputs)
        )
        self._check()

    def _check(self) -> None:
        for action in self.program:
            away = action._replace(kind=Pass.OFFLOAD)
            if action.kind in ROUND and action.stage not in self._sharded:
                raise ValueError(f"rank {self.rank}: {action} is of a stage whose weights are not sharded")
            if action.kind is Pass.ONLOAD and away not in self.program[: self.program.index(action)]:
                raise ValueError(f"rank {self.rank}: {action} onloads a stage that is not offloaded")

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's weights; None where it trains nothing."""
        return self._optimizer

    def resume(self, before: "Executor") -> None:
        """Continue with the optimizer of the previous step, of the same weights on another plan."""
        self._optimizer = before._optimizer

    def run_step(self) -> None:
        """Run one optimizer step.

        Raises:
            RankError: an action failed; the message names rank, action and peer.
        """
        clock = self._recorder.clock
        self._wires.start_step()
        self._wires.post(self._next_rows[0] if self.program else (), clock.stamp())
        for position, action in enumerate(self.program):
            self._progress(position)
            try:
                arrived = self._take(action)
                self._sharded.wait_for(action)
                self._gradients.proceed()
                start = clock.stamp()
                if clock.posts_before:
                    self._wires.post(self._next_rows[position + 1], start)
                with annotated(action) if action.kind in COMPUTE else nullcontext():
                    DOES[action.kind](self, action, arrived, start)
                if not clock.posts_before:
                    self._wires.post(self._next_rows[position + 1], start)
            except RankError:
                raise
            except Exception as error:
                clock.check()
                message = f"rank {self.rank} in {action}: {type(error).__name__}: {error}"
                raise RankError(message) from error
        self._wires.finish_step()
        clock.settle()
        for waiting, kind, wanted in ((self._kept, Pass.F, "backward"), (self._left, Pass.I, "W")):
            if waiting:
                left = ", ".join(f"{stage}{kind}{microbatch}" for stage, microbatch in waiting)
                raise RankError(f"rank {self.rank}: {left} still wait for their {wanted} after the step")

    def _forward(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        stage = self.lowered.plan.stage[_id(action)]
        key = (stage.id, _microbatch(action))
        if key not in self._feed:
            self._end(action, start)
            return
        backward = self._backward_of.get(key)
        wanted = frozenset[str]() if backward is None else self._edges_that_want_gradients(backward)
        leaves = {
            edge: join(pieces).detach().requires_grad_(edge in wanted) for edge, pieces in arrived.items()
        }
        with torch.set_grad_enabled(backward is not None):
            output, left = self._run(stage, key, leaves)
        if self._is_loss(stage) and _sharers(stage, self.rank)[0] == self.rank:
            self._recorder.add_loss(output.detach(), self._loss_scale)
        self._give(action, output.detach(), left)
        if backward is not None:
            self._kept[key] = _Kept(leaves, output, left)
        self._end(action, start)

    def _run(
        self, stage: Stage, key: tuple[int, int], leaves: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        features = {edge: leaf for edge, leaf in leaves.items() if edge != stage.module}
        stage_input = StageInput(hidden=leaves.get(stage.module), features=features, data=self._feed[key])
        module = self._modules[stage.id]
        return module.run(stage_input) if stage.id in self._left_early else (module(stage_input), {})

    def _backward(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        """Run B, or I, which defers the weights' gradients to W."""
        key = (_id(action), _microbatch(action))
        if key not in self._feed:
            self._end(action, start)
            return
        kept = self._kept.pop(key)
        outputs, gradients = map(list, zip(*self._ends(key, kept, arrived), strict=True))
        with self._splits[key[0]].leaving() if action.kind is Pass.I else nullcontext() as work:
            torch.autograd.backward(outputs, gradients)
        del outputs, gradients
        self._gradients.accumulate()
        self._give_gradients(action, kept.leaves)
        if work:
            self._left[key] = work
        del kept
        self._end(action, start)

    def _weight_gradient(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        del arrived  # W waits only for its I
        work = self._left.pop((_id(action), _microbatch(action)), None)
        if work is not None:  # else all gradients of this stage were computed in I
            work.run()
        self._gradients.accumulate()
        self._end(action, start)

    def _ends(self, key: tuple[int, int], kept: _Kept, arrived: Arrived) -> list[tuple[Tensor, Tensor]]:
        """Starts of a backward: the output and early outputs, each with its gradient."""
        to_output = {edge: rows for edge, rows in arrived.items() if edge not in kept.left}
        ends = [(kept.output, self._output_gradient(key, kept.output, to_output))]
        for edge, rows in arrived.items():
            if edge in kept.left:
                pieces = sorted(rows, key=lambda piece: piece[0].row)
                ends.append((kept.left[edge], accumulate(pieces, kept.left[edge])))
        return ends

    def _output_gradient(self, key: tuple[int, int], output: Tensor, arrived: Arrived) -> Tensor:
        if self._is_loss(self.lowered.plan.stage[key[0]]):
            return torch.full_like(output, self._loss_scale)
        pieces = [piece for edge in arrived for piece in arrived[edge]]
        return accumulate(sorted(pieces, key=lambda piece: piece[0].row), output)

    def _give_gradients(self, action: Action, leaves: Mapping[str, Tensor]) -> None:
        for number in self._outputs.get(action, ()):
            leaf = leaves[self.lowered.transfers[number].edge]
            assert leaf.grad is not None
            self._wires.give(number, leaf.grad)

    def _reduce(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        del arrived, start  # its groups record their own times
        self._gradients.reduce(action)

    def _exchange(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        del arrived, start  # it records its own time
        self._sharded.start(action)

    def _free(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        del arrived
        self._sharded.release(_id(action))
        self._end(action, start)

    def _leave(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        del arrived
        copied = self._offload.leave(_id(action), self._optimizer)
        self._recorder.span(Lane.COMPUTE, action, start, self._recorder.clock.stamp_of(copied))
        self._sample_memory()

    def _come_back(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        del arrived
        self._offload.come_back(_id(action))
        self._end(action, start)

    def _step(self, action: Action, arrived: Arrived, start: Stamp) -> None:
        del arrived, start  # waiting for the reductions is not part of the step
        self._gradients.finish()
        self._on_gradients()
        start = self._recorder.clock.stamp()
        with annotated(action):
            if self._settings.clip_norm is not None:
                self._gradients.clip(self._settings.clip_norm)
            if self._optimizer is not None:
                self._optimizer.step()
            self._gradients.publish()
        self._end(action, start)

    def moments(self) -> dict[Tensor, tuple[Tensor, ...]]:
        """Updated tensor -> AdamW's two moments of it, or Muon's momentum."""
        states = {} if self._optimizer is None else self._optimizer.state
        return {
            tensor: tuple(value for name, value in sorted(state.items()) if name != "step")
            for tensor, state in states.items()
        }

    def clear_gradients(self) -> None:
        """Clear gradients between steps; not part of STEP."""
        self._gradients.clear()

    def _take(self, action: Action) -> Arrived:
        """Wait for the rows of an action; returns them by edge. The caller's span starts after the wait."""
        arrived: Arrived = {}
        for number in self._inputs.get(action, ()):
            row, packed_TD = self._wires.take(number, action)
            arrived.setdefault(row.edge, []).append((row, packed_TD))
        return arrived

    def _give(self, action: Action, output_TD: Tensor, early_outputs: Mapping[str, Tensor]) -> None:
        for number in self._outputs.get(action, ()):
            edge = self.lowered.transfers[number].edge
            self._wires.give(number, early_outputs[edge].detach() if edge in early_outputs else output_TD)

    def _edges_that_want_gradients(self, backward: Action) -> frozenset[str]:
        """Edges whose gradient this rank, or one that shares its weights, sends: they compute it together."""
        sharers = _sharers(self.lowered.plan.stage[_id(backward)], self.rank)
        rows = (self.lowered.transfers[number] for number in self.lowered.outputs.get(backward, ()))
        return frozenset(
            row.edge
            for row in rows
            if row.direction is Direction.BACKWARD and row.source_rank in sharers and row.after is None
        )

    def _is_loss(self, stage: Stage) -> bool:
        module = self.lowered.plan.model.module(stage.module)
        return module.has_loss and stage.layers[1] == len(module.layers)

    def _end(self, action: Action, start: Stamp) -> None:
        self._recorder.span(Lane.COMPUTE, action, start, self._recorder.clock.stamp())
        self._sample_memory()

    def _sample_memory(self) -> None:
        if self._memory is not None:
            self._recorder.hold(*self._memory.take_peak())
            self._recorder.hold(self._recorder.clock.stamp(), self._memory.num_bytes)


# Functions, not bound methods, which would keep an executor alive until the garbage collector runs.
DOES: Mapping[Pass, Callable[[Executor, Action, Arrived, Stamp], None]] = {
    Pass.F: Executor._forward,
    Pass.B: Executor._backward,
    Pass.I: Executor._backward,
    Pass.W: Executor._weight_gradient,
    Pass.ALL_GATHER: Executor._exchange,
    Pass.FREE: Executor._free,
    Pass.REDUCE_SCATTER: Executor._exchange,
    Pass.OFFLOAD: Executor._leave,
    Pass.ONLOAD: Executor._come_back,
    Pass.REDUCE_GRAD: Executor._reduce,
    Pass.STEP: Executor._step,
}

Rows = Mapping[Action, tuple[int, ...]]


def rows_by_action(rows: Rows, is_mine: Callable[[int], bool]) -> Rows:
    """Action -> its rows that concern one rank."""
    return {action: tuple(filter(is_mine, numbers)) for action, numbers in rows.items()}


def _sends(row: Transfer, rank: int) -> bool:
    """Whether the rank sends the row when its producer ends, and not when another row arrives."""
    return row.source_rank == rank and row.after is None


def _receives_ahead(program: Sequence[Action], lowered: Lowered, inputs: Rows) -> tuple[tuple[int, ...], ...]:
    """[positions + 1] rows of the first pass that receives any, from each position on."""
    ahead: list[tuple[int, ...]] = [()]
    for action in reversed(program):
        rows = tuple(
            number for number in inputs.get(action, ()) if lowered.transfers[number].route is not Route.LOCAL
        )
        ahead.append(rows if action.kind in COMPUTE and rows else ahead[-1])
    return tuple(reversed(ahead))


def _receives_next(program: Sequence[Action], inputs: Rows) -> tuple[tuple[int, ...], ...]:
    """[positions + 1] rows of the action at each position.

    Rows of later actions might depend on what this rank has yet to send.
    """
    return (*(inputs.get(action, ()) for action in program), ())


def _sharers(stage: Stage, rank: int) -> tuple[int, ...]:
    """The tensor-parallel ranks at this rank's context-parallel position; the first counts their loss."""
    return next(ranks for ranks in stage.ranks if rank in ranks)


def _id(action: Action) -> int:
    assert action.stage is not None
    return action.stage


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
