"""The part of a model in one stage, as a torch module with the plan's names of weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.models.adapter import Adapter, Context, MicrobatchData, StageLayer
from runtime.models.choose import adapter_of
from runtime.models.weights import weights_of
from runtime.parallel.context.token_shares import rows_of
from runtime.parallel.expert.cuts import WeightParts, parts_of, position_in
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.expert.layers import parallelize_experts
from runtime.parallel.tensor.cuts import Cut
from runtime.parallel.tensor.group import SharedWeights, TensorGroup
from runtime.parallel.tensor.layers import parallelize, whole_name
from runtime.parallel.tensor.sequence import TokenParts, share_tokens
from runtime.step.first_weights import DrawnWeights, FirstWeights, set_weights
from runtime.step.stage_edges import edges_before_the_end, edges_into_stage, entering_part
from workbench.model.model_graph import Edge, Module
from workbench.plan.lowered import Weights
from workbench.plan.plan import Plan
from workbench.plan.recomputed_layers import recomputed_in
from workbench.plan.runnable import check_settings, check_shared_tokens, check_whole_backwards
from workbench.plan.runnable_degrees import check_degrees
from workbench.plan.sequence import TokenBorders, token_borders
from workbench.plan.stage import Stage

# Shape suffixes: T = packed tokens, E = packed tokens of one edge, D = hidden width.

LayerCall = Callable[[nn.Module, Tensor | None, Mapping[str, Tensor], Context], Tensor]


@dataclass(frozen=True, slots=True)
class StageInput:
    """Inputs of one forward pass of a stage.

    Args:
        hidden: packed [T, D] from the previous stage of the module; None for its first stage.
        features: edge name -> packed [E, D], for edges that enter a layer of this stage. An
            edge whose modality is missing from the microbatch has no entry.
        data: of this stage and microbatch, from `runtime.data.batches.microbatch_data`.
    """

    hidden: Tensor | None
    data: MicrobatchData
    features: Mapping[str, Tensor] = field(default_factory=dict)


class StageModule(nn.Module):
    """Layers [first, last) of a module.

    The forward pass draws no random numbers (dropout is off in training too), so its result
    for an item does not depend on which other items share the microbatch.
    """

    def __init__(
        self, adapter: Adapter, stage: Stage, layers: list[StageLayer], edges: tuple[Edge, ...]
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.stage = stage
        self.layers = nn.ModuleList(layers)
        self.edges = edges  # that enter a layer of this stage
        self.leaving: tuple[Edge, ...] = ()  # that leave it before its last layer
        self.recomputed = (False,) * len(layers)  # layer by layer
        self.call_recomputed: LayerCall = recomputed  # or one that also takes the time
        self.shared: SharedWeights | None = None
        self.cuts: dict[str, Cut] = {}  # by name as in `named_weights`; empty if weights are whole
        self.expert_cuts: dict[str, Cut] = {}  # the same for distributed experts' weights
        self.experts: ExpertGroup | None = None
        self.train(mode=False)

    @property
    def module(self) -> Module:
        return self.adapter.module

    def train(self, mode: bool = True) -> "StageModule":  # noqa: FBT001, FBT002  (torch's signature)
        """Do nothing: layers stay in evaluation mode, also in training."""
        del mode
        return super().train(mode=False)

    def forward(self, inputs: StageInput) -> Tensor:
        """Packed [T', D'], or the scalar loss sum on the last stage of a module with a loss.

        Raises:
            ValueError: as `run`.
        """
        return self.run(inputs)[0]

    def run(self, inputs: StageInput) -> tuple[Tensor, dict[str, Tensor]]:
        """(result of `forward`, edge that leaves before the last layer -> packed [T', D'] there).

        Raises:
            ValueError: a modality in the microbatch without its features.
        """
        wanted = {*inputs.data.placed, *inputs.data.context_images}
        for edge in self.edges:
            if (edge.name in wanted) != (edge.name in inputs.features):
                have = "missing" if edge.name in wanted else "given, but no item wants them"
                raise ValueError(f"stage {self.stage.id}: features of edge {edge.name} are {have}")
        parameter = next(self.parameters())
        context = self.adapter.context(inputs.data, parameter.device, parameter.dtype)
        first = self.stage.layers[0]
        hidden = inputs.hidden
        if hidden is None and first > 0:  # a member without tokens has one of padding
            width = self.module.layers[first - 1].out_width
            hidden = parameter.new_zeros((1, width))
        hidden = _carrying(hidden, first - 1, inputs.data)
        left: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers, start=first):
            entering = {e.name: e for e in self.edges if index in e.entered}
            features = {
                name: entering_part(
                    edge, index, _own(inputs, name), is_aside=name in inputs.data.context_images
                )
                for name, edge in entering.items()
                if name in inputs.features
            }
            hidden = self._run(layer, index, hidden, features, context)
            if index == 0 and inputs.data.embedded is not None:
                hidden = rows_of(hidden, inputs.data.embedded)
            hidden = _carrying(hidden, index, inputs.data)
            assert hidden is not None, "a layer has an output"
            left |= {edge.name: hidden for edge in self.leaving if edge.after_layer == index}
        assert hidden is not None, "a stage has at least one layer"
        return hidden, left

    def _run(
        self,
        layer: nn.Module,
        index: int,
        hidden: Tensor | None,
        features: Mapping[str, Tensor],
        context: Context,
    ) -> Tensor:
        if index > 0:  # layer 0 places features itself; later layers add them, except for cross-attention
            assert hidden is not None, "only layer 0 makes its own input"
            placed = context.data.placed
            for edge, features_ED in features.items():
                if edge in placed:
                    hidden = hidden.index_add(0, placed[edge], features_ED)
            features = {edge: aside for edge, aside in features.items() if edge not in placed}
        if self.recomputed[index - self.stage.layers[0]] and torch.is_grad_enabled():
            return self.call_recomputed(layer, hidden, features, context)
        output: Tensor = layer(hidden, features, context)
        return output

    def weights(self) -> dict[Weights, list[nn.Parameter]]:
        """Every weight of the stage under the key that gradient groups use, in a fixed order.

        A tied weight is only under `Weights(module, None, shared name)`, once, even where two layers of this
        stage use it.
        """
        by_group: dict[Weights, list[nn.Parameter]] = {}
        for index, layer in enumerate(self.layers, start=self.stage.layers[0]):
            tied = tied_names(self.module, index, [name for name, _ in _named(layer)])
            own = by_group.setdefault(Weights(self.module.name, index), [])
            experts_key = Weights(self.module.name, index, experts=True)
            for name, parameter in _named(layer):
                if name not in tied:
                    group = by_group.setdefault(experts_key, []) if name in self.expert_cuts else own
                    group.append(parameter)
                    continue
                shared = by_group.setdefault(Weights(self.module.name, None, tied[name]), [])
                if all(parameter is not other for other in shared):
                    shared.append(parameter)
        return by_group

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (Hugging Face name, parameter); a tied weight once, under its name in the first layer."""
        by_name: dict[str, nn.Parameter] = {}
        for layer in self.layers:
            for name, parameter in _named(layer):
                by_name.setdefault(self.adapter.aliases.get(name, name), parameter)
        yield from by_name.items()

    def join_ranks(
        self,
        tensor: TensorGroup | None,
        experts: ExpertGroup | None,
        parts: Sequence[WeightParts],
        borders: TokenBorders,
        num_pieces: int = 1,
    ) -> None:
        """Let the module work on one of several ranks that share weights; layers have `parts` already."""
        tokens = None if tensor is None else TokenParts(tensor)
        if experts is not None:
            self.experts = experts
            for index, (layer, layer_parts) in enumerate(
                zip(self.layers, parts, strict=True), self.stage.layers[0]
            ):
                assert isinstance(layer, StageLayer)
                self.expert_cuts |= {
                    layer.hugging_face_name(local): cut for local, cut in layer_parts.experts.items()
                }
                parallelize_experts(layer, experts, tensor, tokens if index in borders.divided else tensor)
        if tensor is not None and tokens is not None:
            self._share(tensor, parts, borders, tokens, num_pieces)

    def _share(
        self,
        group: TensorGroup,
        parts: Sequence[WeightParts],
        borders: TokenBorders,
        tokens: TokenParts,
        num_pieces: int,
    ) -> None:
        """Let layers work as one member of a tensor-parallel group.

        Layers that divide tokens have a part of them outside their regions, where weights have partial
        gradients.
        """
        partial: list[nn.Parameter] = []
        first = self.stage.layers[0]
        for index, (layer, layer_parts) in enumerate(zip(self.layers, parts, strict=True), start=first):
            assert isinstance(layer, StageLayer)
            divided = index in borders.divided
            apart = {**layer_parts.tensor.cut, **layer_parts.experts}
            whole = [name for name, _ in layer.named_parameters() if name not in apart]
            partial += [
                layer.get_parameter(name) for name in (whole if divided else layer_parts.tensor.partial)
            ]
            named = ((layer.hugging_face_name(local), cut) for local, cut in layer_parts.tensor.cut.items())
            self.cuts |= {self.adapter.aliases.get(name, name): cut for name, cut in named}
            parallelize(layer, layer_parts.tensor, group, tokens if divided else group, num_pieces)
        share_tokens(self.layers, first, borders, tokens)
        all_cuts = {**self.cuts, **self.expert_cuts}
        uncut = (weight for name, weight in self.named_weights() if name not in all_cuts)
        self.shared = SharedWeights(
            group,
            elsewhere=tuple(uncut) if group.member > 0 else (),
            partial=tuple(parameter for parameter in partial if parameter.requires_grad),
        )

    def owned_weights(self) -> dict[str, Tensor]:
        """Weights and constants that this stage writes to a checkpoint: all but copies of an earlier layer's.

        Weights are whole: with tensor- or expert-parallel ranks it is a collective.
        """
        writer, first = self.adapter.written_by, self.stage.layers[0]
        weights = {
            name: self._whole(name, weight.detach())
            for index, layer in enumerate(self.layers, start=first)
            for name, weight in _named(layer)
            if name not in self.adapter.aliases and writer.get(name, index) == index
        }
        return weights | self.named_constants()

    def named_constants(self) -> dict[str, Tensor]:
        """Hugging Face name -> constant of a layer, the same on all ranks that share it."""
        named: dict[str, Tensor] = {}
        for layer in self.layers:
            assert isinstance(layer, StageLayer)
            named |= {layer.hugging_face_name(local): each for local, each in layer.constants().items()}
        return named

    def _whole(self, name: str, weight: Tensor) -> Tensor:
        if self.experts is not None and name in self.expert_cuts:
            group: TensorGroup = self.experts
            cut = self.expert_cuts[name]
        elif self.shared is not None and name in self.cuts:
            group, cut = self.shared.group, self.cuts[name]
        else:
            return weight
        return cut.join(group.collect(weight, cut.shapes(weight.shape, group.size)))


def recomputed(
    layer: nn.Module, hidden: Tensor | None, features: Mapping[str, Tensor], context: Context
) -> Tensor:
    """A layer's output, keeping only its input: the backward recomputes the forward."""
    output: Tensor = checkpoint(
        layer, hidden, features, context, use_reentrant=False, preserve_rng_state=False
    )
    return output


def _own(inputs: StageInput, edge: str) -> Tensor:
    """The features among this rank's tokens."""
    features_ED, chosen = inputs.features[edge], inputs.data.chosen.get(edge)
    return features_ED if chosen is None else features_ED.index_select(0, chosen)


def _carrying(hidden: Tensor | None, layer: int, data: MicrobatchData) -> Tensor | None:
    """The output of a layer, which requires a gradient if that of any member does.

    A member may have no token that requires a gradient, but its attention's backward is a collective for
    which the others wait, and its queries attend to their tokens.
    """
    if (
        hidden is None
        or data.carries_from is None
        or layer < data.carries_from
        or hidden.requires_grad
        or not torch.is_grad_enabled()
    ):
        return hidden
    return hidden.detach().requires_grad_()


def _named(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (Hugging Face name, parameter) of one layer, in registration order."""
    assert isinstance(layer, StageLayer)
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        yield layer.hugging_face_name(whole_name(name)), parameter


def tied_names(module: Module, index: int, names: list[str]) -> dict[str, str]:
    """Hugging Face name -> shared name, for the tied parameters of one layer.

    Raises:
        ValueError: the plan ties a parameter that the layer does not have.
    """
    shared_names = {}
    for parameter, shared in module.layers[index].tied:
        match = [name for name in names if name == parameter or name.endswith(f".{parameter}")]
        if len(match) != 1:
            raise ValueError(
                f"module {module.name!r} layer {index}: tied parameter {parameter!r} is none of "
                f"{', '.join(names)}"
            )
        shared_names[match[0]] = shared
    return shared_names


def build_stage_module(
    plan: Plan,
    stage: Stage,
    *,
    seed: int,
    dtype: torch.dtype,
    weights: Path | None = None,
    device: torch.device | str = "cpu",
    tensor: TensorGroup | None = None,
    experts: ExpertGroup | None = None,
    drawn: DrawnWeights | None = None,
) -> StageModule:
    """Build the layers of one stage, without the rest of the model.

    Args:
        plan: of the model and the settings.
        stage: of the layers.
        seed: initial weights depend only on (seed, module, parameter name).
        dtype: of weights and activations.
        weights: a folder of Hugging Face folders, one per module, from which to read weights instead.
        device: of the weights.
        tensor: the ranks that share the stage's weights; None: this one has whole ones.
        experts: the ranks that distribute its experts; None: this one has all.
        drawn: cache of drawn weights for later builds; None: no cache.

    Raises:
        ValueError: the module cannot run (no adapter, another number of layers), `tensor` or `experts` has
            another degree than the stage or cannot share a layer, an edge cannot run, or the weights folder
            lacks a tensor or has one of another shape.
    """
    module = plan.model.module(stage.module)
    adapter = adapter_of(module)
    _check_ties(adapter)
    check_degrees(module, tp=stage.tp, cp=stage.cp)
    check_shared_tokens(plan, stage)
    edges = edges_into_stage(plan, stage)
    layers = [adapter.build(index) for index in range(*stage.layers)]
    parts = [parts_of(layer, tp=stage.tp, ep=stage.ep) for layer in layers]
    first = FirstWeights(
        seed=seed,
        module=module.name,
        position=position_in(stage, tensor, experts),
        dtype=dtype,
        reader=None if weights is None else weights_of(weights, adapter),
        drawn=drawn,
    )
    set_weights(adapter, stage, layers, parts, first, device)
    stage_module = StageModule(adapter, stage, layers, edges).to(device)
    stage_module.leaving = edges_before_the_end(plan, stage)
    settings = plan.settings.of(module.name)
    check_settings(module.name, settings)
    stage_module.recomputed = recomputed_in(plan, stage)
    stage_module.weights()  # refuses a tie that names no parameter
    if settings.collective_pieces > 1:
        check_whole_backwards(plan, stage)
    stage_module.join_ranks(tensor, experts, parts, token_borders(plan, stage), settings.collective_pieces)
    return stage_module


def _check_ties(adapter: Adapter) -> None:
    """Raise ValueError unless the plan ties exactly the weights that the configuration ties."""
    module = adapter.module
    tied = any(layer.tied for layer in module.layers)
    wanted = bool(adapter.aliases or adapter.written_by)
    if tied != wanted:
        raise ValueError(
            f"module {module.name!r}: its configuration {'ties' if wanted else 'does not tie'} "
            f"embedding and head, the plan {'does' if tied else 'does not'}"
        )
