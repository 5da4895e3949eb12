"""Interface of an architecture to the runtime: how to build each layer, and the names of its weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig

from runtime.models.attention import PACKED_SDPA, Attends, Packing, pack, register_packed_sdpa
from runtime.models.carried_states import Beside
from runtime.models.configuration import configuration
from runtime.models.context_images import ContextImage, Tiles
from runtime.models.initialise import Fill, constant, normal
from runtime.models.lora import adapter_fill, add_adapters
from runtime.models.mixture import Mixture, MixtureKinds
from runtime.models.refusals import named_refusals
from runtime.models.separate_experts import SeparateExperts
from workbench.data.sample import Item, Segment
from workbench.model.item_tokens import source_config
from workbench.model.model_graph import Module

# Shape suffixes: T = packed tokens, E = packed tokens of one edge, D = hidden width.


class Pools(Protocol):
    """Gathers the tokens that the last layer of an encoder needs, where several ranks share them."""

    def whole(self, x_TD: Tensor) -> Tensor:
        """Tokens of the microbatch that this rank's outputs need, from the rank's own."""
        ...

    def own(self, y_TD: Tensor) -> Tensor:
        """This rank's outputs, from those of the microbatch."""
        ...


@dataclass(frozen=True, slots=True)
class MicrobatchData:
    """Everything that a stage needs for one microbatch, apart from activations.

    Args:
        items: in the order of rows and of every packed tensor.
        tokens_in: per item, tokens within the blocks of its module.
        tokens_out: per item, tokens after its module (the LLM: equal to `tokens_in`).
        raw: per item, input of the first encoder layer: pixels [C, H, W], of a step of a video
            [C, frames, H, W], of an image in tiles [tiles, C, H, W], or mel [bins, frames].
        input_ids: [T] tokens of the LLM's first stage; `PLACEHOLDER` at features.
        labels: [T] targets of the LLM's last stage; `NO_TARGET` where the next token is not text.
        placed: edge name -> [E] positions, in the packed LLM tensor, of that edge's features.
        attention: of the module's tokens; None: each item by itself, causal in the LLM and full in an
            encoder.
        position_ids: [T] position of every token in its item; None: from `tokens_in`.
        axes: [3, T] time, row and column of every token, if the LLM's positions have three axes.
        chosen: edge name -> indices of its features that are placed; absent: all of them.
        embedded: indices of this rank's tokens after an encoder's first layer, -1 for padding: every rank
            embeds whole items; None: all of them.
        pooling: gathers the tokens that the last layer of a shared encoder reduces; None: all are here.
        carries_from: first layer whose output carries a gradient on some context-parallel rank;
            None: none does, or there is one rank.
        grids: per item of an encoder, the grid of its segment.
        unpadded: per item of an encoder, as in its segment.
        tile_tokens: per item, tokens of each part that attends to itself alone; empty: as `tokens_in`.
        windows: per item of an encoder, how many of its modality directly precede it in its sample.
        context_images: edge name -> the images of it that cross-attention reads, in the order of its
            features.
        item_ids: [T] index of every token's item, -1 for padding; present where `context_images` is.
        num_held: tokens within the blocks on this rank, including padding; None: from `tokens_in`.

    Where context-parallel ranks share the microbatch, tensors have this rank's tokens only.
    """

    items: tuple[Item, ...]
    tokens_in: tuple[int, ...]
    tokens_out: tuple[int, ...]
    raw: tuple[Tensor, ...] = ()
    input_ids: Tensor | None = None
    labels: Tensor | None = None
    placed: Mapping[str, Tensor] = field(default_factory=dict)
    attention: Attends | None = None
    position_ids: Tensor | None = None
    axes: Tensor | None = None
    chosen: Mapping[str, Tensor] = field(default_factory=dict)
    carries_from: int | None = None
    embedded: Tensor | None = None
    pooling: Pools | None = None
    grids: tuple[tuple[int, int] | None, ...] = ()
    unpadded: tuple[tuple[int, int] | None, ...] = ()
    tile_tokens: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    context_images: Mapping[str, tuple[ContextImage, ...]] = field(default_factory=dict)
    item_ids: Tensor | None = None
    num_held: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens within the blocks of the module, on this rank."""
        return sum(self.tokens_in) if self.num_held is None else self.num_held

    @property
    def attended(self) -> tuple[int, ...]:
        """Tokens of what is attended in full, one after the other: items, or tiles of an item."""
        if not self.tile_tokens:
            return self.tokens_in
        pairs = zip(self.tokens_in, self.tile_tokens, strict=True)
        return tuple(each for total, each in pairs for _ in range(total // each))


ATTENTION = PACKED_SDPA
PLACEHOLDER = -1  # in no vocabulary, so it is never looked up
NO_TARGET = -100


Rotations = Mapping[str, tuple[Tensor, Tensor]]
ONE_ROTATION = ""


@dataclass(frozen=True, slots=True)
class Context:
    """Context that all layers of a stage share during one forward pass.

    Args:
        rotary: kind of layer -> cosine and sine of every token's angles; `ONE_ROTATION` where all layers
            rotate equally, empty without rotary positions.
        position_ids: [1, T] position of every token in its item, where layers read them besides.
    """

    data: MicrobatchData
    packing: Packing | Attends
    rotary: Rotations = field(default_factory=dict)
    position_ids: Tensor | None = None


class CutKind(Enum):
    """How tensor parallelism partitions a module's weights.

    FUSED: several column cuts side by side in one weight. HEADS: vectors with a number per head. PARTIAL:
    whole, but applied to partitioned activations, so that each member has a part of the gradient. ALL_HEADS:
    norms over the width of all heads.
    """

    WHOLE = "whole"
    COLUMN = "column"
    ROW = "row"
    FUSED = "fused"
    EXPERTS = "experts"
    HEADS = "heads"
    PARTIAL = "partial"
    ALL_HEADS = "all heads"


# Local names of modules, or their classes, and how their weights are partitioned.
CutRules = tuple[tuple[str | type[nn.Module], CutKind], ...]


class StageLayer(nn.Module, ABC):
    """One layer of a module: transformers' submodules under their own parameter names.

    Args:
        prefixes: attribute of this layer -> prefix of its parameters in a Hugging Face checkpoint
            of the module, e.g. {"block": "model.layers.3"}; empty: they have none.
        std: standard deviation of initial matrices.

    Attributes:
        cuts: how tensor parallelism partitions weights, where names of transformers' products do not imply
            it.
        regions: parts of a block whose interior tensor-parallel ranks partition, up to their sum.
        mixture_kinds: classes of modules with experts that may be in it.
    """

    cuts: CutRules = ()
    regions: tuple[str, ...] = (
        "self_attn",
        "cross_attn",
        "linear_attn",
        "attn",
        "attention",
        "mlp",
        "feed_forward",
    )
    mixture_kinds: MixtureKinds = ()

    def __init__(self, prefixes: Mapping[str, str], std: float) -> None:
        super().__init__()
        self.prefixes = dict(prefixes)
        self.std = std

    @abstractmethod
    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        """Packed [T', D'] from packed [T, D]; the LLM's head returns the summed loss instead."""

    def hugging_face_name(self, name: str) -> str:
        """Name in a checkpoint: 'model.layers.3.mlp.up_proj.weight' for 'block.mlp.up_proj.weight'."""
        attribute, _, rest = name.partition(".")
        return ".".join(part for part in (self.prefixes[attribute], rest) if part)

    def mixtures(self) -> dict[str, Mixture]:
        """Local name -> mixture of experts, for every such module."""
        kinds = dict(self.mixture_kinds)
        return {name: kinds[type(m)](m) for name, m in self.named_modules() if type(m) in kinds}

    def constants(self) -> dict[str, Tensor]:
        """Local name -> buffer that checkpoints have beside the weights, in its own type; not trained."""
        stored = self.state_dict().keys()
        return {name: buffer for name, buffer in self.named_buffers() if name in stored}

    def fill(self, name: str) -> Fill:
        """Initial distribution of a parameter by local name: norms identity, biases 0, others normal."""
        owner: Any = self.get_submodule(name.rpartition(".")[0])
        if (fill := adapter_fill(name, owner)) is not None:
            return fill
        if isinstance(owner, nn.LayerNorm) and name.endswith("weight"):
            return constant(1.0)
        if hasattr(owner, "offset"):
            return constant(1.0 - float(owner.offset))
        return constant(0.0) if name.endswith("bias") else normal(self.std)


class InnerLayer(StageLayer):
    """A layer whose only input is the previous layer's output.

    Attributes:
        beside: what it does with earlier states that pass beside its input; None: there are none.
    """

    beside: Beside | None = None

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features
        assert hidden_TD is not None, "the previous layer's output"
        if self.beside is None:
            return self.run(hidden_TD, context)
        return self.beside.around(self.run, hidden_TD, context)

    @abstractmethod
    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        """As `forward`; `context` is made by the layer's own adapter."""


class Adapter(ABC):
    """The transformers architecture of one module of a plan, without weights.

    Layers are built one by one, on the meta device, so that a rank constructs only its own layers.

    Args:
        module: made from a configuration.

    Raises:
        ValueError: transformers refuses the configuration, or it cannot run.
    """

    config_class: type[PretrainedConfig]
    raw_layer = 0  # index of the layer that reads raw inputs
    rotary_name = ""  # of the rotary embedding, in a checkpoint
    _rotary: nn.Module | None = None
    prefixes: tuple[str, ...] = ("",)  # that names may have in checkpoints; the first is its own
    ignored: tuple[str, ...] = ()  # prefixes of unused checkpoint tensors, e.g. a pooling head
    undivided = ""  # why several ranks cannot share its tokens; empty: they can

    def __init__(self, module: Module) -> None:
        assert module.source is not None, "made from a configuration"
        self.module = module
        self.projector = module.source.projector
        self.feature_layer = module.source.feature_layer
        self.config = self.configured(PretrainedConfig._decode_special_floats(source_config(module)))
        self.config._attn_implementation = ATTENTION
        register_packed_sdpa()

    def configured(self, fields: dict[str, Any]) -> PretrainedConfig:
        """The configuration from which transformers builds blocks."""
        return configuration(self.config_class, fields)

    @property
    def separate_experts(self) -> SeparateExperts | None:
        """Names of experts that checkpoints store one by one; None: they do not."""
        return None

    @property
    def transposes_experts(self) -> bool:
        """Whether checkpoints may store all experts of a layer in one tensor as [experts, in, out]."""
        return False

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the whole module."""
        return int(self.config.num_hidden_layers)

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole module: embeddings, blocks, projector or head."""
        return self.raw_layer + self.num_blocks + 2

    def build(self, index: int) -> StageLayer:
        """Build a layer of the module, with parameters on the meta device.

        Raises:
            ValueError: transformers cannot build it from the configuration.
        """
        with named_refusals(self.module.name), torch.device("meta"):
            layer, planned = self._layer(index), self.module.layers[index : index + 1]
            if planned and planned[0].has_adapters:
                add_adapters(layer, planned[0], f"module {self.module.name!r} layer {index}")
            return layer

    def _layer(self, index: int) -> StageLayer:
        """Build the layer; the default device is meta."""
        if index == self.raw_layer:
            return self.first()
        return self.last() if index == self.num_layers - 1 else self.block(index - self.raw_layer - 1)

    @abstractmethod
    def first(self) -> StageLayer:
        """The layer that embeds tokens or items."""

    @abstractmethod
    def block(self, index: int) -> StageLayer:
        """A block, counted from 0."""

    @abstractmethod
    def last(self) -> StageLayer:
        """The projector or head."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Name of a tied parameter -> name of the first parameter of the same weight."""
        return {}

    def spellings(self, name: str) -> tuple[str, ...]:
        """Names that a tensor may have in a checkpoint of the module; the first is its own."""
        return tuple(prefix + name for prefix in self.prefixes)

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Hugging Face name -> buffer of the module, which no optimizer updates; may be written in place."""
        named = () if self._rotary is None else self._rotary.named_buffers()
        return {f"{self.rotary_name}.{name}": buffer for name, buffer in named}

    @property
    def neutral_buffers(self) -> Mapping[str, float]:
        """Name of an unsupported buffer -> the value at which it has no effect."""
        return {}

    @property
    def written_by(self) -> Mapping[str, int]:
        """Name of a weight that several layers have -> the layer from which checkpoints take it."""
        return {}

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        """Shape of the encoder's input for a segment; ValueError where that size is not possible."""
        raise ValueError(f"module {self.module.name!r} reads tokens, not {segment.modality}")

    def tiles(self, segment: Segment) -> Tiles:
        """Layout of an image's tokens for cross-attention; ValueError where they are part of a sequence."""
        raise ValueError(
            f"module {self.module.name!r}: its {segment.modality} tokens stand in the LLM's sequence, "
            "cross-attention cannot read them"
        )

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        """Context of a stage's layers for one microbatch; ValueError where ranks cannot share tokens."""
        del dtype
        if self.undivided and data.attention is not None:
            raise ValueError(f"module {self.module.name!r}: {self.undivided}; want cp 1")
        return Context(data=data, packing=data.attention or pack(data.attended, device))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every weight of the whole module; tied ones once."""
        return self._shapes(lambda layer: dict(layer.named_parameters()))

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `shapes`, also of the layers' constants: every tensor that a checkpoint has."""
        return self._shapes(lambda layer: dict(layer.named_parameters()) | layer.constants())

    def _shapes(self, tensors_of: Callable[[StageLayer], Mapping[str, Tensor]]) -> dict[str, tuple[int, ...]]:
        shapes = {
            layer.hugging_face_name(name): tuple(tensor.shape)
            for layer in (self.build(index) for index in range(self.num_layers))
            for name, tensor in tensors_of(layer).items()
        }
        return {name: shape for name, shape in shapes.items() if name not in self.aliases}

    def check_layers(self) -> None:
        """Raise ValueError unless the plan's module has as many layers as the architecture."""
        if len(self.module.layers) != self.num_layers:
            raise ValueError(
                f"module {self.module.name!r}: its configuration makes {self.num_layers} layers "
                f"(embeddings, blocks, projector or head), the plan has {len(self.module.layers)}"
            )
