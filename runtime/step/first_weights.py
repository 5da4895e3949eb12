"""The weights that a stage starts with: drawn from the seed or read, and this rank's parts of them."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from runtime.models.adapter import StageLayer
from runtime.models.initialise import initial_value
from runtime.models.weights import WeightReader
from runtime.parallel.expert.cuts import Place, WeightParts


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Where the weights of a stage come from, and how this rank holds them."""

    seed: int
    module: str
    place: Place
    dtype: torch.dtype
    reader: WeightReader | None

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
        else:
            value = initial_value(layer.fill(local), shape, seed=self.seed, module=self.module, name=name)
        return self.place.own(local, parts, value).to(self.dtype)


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
