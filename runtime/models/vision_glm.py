"""Towers of GLM-4V and GLM-OCR: rotary positions, a convolution that merges, and a gated merger."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.glm_ocr import modeling_glm_ocr as glm_ocr

from runtime.models.adapter import Context, CutKind, StageLayer
from runtime.models.norm import widen_norms
from runtime.models.patch_attention import NormedPatchAttention
from runtime.models.patch_grid import blockwise
from runtime.models.vision_rotary import EmbedQwen, QwenBlock, QwenMerger, QwenVisionAdapter

# Shape suffixes: T = packed patches, G = packed groups of patches that merge, D = width, N = positions of one
# axis of an image, S = side of the table of positions, P = rows of the table around a position, Y and X =
# rows and columns of patches.

_BEND = -0.75  # of the cubic convolution, as in torch


def cubic_shares(row_N: Tensor, side: int) -> Tensor:
    """[N, S] shares of a table's rows at positions between them: cubic convolution.

    Rows beyond the border count as the border's.

    Source: Keys 1981, "Cubic Convolution Interpolation for Digital Image Processing", with a = -0.75, as in
    torch's bicubic `grid_sample`.
    """
    row_NP = row_N.floor()[:, None] + torch.arange(-1, 3)
    away_NP = (row_N[:, None] - row_NP).abs()
    near_NP = ((_BEND + 2) * away_NP - (_BEND + 3)) * away_NP**2 + 1
    far_NP = ((_BEND * away_NP - 5 * _BEND) * away_NP + 8 * _BEND) * away_NP - 4 * _BEND
    share_NP = torch.where(away_NP <= 1, near_NP, far_NP)
    kept_NP = row_NP.long().clamp(0, side - 1)
    return torch.zeros(len(row_N), side, dtype=row_N.dtype).scatter_add(1, kept_NP, share_NP)


def _table_rows(num: int, side: int, dtype: torch.dtype) -> Tensor:
    """[N] rows of a table at evenly spaced positions: of float32 numbers in -1 to 1, as in transformers."""
    place_N = ((torch.arange(num) + 0.5) / num * 2 - 1).to(dtype)
    return ((place_N + 1) * side - 1) / 2


class EmbedGlm(EmbedQwen):
    """Patches, a norm, and positions that are interpolated from a square table."""

    def __init__(self, adapter: "GlmVisionAdapter", patches: nn.Module) -> None:
        super().__init__(adapter, patches)
        self.prefixes |= {
            "post_conv_layernorm": "post_conv_layernorm",
            "position_embedding": "embeddings.position_embedding",
        }
        config = adapter.config
        self.post_conv_layernorm = adapter.norm_class(config.hidden_size, config.rms_norm_eps)
        self.side = config.image_size // config.patch_size
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)
        widen_norms(self, adapter.norm_class)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        x_TD: Tensor = self.post_conv_layernorm(super().forward(hidden_TD, features, context))
        grids = [tuple(length // self.patch for length in image.shape[-2:]) for image in context.data.raw]
        positions_TD = torch.cat([self._positions(*grid) for grid in grids])
        return x_TD + positions_TD.to(x_TD.dtype)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[T, D] positions of an image's patches in the encoder's order, in float32 or wider.

        Complexity: O(S D (S N + T)): one product per axis, so that only T x D numbers are kept.
        """
        table = self.position_embedding.weight
        wide = torch.promote_types(table.dtype, torch.float32)
        table_SSD = table.to(wide).unflatten(0, (self.side, self.side))
        down_YS, across_XS = (
            cubic_shares(_table_rows(num, self.side, wide), self.side).to(table.device)
            for num in (rows, columns)
        )
        between_YSD = torch.einsum("ys,std->ytd", down_YS, table_SSD)
        return blockwise(torch.einsum("xt,ytd->yxd", across_XS, between_YSD), self.merge)


class GlmMerger(QwenMerger):
    """The last layer: norm, a convolution over squares of patches, and a merger with a gated MLP."""

    cuts = (
        ("merger.gate_proj", CutKind.COLUMN),
        ("merger.up_proj", CutKind.COLUMN),
        ("merger.down_proj", CutKind.ROW),
    )

    def __init__(self, adapter: "GlmVisionAdapter") -> None:
        config = adapter.config
        width, out, side = config.hidden_size, config.out_hidden_size, config.spatial_merge_size
        merger = glm4v.Glm4vVisionPatchMerger(out, adapter.merger_width, config.hidden_act)
        super().__init__(merger, adapter.std)
        self.prefixes |= {"post_layernorm": "post_layernorm", "downsample": "downsample"}
        self.post_layernorm = adapter.norm_class(width, config.rms_norm_eps)
        self.downsample = nn.Conv2d(width, out, kernel_size=side, stride=side)
        self.side = side
        widen_norms(self, adapter.norm_class)

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        squares_GYXD = self.post_layernorm(x_TD).unflatten(0, (-1, self.side, self.side))
        merged_GD: Tensor = self.downsample(squares_GYXD.permute(0, 3, 1, 2)).flatten(1)
        return super().run(merged_GD, context)


class GlmVisionAdapter(QwenVisionAdapter):
    """The tower of GLM-4.1V, GLM-4.5V and GLM-4.6V, which differ in names of classes alone."""

    config_class = glm4v.Glm4vVisionConfig
    rotary_class = glm4v.Glm4vVisionRotaryEmbedding
    norm_class: type[nn.Module] = glm4v.Glm4vRMSNorm

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    @property
    def merger_width(self) -> int:
        """Inner width of the merger's MLP."""
        return int(self.config.intermediate_size)

    def first(self) -> StageLayer:
        return EmbedGlm(self, glm4v.Glm4vVisionPatchEmbed(self.config))

    def block(self, index: int) -> StageLayer:
        block = QwenBlock(glm4v.Glm4vVisionBlock(self.config), index, self.std, windowed=False)
        widen_norms(block, self.norm_class)
        return block

    def last(self) -> StageLayer:
        return GlmMerger(self)


class GlmOcrBlock(QwenBlock):
    """One encoder layer with norms of queries and keys."""

    attention_class = NormedPatchAttention


class GlmOcrVisionAdapter(GlmVisionAdapter):
    """GLM-OCR's tower, which has rotary positions alone."""

    config_class = glm_ocr.GlmOcrVisionConfig
    rotary_class = glm_ocr.GlmOcrVisionRotaryEmbedding
    norm_class = glm_ocr.GlmOcrRMSNorm

    @property
    def merger_width(self) -> int:
        return int(self.config.out_hidden_size * self.config.in_channels)

    def first(self) -> StageLayer:
        return EmbedQwen(self, glm_ocr.GlmOcrVisionPatchEmbed(self.config))

    def block(self, index: int) -> StageLayer:
        block = GlmOcrBlock(glm_ocr.GlmOcrVisionBlock(self.config), index, self.std, windowed=False)
        widen_norms(block, self.norm_class)
        return block
