"""The model: modules of layers, joined by edges into a DAG."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import CycleError
from itertools import pairwise

from workbench.data.sample import WHERE_SET
from workbench.model.chosen_keys import reads_choice
from workbench.model.feature_layers import FeatureLayers
from workbench.model.layer import (
    Attention,
    Layer,
    LayerKind,
    Matmul,
    Operator,
    Recurrence,
    TokenCount,
)
from workbench.model.module_order import producers_first
from workbench.model.reach import ANY, Reach
from workbench.model.trained import num_trained, num_weights

TEXT = "text"
GENERATED = "generator"  # default modality of a generator's output


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The `transformers` configuration from which the module is built.

    Args:
        architecture: `model_type` of the configuration, e.g. "siglip_vision_model".
        config: canonical JSON of the configuration (sorted keys), so that equal plans have equal hashes.
        projector: projector of an encoder: a name, or steps as JSON; None for an LLM.
        feature_layer: hidden state of an encoder that its projector reads, or several side by side; None: the
            output.
    """

    architecture: str
    config: str
    projector: str | None = None
    feature_layer: FeatureLayers | None = field(default=None, metadata={WHERE_SET: True})


@dataclass(frozen=True, kw_only=True)  # no slots: facts about layers are cached on the instance
class Module:
    """A node of the model DAG: a chain of layers that process one modality.

    The module with modality "text" is the LLM. Its items are whole samples, and it computes the next-token
    loss. A module that reads hidden states of the LLM and ends with a head is a generator, with its own loss.

    Args:
        name: name that is unique in the model.
        modality: modality of the sample segments that the module processes.
        layers: layers in order; those with equal operators share one tuple of them, so that what follows
            from these alone is computed once.
        source: configuration from which the module is built; None: it can be planned but not run.
    """

    name: str
    modality: str
    layers: tuple[Layer, ...]
    source: Source | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"module {self.name!r}: want at least one layer, got none")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"module {self.name!r}: layer names must be unique, {twice!r} is twice")
        trained: dict[str, bool] = {}
        for layer in self.layers:
            if layer.trainable and layer.has_adapters:
                raise ValueError(
                    f"module {self.name!r}: layer {layer.name!r} has adapters, so its own weights are "
                    "frozen; want trainable false"
                )
            for _, shared in layer.tied:
                if trained.setdefault(shared, layer.trainable) != layer.trainable:
                    raise ValueError(
                        f"module {self.name!r}: layers that share {shared!r} must be all trainable or "
                        f"all frozen, {layer.name!r} differs"
                    )
        object.__setattr__(self, "layers", _sharing_operators(self.layers))

    @property
    def has_loss(self) -> bool:
        """Whether its last layer is a loss: the LLM's, or a generator's."""
        return self.modality == TEXT or self.layers[-1].kind is LayerKind.HEAD

    @property
    def leaves_after(self) -> int:
        """Index of the layer whose output other modules read: the last one that is not a loss."""
        return len(self.layers) - 1 - (self.layers[-1].kind is LayerKind.HEAD)

    @cached_property
    def kv_heads(self) -> frozenset[int]:
        """Numbers of key/value heads of its attentions, linear ones too, which tp must divide."""
        heads = (divided_heads(operator) for layer in self.layers for operator in layer.operators)
        return frozenset(num for num in heads if num)

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        """Distinct limited reaches of its attentions; empty where its items are not whole samples."""
        operators = (operator for layer in self.layers for operator in layer.operators)
        reaches = dict.fromkeys(op.reach for op in operators if isinstance(op, Attention) and op.reach != ANY)
        return tuple(reaches) if self.modality == TEXT else ()

    @cached_property
    def stage_starts(self) -> tuple[int, ...]:
        """Indices of layers with which a stage may begin: those that read no earlier one's choice."""
        return tuple(index for index, layer in enumerate(self.layers) if not reads_choice(layer))

    @cached_property
    def tied_layers(self) -> tuple[int, ...]:
        """Indices of layers that share weights; most modules have none."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.tied)

    @property
    def context_layers(self) -> tuple[int, ...]:
        """Indices of layers that read another module's tokens by cross-attention."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.reads_context)

    def entering_width(self, layer: int) -> int:
        """Width of what enters before a layer: added to its input, or read by a projector or by keys."""
        if self.layers[layer].reads_context:
            matmuls = (op for op in self.layers[layer].operators if isinstance(op, Matmul))
            return next(op.in_features for op in matmuls if op.tokens is TokenCount.CONTEXT)
        if layer == 0 and self.has_loss and self.modality != TEXT:
            return next(op.in_features for op in self.layers[0].operators if isinstance(op, Matmul))
        return self.layers[max(layer - 1, 0)].out_width

    @property
    def num_parameters(self) -> int:
        """The number of the module's weights; tied ones counted once."""
        return num_weights(self.layers)

    @property
    def num_trained(self) -> int:
        """The number of trained weights; tied ones counted once."""
        return num_trained(self.layers)


def divided_heads(operator: Operator) -> int:
    """The number of an operator's heads that tensor parallelism divides whole; 0 where it has none."""
    if isinstance(operator, Attention):
        return operator.num_kv_heads
    return operator.num_key_heads if isinstance(operator, Recurrence) else 0


def _sharing_operators(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers with one tuple of operators for all that have equal ones. O(operators)."""
    known = {id(layer.operators): layer.operators for layer in layers}
    first_of: dict[tuple[Operator, ...], tuple[Operator, ...]] = {}
    shared = {key: first_of.setdefault(operators, operators) for key, operators in known.items()}
    if len(first_of) == len(known):
        return tuple(layers)
    return tuple(replace(layer, operators=shared[id(layer.operators)]) for layer in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The output of one module is an input of another.

    If several layers read it, each reads all of it by cross-attention, or each reads one of its stacked
    features.

    Args:
        source: module that produces the output.
        target: module that reads it.
        after_layer: layer of `source` that produces it.
        before_layer: layer of `target` that reads it.
        also_before: further layers of `target` that read it, after `before_layer` in ascending order.
    """

    source: str
    target: str
    after_layer: int
    before_layer: int
    also_before: tuple[int, ...] = field(default=(), metadata={WHERE_SET: True})

    def __post_init__(self) -> None:
        if any(later <= earlier for earlier, later in pairwise(self.entered)):
            raise ValueError(f"edge {self.name}: entered layers must ascend, got {list(self.entered)}")

    @property
    def entered(self) -> tuple[int, ...]:
        """Every layer of the target that reads it."""
        return (self.before_layer, *self.also_before)

    def entered_in(self, layers: tuple[int, int]) -> tuple[int, ...]:
        """The entered layers in [first, last)."""
        first, last = layers
        return tuple([layer for layer in self.entered if first <= layer < last])

    @property
    def name(self) -> str:
        return f"{self.source}>{self.target}"


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """The DAG of modules. The order of modules breaks all ties.

    Args:
        name: name of the model.
        modules: the nodes.
        edges: which module reads which.
    """

    name: str
    modules: tuple[Module, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        _check_names(self)
        _check_edges(self)
        try:
            self._order()
        except CycleError as error:
            cycle = " > ".join(error.args[1][:-1])
            raise ValueError(f"model {self.name!r}: edges must be acyclic, got the cycle {cycle}") from None

    def _order(self) -> list[str]:
        names = [module.name for module in self.modules]
        return producers_first(names, [(edge.source, edge.target) for edge in self.edges])

    @cached_property
    def _by_name(self) -> dict[str, Module]:
        return {module.name: module for module in self.modules}

    def module(self, name: str) -> Module:
        """The module of that name, or ValueError naming the known ones."""
        if name not in self._by_name:
            raise ValueError(f"model {self.name!r} has no module {name!r}; it has {', '.join(self._by_name)}")
        return self._by_name[name]

    @cached_property
    def llm(self) -> Module:
        """The first module of modality text."""
        return next(module for module in self.modules if module.modality == TEXT)

    @cached_property
    def encoders(self) -> tuple[Module, ...]:
        """All modules of other modalities, including generators."""
        return tuple(module for module in self.modules if module.modality != TEXT)

    @cached_property
    def in_order(self) -> tuple[Module, ...]:
        """The modules in topological order: each after those that it reads, otherwise as listed."""
        return tuple(self._by_name[name] for name in self._order())

    def edges_into(self, module: str) -> tuple[Edge, ...]:
        return tuple([edge for edge in self.edges if edge.target == module])

    def edges_out_of(self, module: str) -> tuple[Edge, ...]:
        return tuple([edge for edge in self.edges if edge.source == module])

    def is_context(self, edge: Edge) -> bool:
        """Whether the edge is read by cross-attention, instead of entering the target's sequence."""
        return self.module(edge.target).layers[edge.before_layer].reads_context

    @property
    def num_parameters(self) -> int:
        return sum(module.num_parameters for module in self.modules)


def connect(name: str, *chains: Sequence[Module]) -> ModelGraph:
    """A graph from chains of modules; consecutive ones get an edge from the last layer to the first.

    An encoder that emits as many tokens as it has inside enters all cross-attention layers of its consumer
    instead, where that has any. Of stacked features the first enters the first layer; the others are added
    after one block each, from the first on.

    Example: `connect("valm", (vision, llm), (audio, llm))` joins two encoders at one LLM, and
    `connect("gen", (vision, llm, generator))` goes on behind it, from what its head reads.
    """
    modules: dict[str, Module] = {}
    edges: dict[tuple[str, str], Edge] = {}
    for chain in chains:
        modules.update((module.name, module) for module in chain)
        for source, target in pairwise(chain):
            first, *others = _entered_layers(source, target)
            edges[source.name, target.name] = Edge(
                source=source.name,
                target=target.name,
                after_layer=source.leaves_after,
                before_layer=first,
                also_before=tuple(others),
            )
    graph = ModelGraph(name=name, modules=tuple(modules.values()), edges=tuple(edges.values()))
    return replace(graph, modules=graph.in_order)


def _entered_layers(source: Module, target: Module) -> tuple[int, ...]:
    leaving = source.layers[source.leaves_after]
    is_read = source.modality != TEXT and leaving.emits is TokenCount.IN
    return (target.context_layers if is_read else ()) or (0, *range(2, leaving.stacked + 1))


def _check_names(model: ModelGraph) -> None:
    names = [module.name for module in model.modules]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"model {model.name!r}: module names must be unique, {twice!r} is twice")


def _check_edges(model: ModelGraph) -> None:
    layers = {module.name: len(module.layers) for module in model.modules}
    names = [edge.name for edge in model.edges]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"model {model.name!r}: two modules have at most one edge, {twice} is twice")
    for edge in model.edges:
        ends = [(edge.source, edge.after_layer), *((edge.target, layer) for layer in edge.entered)]
        for end, layer in ends:
            if end not in layers:
                raise ValueError(f"edge {edge.name}: no module {end!r}; the model has {', '.join(layers)}")
            if not 0 <= layer < layers[end]:
                raise ValueError(f"edge {edge.name}: {end} has layers 0..{layers[end] - 1}, got {layer}")
        _check_entrance(model, edge)


def _check_entrance(model: ModelGraph, edge: Edge) -> None:
    """Raise ValueError unless one layer reads the edge, or several by cross-attention or stacked features."""
    target = next(module for module in model.modules if module.name == edge.target)
    kinds = {target.layers[layer].reads_context for layer in edge.entered}
    if kinds == {True}:
        return
    read = list(target.context_layers)
    last = next(module for module in model.modules if module.name == edge.source).layers[edge.after_layer]
    if len(edge.entered) > 1 and last.stacked == 1:
        raise ValueError(
            f"edge {edge.name}: only cross-attention layers read one output several times, want some of "
            f"{read}, got {list(edge.entered)}"
        )
    if len(edge.entered) != last.stacked or True in kinds:
        raise ValueError(
            f"edge {edge.name}: {last.stacked} features are stacked in it, want as many layers without "
            f"cross-attention that one enters, got {list(edge.entered)}"
        )
    if last.kind is LayerKind.PROJECTOR and last.emits is TokenCount.IN:
        hint = (
            f"layers {read}" if read else "a language model such as Llama 3.2 Vision's: it has no such layer"
        )
        raise ValueError(f"edge {edge.name}: cross-attention reads {edge.source}, want {hint}")
