"""The weights that a stage starts with: drawn from the seed or read, and this rank's parts of them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from runtime.models.adapter import StageLayer
from runtime.models.initialise import Fill, initial_value
from runtime.models.weights import WeightReader
from runtime.parallel.expert.cuts import Place, WeightParts


class DrawnWeights:
    """Whole weights as they were drawn, for who builds stages of one model over and over.

    Memory: every weight that was drawn, in the type in which it is held.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[object, ...], Tensor] = {}

    def value(self, key: tuple[object, ...], draw: Callable[[], Tensor]) -> Tensor:
        """The weight of that key, drawn where it was not before. Not to be written to."""
        if key not in self._values:
            self._values[key] = draw()
        return self._values[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Where the weights of a stage come from, and how this rank holds them.

    Args:
        drawn: keeps what is drawn; None: it is drawn anew.
    """

    seed: int
    module: str
    place: Place
    dtype: torch.dtype
    reader: WeightReader | None
    drawn: DrawnWeights | None = None

    def values(
        self, layer: StageLayer, parts: WeightParts, names: Mapping[str, str], drawers: ThreadPoolExecutor
    ) -> Iterator[Tensor]:
        """This rank's parts of weights, by Hugging Face name -> name in the layer.

        Each weight has a generator of its own, so they are drawn side by side.
        """
        each = map if self.reader is not None else drawers.map
        return each(partial(self._value, layer, parts), names.keys(), names.values())

    def _value(self, layer: StageLayer, parts: WeightParts, name: str, local: str) -> Tensor:
        shape = layer.get_parameter(local).shape
        if self.reader is not None:
            value = self.reader.read(name, tuple(shape))
        elif self.drawn is not None:
            key = (self.seed, self.module, name, tuple(shape), self.dtype)
            value = self.drawn.value(key, lambda: self._draw(layer.fill(local), shape, name).to(self.dtype))
        else:
            value = self._draw(layer.fill(local), shape, name)
        return self.place.own(local, parts, value).to(self.dtype)

    def _draw(self, fill: Fill, shape: Sequence[int], name: str) -> Tensor:
        return initial_value(fill, shape, seed=self.seed, module=self.module, name=name)


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
