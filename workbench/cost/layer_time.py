"""Seconds of one layer, forward and gradient by gradient, and which of them run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.model.frozen import Needs


@dataclass(frozen=True, slots=True)
class CheckpointTime:
    """Seconds that a checkpoint around a layer adds, for hosts to drop tensors and to recompute them.

    Args:
        forward_s: to a forward that keeps nothing.
        backward_s: to a forward and a backward, whichever gradients run.
        idle_s: to a forward that no gradient asks for, in a stage that has a backward all the same.
    """

    forward_s: float
    backward_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one call of a layer, including tensor- and context-parallel collectives.

    Args:
        forward_s: forward; recomputation costs as much again, plus `checkpoint`.
        input_grad_s: gradients through the layer to its input.
        weight_grad_s: gradients of its weights, in addition.
        unmeasured: inputs to the estimate that were not measured on the machine.
        interior_grad_s: gradients through the layer down to its first weights, which
            weight gradients need even when the input needs none.
        forward_only_s: forward that keeps nothing for a backward; None: as `forward_s`.
        split_input_s: input gradients of a backward that leaves weight gradients for later;
            None: as `input_grad_s`.
        split_weight_s: weight gradients, later; None: as `weight_grad_s`.
        checkpoint: what a checkpoint around the layer adds; None: not measured, assumed 0.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    unmeasured: frozenset[str] = frozenset()
    interior_grad_s: float = 0.0
    forward_only_s: float | None = None
    split_input_s: float | None = None
    split_weight_s: float | None = None
    checkpoint: CheckpointTime | None = None

    def forward_without_graph_s(self) -> float:
        """Seconds of a forward that keeps nothing: no gradient runs, or the layer is recomputed."""
        return self.forward_s if self.forward_only_s is None else self.forward_only_s

    def checkpointed_forward_s(self, needs: Needs) -> float:
        """Seconds of a forward under a checkpoint, in a stage that has a backward."""
        added_s = 0.0 if self.checkpoint is None or not needs.any else self.checkpoint.forward_s
        return self.forward_without_graph_s() + added_s + self.idle_checkpoint_s(needs)

    def idle_checkpoint_s(self, needs: Needs) -> float:
        """Seconds that a checkpoint adds to a layer without gradients; 0 for other layers."""
        return 0.0 if self.checkpoint is None or needs.any else self.checkpoint.idle_s

    def again_s(self) -> float:
        """Seconds that a checkpoint adds to a backward: the forward again, and its own overhead."""
        return self.forward_s + (0.0 if self.checkpoint is None else self.checkpoint.backward_s)

    def split_through_s(self, needs: Needs) -> float:
        """Seconds of `I` where the backward is split, which keeps tensors for later weight gradients."""
        if self.split_input_s is None or not needs.weight_grad:
            return self.through_s(needs)
        if needs.input_grad:
            return self.split_input_s
        return max(0.0, self.split_input_s - (self.input_grad_s - self.interior_grad_s))

    def split_weights_s(self, needs: Needs) -> float:
        """Seconds of `W` where the backward is split: 0 when the layer is frozen."""
        if self.split_weight_s is None or not needs.weight_grad:
            return self.weights_s(needs)
        return self.split_weight_s

    def through_s(self, needs: Needs) -> float:
        """Seconds of the `I` half of a backward: 0 when no gradient runs."""
        if needs.input_grad:
            return self.input_grad_s
        return self.interior_grad_s if needs.weight_grad else 0.0

    def weights_s(self, needs: Needs) -> float:
        """Seconds of the `W` half of a backward: 0 when the layer is frozen."""
        return self.weight_grad_s if needs.weight_grad else 0.0

    def backward_s(self, needs: Needs) -> float:
        """Seconds of a backward without recomputation: I + W; I if frozen; 0 if nothing upstream needs it."""
        return self.through_s(needs) + self.weights_s(needs)


def slowest(times: Sequence[LayerTime]) -> LayerTime:
    """The time of a layer on ranks that wait for each other: the maximum of each pass.

    Args:
        times: >= 1, of one layer on machines of one kind, so `checkpoint` is that of any.
    """
    first, *others = times
    if not others:
        return first
    return LayerTime(
        max(time.forward_s for time in times),
        max(time.input_grad_s for time in times),
        max(time.weight_grad_s for time in times),
        first.unmeasured.union(*(time.unmeasured for time in others)),
        max(time.interior_grad_s for time in times),
        _longest(time.forward_only_s for time in times),
        _longest(time.split_input_s for time in times),
        _longest(time.split_weight_s for time in times),
        first.checkpoint,
    )


def _longest(times_s: Iterable[float | None]) -> float | None:
    return max((seconds for seconds in times_s if seconds is not None), default=None)


def unmeasured_of(times: Iterable[LayerTime]) -> tuple[str, ...]:
    """All `unmeasured` reasons of several times, sorted."""
    return tuple(sorted({reason for time in times for reason in time.unmeasured}))
