"""A part of a user's model as the runtime knows it, and its weights put together out of ranks' parts."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from runtime.models.adapter import Adapter
from runtime.models.choose import adapter_of
from runtime.parallel.tensor.cuts import Cut, cuts_of
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan, Stage

Weight = tuple[str, str]  # module, Hugging Face name


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


def whole_weights(
    plan: Plan, known: Mapping[str, Architecture], parts: Mapping[int, Mapping[Weight, Tensor]]
) -> dict[Weight, Tensor]:
    """Weights, or gradients, of all stages that some ranks hold completely; each once.

    Args:
        plan: that the ranks followed.
        known: by module.
        parts: rank -> what it holds; tensor-parallel ranks hold parts of weights.
    """
    found: dict[Weight, Tensor] = {}
    for stage in plan.stages:
        for row in stage.ranks:
            if all(rank in parts for rank in row):
                found = _of_row(stage, row, known[stage.module], parts) | found
    return found


def _of_row(
    stage: Stage, row: tuple[int, ...], known: Architecture, parts: Mapping[int, Mapping[Weight, Tensor]]
) -> dict[Weight, Tensor]:
    """Of a stage, out of the parts of ranks that hold the same tokens."""
    cuts = _cuts(stage, known.adapter)
    found = {}
    for index in range(*stage.layers):
        for name in known.layers[index]:
            key = (stage.module, name)
            if key in parts[row[0]]:
                held = [parts[rank][key] for rank in row]
                found[key] = cuts[name].join(held) if name in cuts else held[0]
    return found


def _cuts(stage: Stage, adapter: Adapter) -> dict[str, Cut]:
    if stage.tp == 1:
        return {}
    cuts: dict[str, Cut] = {}
    for layer in (adapter.build(index) for index in range(*stage.layers)):
        own = {layer.hugging_face_name(name): cut for name, cut in cuts_of(layer, stage.tp).cut.items()}
        cuts |= {adapter.aliases.get(name, name): cut for name, cut in own.items()}
    return cuts


def held_buffers(model: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
    """Buffers of a user's model that the runtime computes with, by its names, as the model has them now.

    They may differ from the configuration's.

    Raises:
        ValueError: one of another shape, or one that is saved with the model, changes what it computes and is
            unknown to the runtime.
    """
    known, found = architecture.adapter.buffers, dict[str, Tensor]()
    saved, where = model.state_dict().keys(), f"module {architecture.module.name!r}"
    for name, buffer in model.named_buffers():
        named = (
            name.removeprefix(start) for start in architecture.adapter.prefixes if name.startswith(start)
        )
        names = tuple(named)
        bare = next((each for each in names if each in known), None)
        if bare is not None and buffer.shape == known[bare].shape:
            found[bare] = buffer.detach().cpu()
        elif bare is not None:
            want, have = tuple(known[bare].shape), tuple(buffer.shape)
            raise ValueError(f"{where}: buffer {name!r} must have shape {want}, got {have}")
        elif name in saved and buffer.is_floating_point() and not _is_neutral(names, buffer, architecture):
            raise ValueError(
                f"{where}: {type(model).__name__} has the buffer {name!r}, which the runtime does not "
                f"compute with; it knows {', '.join(known) or 'none'}"
            )
    return found


def _is_neutral(names: tuple[str, ...], buffer: Tensor, architecture: Architecture) -> bool:
    neutral = architecture.adapter.neutral_buffers
    return any(name in neutral and bool((buffer == neutral[name]).all()) for name in names)
