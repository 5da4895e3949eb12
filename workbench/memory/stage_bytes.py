"""What one stage needs over one microbatch on one rank: peaks over its layers."""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from workbench.arrays import Ints
from workbench.memory.layer import LayerBytes
from workbench.memory.split import SplitBytes

Bytes = TypeVar("Bytes", int, Ints)


class StageBytes(NamedTuple, Generic[Bytes]):
    """Bytes of one stage over one microbatch on one rank, as in `memory_table`; or columns of many.

    Args:
        kept: from the forward to the last backward, without the stage's input and output.
        input_kept: of what the layers keep, the part that is the stage's input itself.
        output: the stage's output tensor.
        forward, accumulating: on top of what is kept; see `LayerBytes`.
        first: the same for the stage's first backward, which frees kept tensors layer by
            layer and makes the weights' gradients at the same pace; these are part of it.
    """

    kept: Bytes
    input_kept: Bytes
    output: Bytes
    forward: Bytes
    accumulating: Bytes
    first: Bytes


class StageSplitBytes(NamedTuple, Generic[Bytes]):
    """Bytes of one stage over one microbatch on one rank where its backward is I and W; or columns of many.

    Args:
        left: from I to W.
        input_pass: during I, on top of what the forward kept.
        first: during the stage's first W, on top of what is left: gradients that it makes.
        adding: the same for a later W.
    """

    left: Bytes
    input_pass: Bytes
    first: Bytes
    adding: Bytes


class Moment(NamedTuple):
    """Bytes of a stage at one moment of its first backward or W.

    Args:
        kept: tensors that the forward kept, or I left, and that are not freed yet; those of a layer that is
            recomputed.
        working: tensors in work; negative in a backward that never holds these and all its layer's gradients.
        gradients: of weights.
    """

    kept: int
    working: int
    gradients: int


class LayerInStage(NamedTuple):
    """A layer's bytes and what depends on the stage.

    Args:
        own: of the layer.
        checkpoint: bytes of its input where it is recomputed, 0 without a backward; None: it is not.
        unkept: working bytes of its first forward where it is recomputed, its input among them; else 0.
        gradients: bytes of its weights' gradients.
        waiting: bytes of gradients that wait for an earlier layer's.
    """

    own: LayerBytes
    checkpoint: int | None
    unkept: int
    gradients: int
    waiting: int

    @property
    def kept(self) -> int:
        """Bytes from its forward to its backward."""
        return self.own.kept.num_bytes if self.checkpoint is None else self.checkpoint

    @property
    def again(self) -> int:
        """Bytes that running again adds to these; it keeps the tensor of its checkpoint, not another."""
        if self.checkpoint is None:
            return 0
        return self.own.kept.num_bytes - min(self.checkpoint, self.own.kept.input_bytes)

    @property
    def forward(self) -> int:
        """Bytes inside its first forward, besides `kept`."""
        return self.own.forward if self.checkpoint is None else max(0, self.unkept - self.checkpoint)


def stage_bytes(layers: Sequence[LayerInStage], shared: int, output: int) -> StageBytes[int]:
    """Return the peaks over the layers: a forward keeps what lies before, a backward frees what lies behind.

    Complexity: O(layers).
    """
    total, before = sum(layer.kept for layer in layers), 0
    waits = sum(layer.waiting for layer in layers)
    forward = accumulating = total
    for layer in layers:
        before += layer.kept
        waits -= layer.waiting
        forward = max(forward, before + layer.forward)
        if layer.own.has_backward:
            accumulating = max(accumulating, before + layer.again + layer.own.accumulating + waits)
        if layer.own.has_backward and layer.again:  # whose forward runs again, with earlier gradients there
            accumulating = max(accumulating, before + layer.again + layer.own.forward + waits)
    first = max(map(sum, first_moments(layers)))
    input_kept = layers[0].own.kept.input_bytes if layers[0].checkpoint is None else layers[0].checkpoint
    return StageBytes(
        total + shared, input_kept, output, forward - total, accumulating - total, first - total
    )


def first_moments(layers: Sequence[LayerInStage]) -> Iterator[Moment]:
    """Yield the moments of a stage's first backward that may be its peak: before it, and inside each layer.

    Complexity: O(layers).
    """
    before, later = 0, sum(layer.gradients for layer in layers)
    yield Moment(sum(layer.kept for layer in layers), 0, 0)
    for layer in layers:
        before += layer.kept
        if layer.own.has_backward:
            yield Moment(before + layer.again, layer.own.backward, later)
        later -= layer.gradients
        if layer.own.has_backward and layer.again:  # whose forward runs again, with earlier gradients there
            yield Moment(before + layer.again, layer.own.forward, later)


def weight_moments(splits: Sequence[SplitBytes]) -> Iterator[Moment]:
    """Yield the moments of a stage's first W that may be its peak: before it, and inside each layer.

    Complexity: O(layers).
    """
    later, gradients = sum(split.left for split in splits), 0
    yield Moment(later, 0, 0)
    for split in splits:
        later -= split.left
        yield Moment(later, split.weight_pass, gradients)
        gradients += split.gradients


def stage_split_bytes(layers: Sequence[LayerInStage], splits: Sequence[SplitBytes]) -> StageSplitBytes[int]:
    """Return the peaks over the layers: I left what lies behind; W made gradients of what lies before.

    Complexity: O(layers).
    """
    left = later = sum(split.left for split in splits)
    before, peak = 0, 0
    for split, layer in zip(splits, layers, strict=True):
        later -= split.left
        before += layer.kept
        beside = before - layer.own.kept.num_bytes + layer.again
        peak = max(peak, beside + split.input_pass + later)
        if layer.own.has_backward and layer.again:
            peak = max(peak, before + layer.again + layer.own.forward + later)
    first = max(map(sum, weight_moments(splits)))
    adding = max((split.temporary for split in splits), default=0)
    return StageSplitBytes(left, peak - before, max(0, first - left), adding)
