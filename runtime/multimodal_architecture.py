"""What the runtime knows about a part of a user's model, found out once."""

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.adapters.adapter import Adapter
from runtime.adapters.choose import adapter_of
from workbench.graph.model_graph import Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What does not change about a part of a model.

    Args:
        module: as plans know it, all layers trainable.
        adapter: how the runtime sees it.
        shapes: name in a plan -> shape of every weight.
        layers: names of the weights of every layer, tied ones under the name of their first holder.
    """

    module: Module
    adapter: Adapter
    shapes: Mapping[str, tuple[int, ...]]
    layers: tuple[tuple[str, ...], ...]


def architecture_of(module: Module) -> Architecture:
    """Every layer is built once, on the meta device; ValueError where a module cannot run."""
    adapter = adapter_of(module)
    layers: list[tuple[str, ...]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(adapter.num_layers):
        built = adapter.build(index)
        held = {built.hugging_face_name(name): tuple(p.shape) for name, p in built.named_parameters()}
        layers.append(tuple(adapter.aliases.get(name, name) for name in held))
        shapes |= {name: shape for name, shape in held.items() if name not in adapter.aliases}
    return Architecture(module=module, adapter=adapter, shapes=shapes, layers=tuple(layers))
