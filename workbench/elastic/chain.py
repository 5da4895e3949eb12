"""A model as a chain of layers, with times and bytes by the number of GPUs per stage."""

from dataclasses import dataclass
from math import frexp, inf, isfinite, ldexp

import numpy as np

from workbench.arrays import Ints
from workbench.float_sum import float_sum

UNITS_LOG2 = 38  # the whole chain takes at most 2**38 units, so that 5 x stages x chain stays in int64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChain:
    """The chain that templates cut; for a DAG of modules, their layers in data order.

    Times are counted in whole units of a power of two of a second, at least 2**-38 of the chain's time
    each, so that sums of layers are exact and ties are ties.

    Args:
        widths: [W] possible GPUs per stage, ascending; layers are cut across all of them.
        time_s: [L][W] seconds of one forward and one backward of a microbatch.
        held_bytes: [L][W] bytes a layer adds to each GPU of its stage: weights, gradients, optimizer state,
            and what the caller reserves for the microbatches in flight. Empty: memory is unlimited.
        capacity_bytes: of a GPU.

    Raises:
        ValueError: no layer or width, widths not ascending, ragged or negative numbers.
    """

    widths: tuple[int, ...]
    time_s: tuple[tuple[float, ...], ...]
    held_bytes: tuple[tuple[int, ...], ...] = ()
    capacity_bytes: float = inf

    def __post_init__(self) -> None:
        if not self.time_s:
            raise ValueError("a chain needs at least one layer, got none")
        if not self.widths or self.widths[0] < 1 or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must be ascending counts of GPUs >= 1, got {self.widths}")
        if self.held_bytes and len(self.held_bytes) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers have times, {len(self.held_bytes)} have bytes")
        for layer, times in enumerate(self.time_s):
            if len(times) != len(self.widths):
                raise ValueError(f"layer {layer}: want {len(self.widths)} times, one per width, got {times}")
            if not all(isfinite(time) and time >= 0 for time in times):
                raise ValueError(f"layer {layer}: times must be finite and >= 0 s, got {times}")
        for layer, layer_bytes in enumerate(self.held_bytes):
            if len(layer_bytes) != len(self.widths) or min(layer_bytes) < 0:
                raise ValueError(
                    f"layer {layer}: want {len(self.widths)} byte counts >= 0, got {layer_bytes}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.time_s)

    @property
    def unit_s(self) -> float:
        """Seconds of one unit."""
        longest = max(float_sum(column) for column in zip(*self.time_s, strict=True))
        return ldexp(1.0, frexp(longest or 1.0)[1] - UNITS_LOG2)

    def units(self) -> Ints:
        """[W][L + 1] units of the first l layers for each width."""
        layers = np.rint(np.array(self.time_s).T / self.unit_s).astype(np.int64)
        return np.concatenate((np.zeros((len(self.widths), 1), np.int64), np.cumsum(layers, axis=1)), axis=1)

    def reaches(self) -> Ints:
        """[W][L] the furthest end of a stage from each layer that fits in memory, by width."""
        num = self.num_layers
        if not self.held_bytes or self.capacity_bytes == inf:
            return np.full((len(self.widths), num), num, np.int64)
        ends = []
        for column in zip(*self.held_bytes, strict=True):
            prefix = np.concatenate(([0], np.cumsum(np.array(column, np.int64))))
            limit = prefix[:-1] + int(self.capacity_bytes)
            ends.append(np.searchsorted(prefix, limit, side="right") - 1)
        return np.array(ends, np.int64)

    def stage_bytes(self, first: int, end: int, num_gpus: int) -> int:
        """Bytes that a stage of these layers holds on each of its GPUs."""
        index = self.widths.index(num_gpus)
        return sum(layer_bytes[index] for layer_bytes in self.held_bytes[first:end])

    def stage_s(self, first: int, end: int, num_gpus: int) -> float:
        """Seconds of one forward and one backward of a stage, in whole units."""
        units = self.units()[self.widths.index(num_gpus)]
        return float(units[end] - units[first]) * self.unit_s
