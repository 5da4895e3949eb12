"""Encoders of users' items: under which keys a batch has them, and how many tokens each becomes."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from runtime.models.adapter import Adapter

# Shape suffixes: T = tokens, D = hidden width.

PIXELS = "pixel_values"
SIZES = "image_sizes"  # (height, width) of images that lie padded in one tensor
GRIDS = "image_grid_thw"  # (frames, rows, columns) of images that are given as patches


class ItemSize(NamedTuple):
    """Tokens of an item inside its encoder and behind it, and the grid of an image."""

    tokens_in: int
    tokens_out: int
    grid: tuple[int, int] | None = None


class EncoderAdapter(Adapter):
    """An encoder of images [C, Y, X] or frames [bins, frames]."""

    item_dims: ClassVar[int]
    items_key: ClassVar[str | None] = None  # None: the one that the model names
    beside_key: ClassVar[str | None] = None  # `SIZES` or `GRIDS`, which say how the items lie

    def input_keys(self, model: PreTrainedModel) -> tuple[str, ...]:
        """The names under which a batch has the inputs of this model; the first holds the items."""
        items = self.items_key or str(model.main_input_name)
        return (items,) if self.beside_key is None else (items, self.beside_key)

    @abstractmethod
    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        """Of an item of that shape, or of what fits into it; nothing where that is less than a token."""

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        """[T, D] that the user's own model makes of one item, without a class token."""
        call: Callable[..., Any] = model
        seen_TD: Tensor = call(item[None]).last_hidden_state[0]
        return seen_TD


def grid_or_none(rows: int, columns: int) -> tuple[int, int] | None:
    """None for an image smaller than a patch, which is refused."""
    return (rows, columns) if rows and columns else None
