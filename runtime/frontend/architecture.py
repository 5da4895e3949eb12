"""The architecture of a part of a user's model, and its weights assembled from the parts of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from runtime.models.adapter import Adapter
from runtime.models.choose import adapter_of
from runtime.parallel.tensor.cuts import Cut, cuts_of
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

Weight = tuple[str, str]  # module, Hugging Face name


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The immutable description of a part of a model.

    Args:
        module: as plans describe it, all layers trainable.
        adapter: by which the runtime builds it.
        shapes: name in a plan -> shape of every weight.
        layers: names of every layer's weights; a tied one has its name in the first.
        constants: name -> shape of every buffer that its layers read from checkpoints.
    """

    module: Module
    adapter: Adapter
    shapes: Mapping[str, tuple[int, ...]]
    layers: tuple[tuple[str, ...], ...]
    constants: Mapping[str, tuple[int, ...]]

    @property
    def buffers(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every buffer that the runtime computes with."""
        return {name: tuple(each.shape) for name, each in self.adapter.buffers.items()} | dict(self.constants)


def architecture_of(module: Module) -> Architecture:
    """The architecture of a module, from layers built on the meta device; ValueError if it cannot run."""
    adapter = adapter_of(module)
    layers: list[tuple[str, ...]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    constants: dict[str, tuple[int, ...]] = {}
    for index in range(adapter.num_layers):
        built = adapter.build(index)
        shapes_of_layer = {
            built.hugging_face_name(name): tuple(p.shape) for name, p in built.named_parameters()
        }
        layers.append(tuple(adapter.aliases.get(name, name) for name in shapes_of_layer))
        shapes |= {name: shape for name, shape in shapes_of_layer.items() if name not in adapter.aliases}
        own = built.constants().items()
        constants |= {built.hugging_face_name(name): tuple(each.shape) for name, each in own}
    return Architecture(
        module=module, adapter=adapter, shapes=shapes, layers=tuple(layers), constants=constants
    )


def whole_weights(
    plan: Plan, architectures: Mapping[str, Architecture], parts: Mapping[int, Mapping[Weight, Tensor]]
) -> dict[Weight, Tensor]:
    """Weights, or gradients, of all stages whose parts are all given; each once.

    Args:
        plan: of the ranks.
        architectures: by module.
        parts: rank -> its tensors; tensor-parallel ranks have parts of weights.
    """
    weights: dict[Weight, Tensor] = {}
    for stage in plan.stages:
        for row in stage.ranks:
            if all(rank in parts for rank in row):
                weights = _of_row(stage, row, architectures[stage.module], parts) | weights
    return weights


def _of_row(
    stage: Stage,
    row: tuple[int, ...],
    architecture: Architecture,
    parts: Mapping[int, Mapping[Weight, Tensor]],
) -> dict[Weight, Tensor]:
    """Weights of a stage, joined from the parts of ranks with the same tokens."""
    cuts = _cuts(stage, architecture.adapter)
    weights = {}
    for index in range(*stage.layers):
        for name in architecture.layers[index]:
            key = (stage.module, name)
            if key in parts[row[0]]:
                cut_parts = [parts[rank][key] for rank in row]
                weights[key] = cuts[name].join(cut_parts) if name in cuts else cut_parts[0]
    return weights


def _cuts(stage: Stage, adapter: Adapter) -> dict[str, Cut]:
    if stage.tp == 1:
        return {}
    cuts: dict[str, Cut] = {}
    for layer in (adapter.build(index) for index in range(*stage.layers)):
        own = {layer.hugging_face_name(name): cut for name, cut in cuts_of(layer, stage.tp).cut.items()}
        cuts |= {adapter.aliases.get(name, name): cut for name, cut in own.items()}
    return cuts


def model_buffers(model: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
    """Buffers of a user's model that the runtime uses, by the runtime's names, with their current values.

    Values may differ from those of the configuration. Parameters that are never trained (corrections of
    ERNIE's routers) are buffers here.

    Raises:
        ValueError: a buffer of another shape, or a saved one that affects the model's results and that the
            runtime does not know.
    """
    known, buffers = architecture.buffers, dict[str, Tensor]()
    saved, where = model.state_dict().keys(), f"module {architecture.module.name!r}"
    for name, buffer in chain(model.named_buffers(), model.named_parameters()):
        names = tuple(
            name.removeprefix(start) for start in architecture.adapter.prefixes if name.startswith(start)
        )
        if isinstance(buffer, nn.Parameter) and not architecture.constants.keys() & set(names):
            continue
        bare = next((name_ for name_ in names if name_ in known), None)
        if bare is not None and tuple(buffer.shape) == known[bare]:
            buffers[bare] = buffer.detach().cpu()
        elif bare is not None:
            have = tuple(buffer.shape)
            raise ValueError(f"{where}: buffer {name!r} must have shape {known[bare]}, got {have}")
        elif name in saved and buffer.is_floating_point() and not _is_neutral(names, buffer, architecture):
            raise ValueError(
                f"{where}: {type(model).__name__} has the buffer {name!r}, which the runtime does not "
                f"compute with; it knows {', '.join(known) or 'none'}"
            )
    return buffers


def _is_neutral(names: tuple[str, ...], buffer: Tensor, architecture: Architecture) -> bool:
    neutral = architecture.adapter.neutral_buffers
    return any(name in neutral and bool((buffer == neutral[name]).all()) for name in names)
