"""What an architecture must tell the runtime: how to build each layer, and what its weights are called."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig

from runtime.models.attention import PACKED_SDPA, Attends, Packing, pack, register_packed_sdpa
from runtime.models.initialise import Fill, constant, normal
from runtime.models.mixture import Mixture, MixtureKinds
from runtime.models.separate_experts import SeparateExperts
from workbench.data.sample import Item, Segment
from workbench.model.item_tokens import source_config
from workbench.model.model_graph import Module

# Shape suffixes: T = packed tokens, E = packed tokens of one edge, D = hidden width.


class Pools(Protocol):
    """Where the last layer of an encoder, whose tokens several ranks share, finds them."""

    def whole(self, x_TD: Tensor) -> Tensor:
        """All tokens of the microbatch, as far as this rank's outputs need them, out of its own."""
        ...

    def own(self, y_TD: Tensor) -> Tensor:
        """This rank's outputs out of those of the microbatch."""
        ...


class Tiles(NamedTuple):
    """How the tokens of one image lie that cross-attention reads.

    Args:
        num: tiles.
        tokens: of every tile.
        seen: of them, from the first on; the rest is padding.
        filled: tiles that hold a part of the image; behind them is padding too.
    """

    num: int
    tokens: int
    seen: int
    filled: int

    @property
    def total(self) -> int:
        """Tokens of the image."""
        return self.num * self.tokens


class Brought(NamedTuple):
    """An image that cross-attention reads: whose, its place in that item, and its tokens."""

    item: int  # index among the microbatch's
    place: int
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class MicrobatchData:
    """Everything one stage needs to know about one microbatch, apart from activations.

    Args:
        items: in row order, which is the order of every packed tensor.
        tokens_in: per item, tokens inside the blocks of its module.
        tokens_out: per item, tokens behind its module (the LLM: equal to `tokens_in`).
        raw: per item, what the first encoder layer reads: pixels [C, H, W], of a step of a video
            [C, frames, H, W], of an image in tiles [tiles, C, H, W], or mel [bins, frames].
        input_ids: [T] tokens of the LLM's first stage; `PLACEHOLDER` where a feature stands.
        labels: [T] targets of the LLM's last stage; `NO_TARGET` where the next token is not text.
        placed: edge name -> [E] positions, in the packed LLM tensor, of that edge's features.
        attention: of the module's tokens; None: items one after the other, each causal in itself in
            the LLM and in full in an encoder.
        position_ids: [T] place of every token in its item; None: as `tokens_in` says.
        axes: [3, T] time, row and column of every token, where the LLM's positions have three axes.
        chosen: edge name -> which of its features are placed; absent: all of them.
        embedded: which tokens behind an encoder's first layer are this rank's, -1 for padding: every
            rank embeds whole items; None: all of them.
        pooling: how the last layer of a shared encoder finds the tokens that it shrinks; None: they
            are all here.
        carries_from: first layer whose output carries a gradient on some context-parallel rank;
            None: none does, or there is only one rank.
        grids: per item of an encoder, the grid that its segment names.
        unpadded: per item of an encoder, as its segment says of an image in tiles.
        tile_tokens: per item, tokens of each part of it that sees itself alone; empty: as `tokens_in` says.
        brought: edge name -> what cross-attention reads of it, in the order of its features.
        item_ids: [T] index of every token's item, -1 for padding; given where `brought` is.
        num_held: tokens inside the blocks on this rank, padding included; None: as `tokens_in` says.

    Where context-parallel ranks share the microbatch, tensors are of this rank's tokens alone.
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
    brought: Mapping[str, tuple[Brought, ...]] = field(default_factory=dict)
    item_ids: Tensor | None = None
    num_held: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens inside the blocks of the module, on this rank."""
        return sum(self.tokens_in) if self.num_held is None else self.num_held

    @property
    def attended(self) -> tuple[int, ...]:
        """Tokens of what is attended in full, one after the other: items, or tiles of an item."""
        if not self.tile_tokens:
            return self.tokens_in
        pairs = zip(self.tokens_in, self.tile_tokens, strict=True)
        return tuple(each for total, each in pairs for _ in range(total // each))


ATTENTION = PACKED_SDPA
PLACEHOLDER = -1  # outside every vocabulary: such a position is never looked up
NO_TARGET = -100


Rotations = Mapping[str, tuple[Tensor, Tensor]]
ONE_ROTATION = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers of a stage share during one forward pass.

    Args:
        rotary: kind of layer -> cosine and sine of every token's angles; `ONE_ROTATION` where all
            layers turn alike, empty where positions are no rotations.
    """

    data: MicrobatchData
    packing: Packing | Attends
    rotary: Rotations = field(default_factory=dict)


class CutKind(Enum):
    """What becomes of a module's weights.

    FUSED: several column cuts side by side in one weight. PARTIAL: whole, but applied to what
    members hold apart, so that each has a part of the gradient.
    """

    WHOLE = "whole"
    COLUMN = "column"
    ROW = "row"
    FUSED = "fused"
    EXPERTS = "experts"
    PARTIAL = "partial"


# Local names of modules, or their classes, and what becomes of their weights.
CutRules = tuple[tuple[str | type[nn.Module], CutKind], ...]


class StageLayer(nn.Module, ABC):
    """One layer of a module: transformers' own submodules under their own parameter names.

    Args:
        prefixes: attribute of this layer -> prefix of its parameters in a Hugging Face checkpoint
            of the module, e.g. {"block": "model.layers.3"}.
        std: standard deviation of freshly drawn matrices.

    Attributes:
        cuts: what tensor parallelism makes of weights, where the names of transformers' products do not
            tell.
        regions: parts of a block whose insides tensor-parallel ranks hold apart, up to the sum.
        mixture_kinds: modules with experts that may be in it.
    """

    cuts: CutRules = ()
    regions: tuple[str, ...] = ("self_attn", "cross_attn", "attn", "attention", "mlp", "feed_forward")
    mixture_kinds: MixtureKinds = ()

    def __init__(self, prefixes: Mapping[str, str], std: float) -> None:
        super().__init__()
        self.prefixes = dict(prefixes)
        self.std = std

    @abstractmethod
    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        """Packed [T, D] to packed [T', D']; the LLM's head returns the summed loss instead."""

    def hugging_face_name(self, name: str) -> str:
        """'block.mlp.up_proj.weight' as 'model.layers.3.mlp.up_proj.weight'."""
        attribute, _, rest = name.partition(".")
        prefix = self.prefixes[attribute]
        return f"{prefix}.{rest}" if rest else prefix

    def mixtures(self) -> dict[str, Mixture]:
        """Local name -> mixture of experts, for every module that is one."""
        kinds = dict(self.mixture_kinds)
        return {name: kinds[type(m)](m) for name, m in self.named_modules() if type(m) in kinds}

    def fill(self, name: str) -> Fill:
        """How the parameter of that (local) name starts: norms at identity, biases at 0, the rest normal."""
        owner: Any = self.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.LayerNorm) and name.endswith("weight"):
            return constant(1.0)
        if hasattr(owner, "offset"):
            return constant(1.0 - float(owner.offset))
        return constant(0.0) if name.endswith("bias") else normal(self.std)


class InnerLayer(StageLayer):
    """One that reads what the layer before it gives, and nothing beside it."""

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features
        assert hidden_TD is not None, "the layer before gives it"
        return self.run(hidden_TD, context)

    @abstractmethod
    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        """As `forward`; `context` is the one that the layer's own adapter makes."""


@contextmanager
def named_refusals(module: str) -> Iterator[None]:
    """What transformers refuses in a configuration, as a ValueError that names the module."""
    try:
        yield
    except (StrictDataclassError, AssertionError, KeyError, TypeError) as error:
        reason = f"unknown value {error}" if isinstance(error, KeyError) else str(error)
        message = " ".join(reason.split())
        raise ValueError(f"module {module!r}: transformers refuses its configuration: {message}") from error


class Adapter(ABC):
    """One module of a plan seen through its transformers architecture. Holds no weights.

    Layers are built one by one, on the meta device, so that a rank never constructs more
    than the layers it holds.

    Args:
        module: made from a configuration.

    Raises:
        ValueError: transformers refuses the configuration, or it cannot run.
    """

    config_class: type[PretrainedConfig]
    raw_layer = 0  # the layer that reads raw inputs
    rotary_name = ""  # of what turns positions into angles, in a checkpoint
    _rotary: nn.Module | None = None
    prefixes: tuple[str, ...] = ("",)  # under which checkpoints may carry its names; the first is its own
    ignored: tuple[str, ...] = ()  # beginnings of checkpoint tensors that are not used, e.g. a pooling head
    undivided = ""  # says why several ranks cannot share its tokens; empty: they can

    def __init__(self, module: Module) -> None:
        assert module.source is not None, "made from a configuration"
        self.module = module
        self.projector = module.source.projector
        self.feature_layer = module.source.feature_layer
        self.config = self.configured(source_config(module))
        self.config._attn_implementation = ATTENTION
        register_packed_sdpa()

    def configured(self, given: dict[str, Any]) -> PretrainedConfig:
        """The configuration that transformers builds the blocks from."""
        return self.config_class.from_dict(given)

    @property
    def separate_experts(self) -> SeparateExperts | None:
        """What checkpoints call experts that they hold one by one; None: they hold none so."""
        return None

    @property
    def transposes_experts(self) -> bool:
        """Whether checkpoints may hold all experts of a layer in one tensor as [experts, in, out]."""
        return False

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole module."""
        return int(self.config.num_hidden_layers)

    @property
    def num_layers(self) -> int:
        """Layers of the whole module: embeddings, blocks, projector or head."""
        return self.raw_layer + self.num_blocks + 2

    def build(self, index: int) -> StageLayer:
        """The layer at that position of the module, its parameters on the meta device.

        Raises:
            ValueError: transformers cannot make it from the configuration.
        """
        with named_refusals(self.module.name), torch.device("meta"):
            return self._layer(index)

    def _layer(self, index: int) -> StageLayer:
        """Make that layer; the default device is meta."""
        if index == self.raw_layer:
            return self.first()
        return self.last() if index == self.num_layers - 1 else self.block(index - self.raw_layer - 1)

    @abstractmethod
    def first(self) -> StageLayer:
        """What embeds tokens or items."""

    @abstractmethod
    def block(self, index: int) -> StageLayer:
        """One of the blocks, counted from 0."""

    @abstractmethod
    def last(self) -> StageLayer:
        """Projector or head."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Name of a tied parameter -> name of the first parameter that is the same weight."""
        return {}

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Hugging Face name -> what the module computes with and no optimizer updates; written in place."""
        held = () if self._rotary is None else self._rotary.named_buffers()
        return {f"{self.rotary_name}.{name}": buffer for name, buffer in held}

    @property
    def neutral_buffers(self) -> Mapping[str, float]:
        """Name of a buffer that the module leaves out -> the value at which it changes nothing."""
        return {}

    @property
    def written_by(self) -> Mapping[str, int]:
        """Name that several layers have for one weight -> the layer that a checkpoint takes it from."""
        return {}

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        """Shape of what the encoder reads for a segment; ValueError where it cannot be that size."""
        raise ValueError(f"module {self.module.name!r} reads tokens, not {segment.modality}")

    def tiles(self, segment: Segment) -> Tiles:
        """How an image's tokens lie for cross-attention; ValueError where they stand in a sequence."""
        raise ValueError(
            f"module {self.module.name!r}: its {segment.modality} tokens stand in the LLM's sequence, "
            "cross-attention cannot read them"
        )

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        """What the layers of a stage share for one microbatch; ValueError where ranks cannot share tokens."""
        del dtype
        if self.undivided and data.attention is not None:
            raise ValueError(f"module {self.module.name!r}: {self.undivided}; want cp 1")
        return Context(data=data, packing=data.attention or pack(data.attended, device))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every weight of the whole module; tied ones once."""
        layers = (self.build(index) for index in range(self.num_layers))
        found = {
            layer.hugging_face_name(name): tuple(parameter.shape)
            for layer in layers
            for name, parameter in layer.named_parameters()
        }
        return {name: shape for name, shape in found.items() if name not in self.aliases}

    def check_layers(self) -> None:
        """ValueError unless the plan's module has as many layers as the architecture."""
        if len(self.module.layers) != self.num_layers:
            raise ValueError(
                f"module {self.module.name!r}: its configuration makes {self.num_layers} layers "
                f"(embeddings, blocks, projector or head), the plan has {len(self.module.layers)}"
            )
