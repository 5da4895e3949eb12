"""MiniCPM's vision towers: SigLIP's with the nearest positions of a table; MiniCPM-V's merges inside."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.idefics3.modeling_idefics3 import Idefics3EncoderLayer
from transformers.models.minicpm_ocr.configuration_minicpm_ocr import MiniCPMOcrVisionConfig
from transformers.models.minicpmv4_6 import modeling_minicpmv4_6 as minicpm
from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6VisionConfig
from transformers.vision_utils import get_vision_nearest_position_ids

from runtime.models.adapter import Context, CutKind, MicrobatchData, StageLayer
from runtime.models.attention import Packing, pack
from runtime.models.encoder import ItemSize, grid_or_none
from runtime.models.patch_grid import blockwise
from runtime.models.projector import GridOf, ProjectorLayer, StepsProjectorLayer
from runtime.models.vision import EmbedImages, Idefics3Adapter, XavierBlock
from workbench.model.families.minicpm_vision import SIDE

# Shape suffixes: N = images, C = channels, H, W = height, width, T = packed patches, G = packed squares of
# patches, M = patches of a square, D = hidden width, E = width of a patch's part of a square, R = rows,
# L = columns.

_MERGED = SIDE**2


@dataclass(frozen=True, slots=True)
class MergedContext(Context):
    """Context of a tower that merges inside; `merged`: packing behind its merger."""

    merged: Packing | None = None


class EmbedNearest(EmbedImages):
    """Patches, each with the position of a square table that is nearest to its place in the image.

    Row by row, or, before a merger inside, square by square.
    """

    def __init__(self, embeddings: Any, std: float, *, in_squares: bool) -> None:
        super().__init__(embeddings, std)
        self.in_squares = in_squares

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        parts: Any = self.embeddings
        patches_NDRL: Tensor = parts.patch_embedding(pixels_NCHW)
        grid = patches_NDRL.shape[2:]
        place_T = get_vision_nearest_position_ids(torch.tensor([grid]), parts.num_patches_per_side)
        x_NTD: Tensor = patches_NDRL.flatten(2).transpose(1, 2)
        x_NTD = x_NTD + parts.position_embedding(place_T.to(x_NTD.device))
        if not self.in_squares:
            return x_NTD
        return torch.stack([blockwise(x_TD.unflatten(0, grid), SIDE) for x_TD in x_NTD])


class MergingBlock(XavierBlock):
    """A block, then attention within squares of patches and an MLP over each: a patch has a part of it."""

    cuts = (
        *((f"merger.self_attn.{letter}_proj", CutKind.COLUMN) for letter in "qkv"),
        ("merger.self_attn.out_proj", CutKind.ROW),
        ("merger.linear_1", CutKind.COLUMN),
        ("merger.linear_2", CutKind.ROW),
    )

    def __init__(self, config: MiniCPMV4_6VisionConfig, index: int, std: float) -> None:
        super().__init__(Idefics3EncoderLayer(config), index, std)
        self.prefixes["merger"] = "vit_merger"
        self.merger: Any = minicpm.MiniCPMV4_6ViTWindowAttentionMerger(config)

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        y_TD = super().run(x_TD, context)
        y_GMD = (y_TD + self._attended(y_TD)).unflatten(0, (-1, _MERGED))
        parts = self.merger
        inner = parts.act(parts.linear_1(parts.pre_norm(y_GMD.flatten(1))))
        z_GD: Tensor = parts.linear_2(inner) + y_GMD.mean(1)
        return z_GD.reshape(len(x_TD), -1)

    def _attended(self, x_TD: Tensor) -> Tensor:
        attention: Any = self.merger.self_attn
        normal_TD = self.merger.layer_norm1(x_TD)
        q, k, v = (
            product(normal_TD).unflatten(-1, (-1, attention.head_dim)).unflatten(0, (-1, _MERGED))
            for product in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        y = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
        y_TD: Tensor = attention.out_proj(y.transpose(1, 2).flatten(2).flatten(0, 1))
        return y_TD


class MergedBlock(XavierBlock):
    """A block behind the merger, over squares."""

    def __init__(self, config: MiniCPMV4_6VisionConfig, index: int, std: float) -> None:
        super().__init__(Idefics3EncoderLayer(config), index, std)

    def run(self, x_TE: Tensor, context: MergedContext) -> Tensor:
        assert context.merged is not None, "given by a tower that merges inside"
        y_GD = super().run(
            x_TE.reshape(-1, _MERGED * x_TE.shape[1]), replace(context, packing=context.merged)
        )
        return y_GD.reshape(x_TE.shape)


Run = Callable[[Tensor, Any], Tensor]


def _over_squares(run: Run, grid_of: GridOf, x_TE: Tensor, context: Context) -> Tensor:
    """A projector's run over squares, which lie row by row in half as many rows and columns."""
    data = context.data
    named = zip(data.tokens_in, data.grids or (None,) * len(data.items), strict=True)
    grids = (grid_of(tokens, grid) for tokens, grid in named)
    squares = replace(
        data,
        tokens_in=tuple(tokens // _MERGED for tokens in data.tokens_in),
        grids=tuple(None if grid is None else (grid[0] // SIDE, grid[1] // SIDE) for grid in grids),
    )
    return run(x_TE.reshape(-1, _MERGED * x_TE.shape[1]), replace(context, data=squares))


class MiniCpmOcrAdapter(Idefics3Adapter):
    """Features are the final norm's output, row by row; a merger that checkpoints have is not read."""

    config_class: type[PretrainedConfig] = MiniCPMOcrVisionConfig
    prefixes = ("", "vision_tower.", "model.vision_tower.")
    ignored: tuple[str, ...] = ("vit_merger.",)
    merges: ClassVar[bool] = False

    def first(self) -> StageLayer:
        embeddings = minicpm.MiniCPMV4_6VisionEmbeddings(self.config)
        return EmbedNearest(embeddings, self.std, in_squares=self.merges)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        row, grid = in_a_row(item[None], self.patch_px)
        seen_TD: Tensor = call(row, grid, use_vit_merger=self.merges).last_hidden_state[0]
        return seen_TD


class MiniCpmAdapter(MiniCpmOcrAdapter):
    """Features are the final norm's output, of squares of patches."""

    config_class = MiniCPMV4_6VisionConfig
    ignored = ()
    merges = True
    undivided = "a tower that merges inside does not share tokens over ranks"

    @property
    def merged_side(self) -> int:
        return SIDE * super().merged_side

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        rows, columns = (side // self.patch_px // SIDE * SIDE for side in shape[1:])
        return ItemSize(rows * columns, rows * columns // _MERGED, grid_or_none(rows, columns))

    def block(self, index: int) -> StageLayer:
        place = self.config.insert_layer_id
        if index < place:
            return super().block(index)
        kind = MergingBlock if index == place else MergedBlock
        return kind(self.config, index, self.std)

    def last(self) -> StageLayer:
        layer = super().last()
        assert isinstance(layer, ProjectorLayer), "an encoder ends with one"
        layer.run = partial(_over_squares, layer.run, self.grid_of)  # type: ignore[method-assign]
        if isinstance(layer, StepsProjectorLayer):
            layer.grid_of = lambda _tokens, named: named
        return layer

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        plain = super().context(data, device, dtype)
        lengths = tuple(tokens // _MERGED for tokens in data.tokens_in)
        return MergedContext(data=data, packing=plain.packing, merged=pack(lengths, device))


def in_a_row(images_NCHW: Tensor, patch: int) -> tuple[Tensor, Tensor]:
    """[1, C, P, T x P] patches side by side, and [N, 2] grids, as its processor gives them."""
    cut = images_NCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    row = cut.permute(1, 3, 0, 2, 4, 5).flatten(2)[None]
    sides = [side // patch for side in images_NCHW.shape[2:]]
    return row, torch.tensor([sides] * len(images_NCHW), dtype=torch.int32)
