"""A family of models: how it is listed, and how a configuration becomes layers."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from workbench.data.corpus import ItemTokens, Video
from workbench.model.composites.composite import Composite
from workbench.model.config_fields import Config, flag
from workbench.model.families.positions import check_fixed_positions
from workbench.model.families.tiles import NEWLINE, PHI_4, SHRINKS, Tiles, anyres, of_grids, with_newline
from workbench.model.feature_layers import FeatureLayers, carrying, num_beside, states_read
from workbench.model.layer import Layer, LayerKind, Matmul, Operator, Pointwise, TokenCount
from workbench.model.model_graph import GENERATED, TEXT
from workbench.model.module_layers import over
from workbench.model.projector import (
    POOL,
    SHUFFLE,
    Projection,
    Projector,
    ProjectorKind,
    projector_layer,
    shown,
)
from workbench.model.shape import Shape
from workbench.model.transformer import Norm, norm

Layers = tuple[Layer, ...]
_TIME_ROTARY = "time_rotary"  # rotation of features by their time


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family as it is listed.

    Args:
        name: as in its papers.
        role: "llm", "vision", "audio" or "generator".
        model_type: of the transformers configuration that it is planned from; None: there is none.
        zoo: a name of the zoo, where there is no configuration.
        reason: why it cannot be planned, or cannot run; empty where both work.
    """

    name: str
    role: str
    model_type: str | None = None
    zoo: str | None = None
    reason: str = ""

    @property
    def plans(self) -> bool:
        """Whether its layers are known, so that it can be planned and simulated."""
        return self.model_type is not None or self.zoo is not None

    def runs(self, adapters: Collection[str]) -> bool:
        """Whether one of these adapters (by model_type) can build it."""
        return self.model_type in adapters


# Sizes of examples: of all, of Llama-like ones, of ViT-like ones.
EXAMPLE_WIDTH, EXAMPLE_TOKENS = 128, 128
EXAMPLE_LLM: dict[str, Any] = {
    "hidden_size": EXAMPLE_WIDTH,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
EXAMPLE_VIT: dict[str, Any] = {
    "hidden_size": EXAMPLE_WIDTH,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A small configuration, with which the family runs on any machine in seconds.

    Args:
        config: without its `model_type`.
        tokens: (inside, at the output) of an item.
        read_by: the example of the language model that reads it, where only some can.
    """

    config: Config
    tokens: tuple[int, int] = (EXAMPLE_TOKENS, EXAMPLE_TOKENS)
    read_by: str = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A job's choice of how a module ends.

    Args:
        projector: None: the family's default.
        feature_layer: hidden state of an encoder that the projector reads, or several; None: its output.
    """

    projector: ProjectorKind | None = None
    feature_layer: FeatureLayers | None = None

    def refuse_feature_layer(self, model_type: str) -> None:
        """Raise ValueError where a feature layer is given for a module that is not an encoder."""
        if self.feature_layer is not None:
            raise ValueError(f"{model_type} is no encoder: it has no feature_layer, got {self.feature_layer}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(Family):
    """A family that is planned from a configuration.

    Args:
        aliases: other names of `model_type`.
        shapes: prefix of a name of the zoo -> its row as a configuration.
        native_tokens: (tokens inside, tokens in the LLM) of an item of the configuration's native size; None:
            derived from its layers.
        longest_item: most tokens of an item that the runtime accepts, where there is a limit.
        has_longest_item: whether the model itself has a limited number of positions: a language model's
            `longest_item`, of other modules those of an item of the native size.
        check_config: raises ValueError for a configuration that the runtime does not support.
        examples: small configurations, by a short name.
        shares_tokens: whether ranks of the runtime can share the tokens of its items.
        shares_weights: whether tensor-parallel ranks of the runtime can share the weights of its blocks.
        composites: models whose language model is of this family only.
    """

    model_type: str
    aliases: tuple[str, ...] = ()
    shapes: Mapping[str, Callable[[Shape], dict[str, Any]]] = field(default_factory=dict)
    native_tokens: Callable[[Config], tuple[int, int]] | None = None
    longest_item: Callable[[Config], int] | None = None
    has_longest_item: bool = False
    check_config: Callable[[Config], None] = lambda config: None
    examples: Mapping[str, Example] = field(default_factory=dict)
    shares_tokens: bool = True
    shares_weights: bool = True
    composites: tuple[Composite, ...] = ()

    what: ClassVar[str]  # noun with its article

    @property
    def modality(self) -> str:
        """The default modality of its modules."""
        return self.role

    def check_modality(self, modality: str) -> None:
        """Raise ValueError for a modality that its modules cannot have."""
        if modality == TEXT:
            raise ValueError(f"{self.model_type} is {self.what}: modality must not be 'text'")

    @abstractmethod
    def layers(
        self, config: Config, ending: Ending, llm_width: int | None
    ) -> tuple[Layers, ProjectorKind | None]:
        """The layers of the module, and its projector.

        Raises:
            ValueError: a missing or impossible dimension, an impossible ending, or no
                `llm_width` where it has a projector.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel(Architecture):
    """Embed, block x N, head.

    Args:
        make: configuration -> layers.
        width_holds_heads: whether transformers needs a width that the number of heads divides, though heads
            have their own width.
    """

    role: str = "llm"
    check_config: Callable[[Config], None] = check_fixed_positions
    make: Callable[[Config], Layers]
    width_holds_heads: bool = False

    @property
    def modality(self) -> str:
        return TEXT

    def check_modality(self, modality: str) -> None:
        if modality != TEXT:
            raise ValueError(
                f"{self.model_type} is a language model: modality must be 'text', got {modality!r}"
            )

    def layers(self, config: Config, ending: Ending, llm_width: int | None) -> tuple[Layers, None]:
        del llm_width
        if ending.projector is not None:
            raise ValueError(
                f"{self.model_type} is a language model: it has no projector, got {shown(ending.projector)}"
            )
        ending.refuse_feature_layer(self.model_type)
        return self.make(config), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder without its projector.

    Args:
        layers: up to the last block.
        width: of its output.
        norm: its final norm; None: it has none.
        merge: number of tokens that are merged into one at its output.
        projectors: those it can end with; the first is the default.
        is_read: whether all its tokens are read by cross-attention, instead of being part of the LLM's
            sequence.
        stacked: number of features side by side in its output: its own and those of some blocks, each for
            another layer of the LLM.
        merger: operators of its own merger after the final norm; empty: Qwen2-VL's.
        rotated: numbers of each token that are rotated by its time after the final norm.
        inside: tokens that are one behind its blocks, as they merge inside it.
        takes_steps: whether its own merger may be spelled out as steps, with others behind it.
    """

    layers: Layers
    width: int
    norm: Norm | None
    merge: int = 1
    projectors: tuple[Projector, ...] = (Projector.MLP, Projector.LINEAR)
    is_read: bool = False
    stacked: int = 1
    merger: tuple[Operator, ...] = ()
    rotated: int = 0
    inside: int = 1
    takes_steps: bool = False

    def up_to(self, feature_layer: FeatureLayers) -> "Tower":
        """The tower whose output is a hidden state, or several side by side.

        Blocks after the last of them and the final norm are left out; earlier states pass beside later ones.

        Raises:
            ValueError: there is no such hidden state, or the tower has stacked or rotated features, or
                several are named before its own merger or cross-attention.
        """
        if self.rotated:
            raise ValueError(
                f"its features are rotated by time: it has no feature_layer, got {feature_layer}"
            )
        if self.inside > 1:
            raise ValueError(f"it merges tokens inside: it has no feature_layer, got {feature_layer}")
        if self.stacked > 1:
            raise ValueError(
                f"its blocks give features besides: it has no feature_layer, got {feature_layer}"
            )
        states = states_read(feature_layer, len(self.layers))
        if len(states) > 1 and (self.is_read or self.projectors == (Projector.MERGER,)):
            raise ValueError(f"its features are of one hidden state, got feature_layer {feature_layer}")
        kept = self.layers[: max(states) + 1]
        layers = (carrying(each, self.width, num_beside(states, i)) for i, each in enumerate(kept))
        return replace(self, layers=tuple(layers), width=len(states) * self.width, norm=None)

    def projector(self, kind: ProjectorKind, llm_width: int) -> Layer:
        """The projector as the last layer; ValueError for one that the tower cannot end with."""
        has_own = self.projectors == (Projector.MERGER,) and not self.takes_steps
        if kind not in self.projectors if isinstance(kind, Projector) else has_own:
            allowed = " or ".join(repr(each.value) for each in sorted(self.projectors))
            raise ValueError(f"its projector must be {allowed}, got {shown(kind)}")
        if self.rotated and not isinstance(kind, Projector):
            raise ValueError(
                f"its features are rotated by time: its projector must have a name, got {shown(kind)}"
            )
        if self.merger:
            return self._merged(llm_width)
        layer = projector_layer(
            Projection(kind=kind, in_width=self.width, out_width=llm_width, norm=self.norm, merge=self.merge)
        )
        if self.inside > 1:
            first, *others = layer.operators
            layer = replace(layer, operators=(over(first, 1 / self.inside), *others))
        if self.rotated:
            rotary = Pointwise(name=_TIME_ROTARY, width=self.rotated, num_passes=2, tokens=TokenCount.OUT)
            first, *others = layer.operators
            layer = replace(layer, operators=(first, rotary, *others))
        if self.stacked > 1:
            return self._with_stacked(layer)
        if not self.is_read:
            return layer
        operators = tuple(replace(operator, tokens=TokenCount.IN) for operator in layer.operators)
        return replace(layer, operators=operators, emits=TokenCount.IN)

    def _merged(self, llm_width: int) -> Layer:
        """The final norm and its own merger, which ends with a matmul."""
        last = self.merger[-1]
        assert isinstance(last, Matmul), "a merger ends with a matmul"
        if last.out_features != llm_width:
            raise ValueError(
                f"its merger gives features of width {last.out_features}, want an LLM as wide, "
                f"got {llm_width}"
            )
        norms = () if self.norm is None else (norm("final_norm", self.width, self.norm),)
        return Layer(
            name="projector",
            kind=LayerKind.PROJECTOR,
            operators=(*norms, *self.merger),
            out_width=llm_width,
            emits=TokenCount.OUT,
        )

    def _with_stacked(self, projector: Layer) -> Layer:
        """The projector with the features of blocks, carried along by every token, stacked in its output."""
        width, parts = projector.out_width, self.layers[-1].out_width - self.width
        given = parts * self.merge // (self.stacked - 1)
        if given != width:
            raise ValueError(f"its blocks give features of width {given}, want an LLM as wide, got {width}")
        return replace(projector, out_width=self.stacked * width, stacked=self.stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder(Architecture):
    """Embed, block x N, projector (final norm where it has one, projector).

    Args:
        make: configuration -> tower.
        image_tokens: of an image of (height, width) pixels, where it takes any size.
        clip_tokens: of a clip of so many seconds, one item for each of its windows.
        video: of one of (height, width) pixels and so many seconds, one item for each of its frames or steps.
        pads_items: whether items are padded to full length, and only the first of their tokens are read.
        takes_native_only: whether a configuration has items of one size only.
        tiles: of an image before a tower of one size, cut as the model's processor does.
        splits: (height, width) in pixels of what a processor makes of an image before a tower of any size.
        processed: a checkpoint's processor -> keys of the configuration about sizes of items.
        unprocessed: the assumption where no processor is found; empty where it does not matter.
    """

    make: Callable[[Config], Tower]
    image_tokens: Callable[[Config, int, int], ItemTokens] | None = None
    clip_tokens: Callable[[Config, float], tuple[ItemTokens, ...]] | None = None
    video: Callable[[Config, int, int, float], Video] | None = None
    pads_items: bool = False
    takes_native_only: Callable[[Config], bool] = lambda config: False
    tiles: Tiles = anyres
    splits: Callable[[Config, int, int], Sequence[tuple[int, int]]] = lambda config, height, width: (
        (height, width),
    )
    processed: Callable[[Config], dict[str, Any]] = lambda processor: {}
    unprocessed: str = ""

    what: ClassVar[str] = "an encoder"

    def layers(self, config: Config, ending: Ending, llm_width: int | None) -> tuple[Layers, ProjectorKind]:
        tower = self.make(config)
        if ending.feature_layer is not None:
            tower = tower.up_to(ending.feature_layer)
        if llm_width is None:
            raise ValueError("an encoder needs llm_width, the width its projector ends with")
        kind = tower.projectors[0] if ending.projector is None else ending.projector
        projector = tower.projector(kind, llm_width)
        if flag(config, NEWLINE):
            self._check_packs(config, projector)
            projector = with_newline(projector, shrinks=config.get(SHRINKS) is not None)
        return (*tower.layers, projector), kind

    def _check_packs(self, config: Config, projector: Layer) -> None:
        """Raise ValueError where features of tiles cannot be put together row by row."""
        if self.processed is not of_grids or config.get(PHI_4) is not None:
            raise ValueError(f"{self.model_type} puts no tiles together; leave out {NEWLINE}")
        if any(operator.name in (POOL, SHUFFLE) for operator in projector.operators):
            raise ValueError(f"{NEWLINE}: tiles are put together unmerged; want a projector without a merge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator(Architecture):
    """Projector of the LLM's states, embed, block x N, head (final norm, loss).

    Args:
        make: (configuration, projector, LLM's width) -> layers.
    """

    role: str = GENERATED
    make: Callable[[Config, Projector, int], Layers]

    what: ClassVar[str] = "a generator"

    def layers(self, config: Config, ending: Ending, llm_width: int | None) -> tuple[Layers, ProjectorKind]:
        if llm_width is None:
            raise ValueError("a generator needs llm_width, the width its projector begins with")
        ending.refuse_feature_layer(self.model_type)
        projector = ending.projector or Projector.MLP
        if projector not in (Projector.LINEAR, Projector.MLP):
            raise ValueError(f"its projector must be 'linear' or 'mlp', got {shown(projector)}")
        assert isinstance(projector, Projector)
        return self.make(config, projector, llm_width), projector
