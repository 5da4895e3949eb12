"""Initial weights of a stage: drawn from the seed or read from files, and this rank's parts of them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from runtime.models.adapter import Adapter, StageLayer
from runtime.models.initialise import Fill, initial_value
from runtime.models.weights import WeightReader
from runtime.parallel.expert.cuts import StagePosition, WeightParts
from workbench.model.lora import is_of_adapter
from workbench.model.trained import is_trained_by_name
from workbench.plan.stage import Stage


class DrawnWeights:
    """A cache of drawn whole weights, for repeated builds of stages of one model.

    Memory: every drawn weight, in the type in which it is used.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[object, ...], Tensor] = {}

    def value(self, key: tuple[object, ...], draw: Callable[[], Tensor]) -> Tensor:
        """The weight of that key, drawn on first use. It must not be modified."""
        if key not in self._values:
            self._values[key] = draw()
        return self._values[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Origin of the weights of a stage, and this rank's parts of them; adapters are always drawn.

    Args:
        drawn: cache of drawn weights; None: no cache.
    """

    seed: int
    module: str
    position: StagePosition
    dtype: torch.dtype
    reader: WeightReader | None
    drawn: DrawnWeights | None = None

    def values(
        self, layer: StageLayer, parts: WeightParts, names: Mapping[str, str], drawers: ThreadPoolExecutor
    ) -> Iterator[Tensor]:
        """Yield this rank's parts of weights; `names` maps Hugging Face names to names in the layer.

        Each weight has a generator of its own, so they are drawn in parallel.
        """
        each = map if self.reader is not None else drawers.map
        return each(partial(self._value, layer, parts), names.keys(), names.values())

    def set_constants(self, layer: StageLayer) -> None:
        """Read the layer's constants, which keep their type; without files they stay as they are built."""
        if self.reader is None:
            return
        for local, buffer in layer.constants().items():
            buffer.copy_(self.reader.read(layer.hugging_face_name(local), tuple(buffer.shape)))

    def _value(self, layer: StageLayer, parts: WeightParts, name: str, local: str) -> Tensor:
        shape = layer.get_parameter(local).shape
        if self.reader is not None and not is_of_adapter(name):
            value = self.reader.read(name, tuple(shape))
        elif self.drawn is not None:
            key = (self.seed, self.module, name, tuple(shape), self.dtype)
            value = self.drawn.value(key, lambda: self._draw(layer.fill(local), shape, name).to(self.dtype))
        else:
            value = self._draw(layer.fill(local), shape, name)
        return self.position.own(local, parts, value).to(self.dtype)

    def _draw(self, fill: Fill, shape: Sequence[int], name: str) -> Tensor:
        return initial_value(fill, shape, seed=self.seed, module=self.module, name=name)


def set_weights(
    adapter: Adapter,
    stage: Stage,
    layers: Sequence[StageLayer],
    parts: Sequence[WeightParts],
    first: FirstWeights,
    device: torch.device | str,
) -> None:
    """Set the weights of a stage's layers; tied ones are one parameter, trained if the first one is."""
    parameters: dict[str, nn.Parameter] = {}
    with ThreadPoolExecutor(num_cores()) as drawers:
        for index, layer, layer_parts in zip(range(*stage.layers), layers, parts, strict=True):
            is_trainable = adapter.module.layers[index].trainable
            names = _untied_names(adapter, layer)
            new = {name: local for local, name in reversed(names.items()) if name not in parameters}
            for name, value in zip(new, first.values(layer, layer_parts, new, drawers), strict=True):
                value_here = value.to(
                    device, copy=first.drawn is not None
                )  # cached values must not be trained
                trains = is_trained_by_name(name, is_trainable=is_trainable)
                parameters[name] = nn.Parameter(value_here, requires_grad=trains)
            for local, name in names.items():
                _set_parameter(layer, local, parameters[name])
            first.set_constants(layer)


def _untied_names(adapter: Adapter, layer: StageLayer) -> dict[str, str]:
    """Name in the layer -> Hugging Face name, for a tied weight that in its first layer."""
    names = {local: layer.hugging_face_name(local) for local, _ in layer.named_parameters()}
    return {local: adapter.aliases.get(name, name) for local, name in names.items()}


def _set_parameter(layer: nn.Module, name: str, value: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(layer.get_submodule(owner), attribute, value)


def num_cores() -> int:
    """Number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
