"""What encoders share: layers that embed items and run packed, widths, and the inputs of users."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from math import isqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.models.adapter import ONE_ROTATION, Adapter, Context, InnerLayer, StageLayer
from runtime.models.carried_states import beside
from runtime.models.projector import (
    NO_CLASS_TOKENS,
    ClassTokens,
    ProjectorLayer,
    StepsProjectorLayer,
    steps_or_none,
)
from runtime.models.tile_rows import TileRows
from workbench.data.sample import Segment
from workbench.model.families.tiles import shrunk
from workbench.model.feature_layers import states_read
from workbench.model.item_tokens import native_tokens, packs_tiles, pads_items, source_config
from workbench.model.projector import merged_by

# Shape suffixes: N = items of one size, T = packed tokens, D = hidden width.

PIXELS = "pixel_values"
IMAGES = "batch_num_images"  # of each sample, before towers where several in one are a tile each
SIZES = "image_sizes"  # (height, width) of images that are padded into one tensor
GRIDS = "image_grid_thw"  # (steps, rows, columns) of images and videos given as patches


class ItemSize(NamedTuple):
    """Tokens of an item within its encoder and after it, and what its `Segment` says besides."""

    tokens_in: int
    tokens_out: int
    grid: tuple[int, int] | None = None
    frame: tuple[int, int] | None = None
    unpadded: tuple[int, int] | None = None


class EmbedItems(StageLayer):
    """Layer 0: items of one size run in a batch; outputs are in the order of items."""

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        items = [piece for item in context.data.raw for piece in self.pieces(item)]
        sizes: dict[tuple[int, ...], list[int]] = {}
        for index, item in enumerate(items):
            sizes.setdefault(tuple(item.shape), []).append(index)
        embedded: dict[int, Tensor] = {}
        for members in sizes.values():
            alike = torch.stack([items[index] for index in members])
            embedded.update(zip(members, self.embed(alike), strict=True))
        return torch.cat([embedded[index] for index in range(len(items))])

    def pieces(self, item: Tensor) -> tuple[Tensor, ...]:
        """What of an item is embedded by itself."""
        return (item,)

    @abstractmethod
    def embed(self, items: Tensor) -> Tensor:
        """[N, T, D] of N items of one size."""


class EncoderBlock(InnerLayer):
    """Layers 1..N: one encoder layer on packed items."""

    blocks = "encoder.layers"

    def __init__(self, block: nn.Module, index: int, std: float) -> None:
        super().__init__({"block": f"{self.blocks}.{index}"}, std)
        self.block = block

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        y_1TD: Tensor = self.block(x_TD[None], attention_mask=context.packing)
        return y_1TD[0]


class RotaryBlock(EncoderBlock):
    """The same under rotary positions."""

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        rotation = context.rotary[ONE_ROTATION]
        y_1TD: Tensor = self.block(x_TD[None], attention_mask=context.packing, position_embeddings=rotation)
        return y_1TD[0]


class EncoderAdapter(Adapter):
    """An encoder of images [C, Y, X] or frames [bins, frames]."""

    item_dims: ClassVar[int]
    items_key: ClassVar[str | None] = None  # None: the model's main input
    named_projector: ClassVar[type[ProjectorLayer]] = ProjectorLayer
    class_tokens: ClassTokens = NO_CLASS_TOKENS
    beside_key: ClassVar[str | None] = None  # `SIZES` or `GRIDS`, the layout of the items

    @property
    def widths(self) -> tuple[int, int]:
        """Input and output width of its projector."""
        return len(self.states) * self.config.hidden_size, self.module.layers[-1].out_width

    @property
    def states(self) -> tuple[int, ...]:
        """Indices of the hidden states that its projector reads."""
        return states_read(-1 if self.feature_layer is None else self.feature_layer, self.num_blocks + 1)

    @property
    def num_layers(self) -> int:
        """Embedding, blocks up to the last hidden state that the projector reads, projector."""
        return super().num_layers if self.feature_layer is None else 2 + max(self.states)

    def _layer(self, index: int) -> StageLayer:
        layer = super()._layer(index)
        if len(self.states) > 1 and isinstance(layer, InnerLayer):
            layer.beside = beside(self.states, index, self.config.hidden_size)
        return layer

    @property
    def std(self) -> float:
        """Standard deviation of initial matrices."""
        return float(self.config.initializer_range)

    def projected(self, norm: nn.Module | None = None, norm_name: str = "") -> StageLayer:
        """The last layer: final norm, unless an earlier state is read, and projector."""
        if self.feature_layer is not None:
            norm, norm_name = None, ""
        steps = steps_or_none(self.projector)
        others: dict[str, Any] = {"class_tokens": self.class_tokens}
        if packs_tiles(self.module):
            others["rows"] = self.tile_rows
        if pads_items(self.module):
            others["padded"] = self.num_merged
        if steps is None:
            return self.named_projector(self.projector, self.widths, self.std, norm, norm_name, **others)
        return StepsProjectorLayer(steps, self.widths, self.std, self.grid_of, norm, norm_name, **others)

    @property
    def tile_rows(self) -> TileRows:
        """How its projector puts tiles together, where it does."""
        native, config = native_tokens(self.module), source_config(self.module)
        assert native is not None, "its tiles have one size"
        along = isqrt(native[1])
        return TileRows(along, partial(shrunk, config, along))

    @property
    def num_merged(self) -> int:
        """Tokens that a projector of steps merges into one."""
        return merged_by(steps_or_none(self.projector) or ())

    @property
    def merged_side(self) -> int:
        """Side of the squares of patches that a projector of steps merges."""
        return isqrt(self.num_merged)

    def grid_of(self, tokens: int, named: tuple[int, int] | None) -> tuple[int, int] | None:
        """(rows, columns) of that many tokens; None: a sequence."""
        del tokens, named
        return None

    def sides(self, segment: Segment) -> tuple[int, int]:
        """Rows and columns of its features in a language model with three axes; (0, 0): they are in a row."""
        del segment
        return 0, 0

    def input_keys(self, model: PreTrainedModel) -> tuple[str, ...]:
        """Names of this model's inputs in a batch; the first holds the items."""
        items = self.items_key or str(model.main_input_name)
        if packs_tiles(self.module):
            return items, SIZES, IMAGES
        return (items,) if self.beside_key is None else (items, self.beside_key)

    @abstractmethod
    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        """Size of an item of that shape, rounded down to what fits; 0 tokens where that is less than one."""

    def nearest_shape(self, segment: Segment, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape nearest to this one, among items with a segment's tokens."""
        del shape
        return self.raw_shape(segment)

    def windows(self, item: Tensor) -> tuple[Tensor, ...]:
        """The independent items into which it splits a user's item."""
        return (item,)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        """[T, D] features of one item by the user's own model, without a class token."""
        call: Callable[..., Any] = model
        states_TD: Tensor = call(item[None]).last_hidden_state[0]
        return states_TD


def given_to(part: str, model: PreTrainedModel, *items: Tensor) -> Tensor:
    """The input of a part of a user's model, when the model is called with these items."""
    call: Callable[..., Any] = model
    seen: list[Tensor] = []
    with model.get_submodule(part).register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        call(*items)
    return seen[0]


def grid_or_none(rows: int, columns: int) -> tuple[int, int] | None:
    """The grid; None for an image smaller than a patch, which is refused."""
    return (rows, columns) if rows and columns else None
