"""Seconds of one layer, forward and gradient by gradient, and which of them run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.model.frozen import Needs


@dataclass(frozen=True, slots=True)
class CheckpointTime:
    """Seconds that a checkpoint around a layer adds: what hosts do to drop tensors and to make them again.

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
    """Seconds of one call of a layer, its tensor- and context-parallel collectives included.

    Args:
        forward_s: forward; a recompute costs as much again, and what `checkpoint` says.
        input_grad_s: gradients through the layer to its input.
        weight_grad_s: gradients of its weights, on top of those.
        unmeasured: what went into it that was not measured on that machine.
        interior_grad_s: gradients through the layer as far as its first weights, which
            weight gradients need even when the input asks for none.
        forward_only_s: forward that keeps nothing for a backward; None: as `forward_s`.
        split_input_s: input gradients of a backward that leaves weight gradients for later;
            None: as `input_grad_s`.
        split_weight_s: weight gradients, later; None: as `weight_grad_s`.
        checkpoint: what a checkpoint around the layer adds; None: not measured, taken as nothing.
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
        """A forward that keeps nothing: no gradient runs, or the layer is computed again for it."""
        return self.forward_s if self.forward_only_s is None else self.forward_only_s

    def checkpointed_forward_s(self, needs: Needs) -> float:
        """A forward under a checkpoint, in a stage that has a backward."""
        added_s = 0.0 if self.checkpoint is None or not needs.any else self.checkpoint.forward_s
        return self.forward_without_graph_s() + added_s + self.idle_checkpoint_s(needs)

    def idle_checkpoint_s(self, needs: Needs) -> float:
        """Of that, what the checkpoint adds to a layer that no gradient runs through; 0 to others."""
        return 0.0 if self.checkpoint is None or needs.any else self.checkpoint.idle_s

    def again_s(self) -> float:
        """What a checkpoint makes a backward longer by: the forward again, and what goes around it."""
        return self.forward_s + (0.0 if self.checkpoint is None else self.checkpoint.backward_s)

    def split_through_s(self, needs: Needs) -> float:
        """`I` where the backward is split: what is on the way to later weight gradients is kept."""
        if self.split_input_s is None or not needs.weight_grad:
            return self.through_s(needs)
        if needs.input_grad:
            return self.split_input_s
        return max(0.0, self.split_input_s - (self.input_grad_s - self.interior_grad_s))

    def split_weights_s(self, needs: Needs) -> float:
        """`W` where the backward is split: 0 when the layer is frozen."""
        if self.split_weight_s is None or not needs.weight_grad:
            return self.weights_s(needs)
        return self.split_weight_s

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


def slowest(times: Sequence[LayerTime]) -> LayerTime:
    """One layer on ranks that wait for each other in it: each pass takes as long as the longest.

    Args:
        times: >= 1, of one layer on machines of one kind: what is measured of one is of all.
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
    """All reasons of several times, sorted."""
    return tuple(sorted({reason for time in times for reason in time.unmeasured}))
