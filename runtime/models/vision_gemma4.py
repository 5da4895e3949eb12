"""Gemma 4's vision tower: two tables of positions, rotations by both axes, pooled and scaled soft tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma4 import modeling_gemma4 as gemma4

from runtime.models.adapter import ONE_ROTATION, Context, StageLayer
from runtime.models.encoder import PIXELS, EncoderBlock
from runtime.models.initialise import Fill, constant
from runtime.models.norm import replace_parts, widen_norms
from runtime.models.patch_grid import blockwise
from runtime.models.vision_rotary import GridAdapter, GridContext
from runtime.models.vision_siglip2 import flat_patches

# Shape suffixes: T = packed patches, D = width, P = numbers of a patch, S = rows of a table of positions,
# C = channels, Y and X = rows and columns of pixels.

_TABLE = "position_embedding_table"


class EmbedGemma4(StageLayer):
    """Patches, square by square of those that are pooled, and positions of column and row."""

    def __init__(self, adapter: "Gemma4VisionAdapter") -> None:
        names = ("input_proj", _TABLE)
        super().__init__({name: f"patch_embedder.{name}" for name in names}, adapter.std)
        config = adapter.config
        self.patch, self.merge, self.module_name = config.patch_size, adapter.merge, adapter.module.name
        self.input_proj = nn.Linear(3 * self.patch**2, config.hidden_size, bias=False)
        rows = config.position_embedding_size
        self.position_embedding_table = nn.Parameter(torch.empty(2, rows, config.hidden_size))

    def fill(self, name: str) -> Fill:
        return constant(1.0) if name == _TABLE else super().fill(name)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        images = context.data.raw
        x_TP = torch.cat([self._cut(image_CYX) for image_CYX in images])
        x_TD: Tensor = self.input_proj(2 * (x_TP - 0.5))
        grids = [grid_of(image, self.patch) for image in images]
        at_2T = torch.cat([places(grid, self.merge) for grid in grids]).T.to(x_TD.device)
        table_2SD = self.position_embedding_table
        if (longest := max(map(max, grids))) > table_2SD.shape[1]:
            raise ValueError(
                f"module {self.module_name!r} takes up to {table_2SD.shape[1]} patches along a side of an "
                f"image, got {longest}"
            )
        return x_TD + (table_2SD[0][at_2T[0]] + table_2SD[1][at_2T[1]])

    def _cut(self, image_CYX: Tensor) -> Tensor:
        grid = grid_of(image_CYX, self.patch)
        return blockwise(flat_patches(image_CYX[None], self.patch)[0].unflatten(0, grid), self.merge)


def grid_of(image_CYX: Tensor, patch: int) -> tuple[int, int]:
    """(rows, columns) of an image's patches."""
    return image_CYX.shape[1] // patch, image_CYX.shape[2] // patch


def places(grid: tuple[int, int], merge: int) -> Tensor:
    """[T, 2] (column, row) of every patch of an image, square by square."""
    rows_and_columns = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    return blockwise(torch.stack(rows_and_columns[::-1], dim=-1), merge)


class Gemma4Block(EncoderBlock):
    """One encoder layer on all patches of an image; checkpoints have its products inside others."""

    blocks = "encoder.layers"

    def __init__(self, block: nn.Module, index: int, std: float) -> None:
        super().__init__(block, index, std)
        replace_parts(self, gemma4.Gemma4ClippableLinear, lambda product: product.linear)

    def hugging_face_name(self, name: str) -> str:
        owner, _, own = name.rpartition(".")
        is_product = isinstance(self.get_submodule(owner), nn.Linear)
        return super().hugging_face_name(f"{owner}.linear.{own}" if is_product else name)

    def run(self, x_TD: Tensor, context: GridContext) -> Tensor:
        y_1TD: Tensor = self.block(
            x_TD[None],
            attention_mask=context.packing,
            position_embeddings=context.rotary[ONE_ROTATION],
            position_ids=x_TD.new_empty(1, 0, 2),  # of which transformers reads the number of axes
        )
        return y_1TD[0]


class SoftTokens(nn.Module):
    """Patches times the root of the width, then less a bias and times a scale where there are some.

    Bias and scale are no weights: training leaves them as they are, and checkpoints have them.

    Differs: transformers takes means of squares of patches first; these are linear. It rounds float64 numbers
    to float32, see `WideRMSNorm`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.factor: float = config.hidden_size**0.5
        self.standardizes: bool = config.standardize
        if self.standardizes:
            shape = (config.hidden_size,)
            self.register_buffer("std_bias", torch.zeros(shape, dtype=torch.float32, device="cpu"))
            self.register_buffer("std_scale", torch.ones(shape, dtype=torch.float32, device="cpu"))

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        y_TD = x_TD.to(wide) * self.factor
        if self.standardizes:
            y_TD = (y_TD - self.get_buffer("std_bias")) * self.get_buffer("std_scale")
        return y_TD.to(x_TD.dtype)


class Gemma4VisionAdapter(GridAdapter):
    """The tower of gemma-4-31B and gemma-4-26B-A4B; features are its soft tokens."""

    config_class = gemma4.Gemma4VisionConfig
    rotary_class = gemma4.Gemma4VisionRotaryEmbedding
    rotary_name = "encoder.rotary_emb"
    items_key = PIXELS
    prefixes = ("", "vision_tower.", "model.vision_tower.")

    @property
    def merge(self) -> int:
        return int(self.config.pooling_kernel_size)

    @property
    def merged_side(self) -> int:
        """Squares lie side by side already."""
        return 1

    def grid_of(self, tokens: int, named: tuple[int, int] | None) -> tuple[int, int] | None:
        """None: squares that a projector merges are runs of patches."""
        del tokens, named
        return None

    @property
    def _channels(self) -> int:
        return 3

    def first(self) -> StageLayer:
        return EmbedGemma4(self)

    def block(self, index: int) -> StageLayer:
        block = Gemma4Block(gemma4.Gemma4VisionEncoderLayer(self.config, index), index, self.std)
        widen_norms(block, gemma4.Gemma4RMSNorm)
        return block

    def last(self) -> StageLayer:
        return self.projected(SoftTokens(self.config))

    def _context(
        self, plain: Context, place_T2: Tensor, grids: list[tuple[int, int]], like: Tensor
    ) -> GridContext:
        """The context; transformers counts columns before rows."""
        del grids
        rotary = {ONE_ROTATION: self._rotary(like, place_T2.flip(1)[None].to(like.device))}
        return GridContext(plain.data, plain.packing, rotary)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        soft_TD: Tensor = call(*as_processed(item, self.config.patch_size)).last_hidden_state
        return soft_TD


def as_processed(image_CYX: Tensor, patch: int) -> tuple[Tensor, Tensor]:
    """[1, T, P] patches of an image row by row and [1, T, 2] columns and rows, as its processor gives."""
    return flat_patches(image_CYX[None], patch), places(grid_of(image_CYX, patch), 1)[None]
