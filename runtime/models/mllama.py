"""Llama 3.2 Vision: a tower over tiles of an image, and a language model with cross-attention to it."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.configuration_utils import PretrainedConfig
from transformers.models.mllama import modeling_mllama as mllama
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

from runtime.models.adapter import Adapter, Context, InnerLayer, MicrobatchData, StageLayer
from runtime.models.attention import additive
from runtime.models.context_images import Tiles
from runtime.models.cross_attention import ContextAttention, CrossContext, cross_context
from runtime.models.decoder import DecoderAdapter, DecoderFamily, EmbedTokens
from runtime.models.initialise import Fill, constant
from runtime.models.norm import widen_norms
from runtime.models.projector import ProjectorLayer
from workbench.data.sample import Segment
from workbench.model.families.mllama import EXTRA_TOKENS, VISION_MODEL, Tiling, tiling_of
from workbench.model.model_graph import Module

# Shape suffixes: N = images, B = tiles, C = channels, Y and X = rows and columns of pixels, P = tokens of a
# tile, T = packed tokens, R = those whose item has an image, E = tokens of images, H = heads, D = width.

LANGUAGE = DecoderFamily(
    config=MllamaTextConfig,
    layer=mllama.MllamaSelfAttentionDecoderLayer,
    rotary=mllama.MllamaRotaryEmbedding,
    norm=mllama.MllamaTextRMSNorm,
)


class EmbedWithImageToken(EmbedTokens):
    """Layer 0. A position that no other module fills is an image's: the row after the vocabulary."""

    def __init__(self, config: PretrainedConfig) -> None:
        larger = copy.copy(config)
        larger.vocab_size = config.vocab_size + EXTRA_TOKENS
        super().__init__(larger, LANGUAGE)
        self.image_token = config.vocab_size

    def _merged(self, features: Mapping[str, Tensor], context: Context) -> Tensor:
        ids_T = context.data.input_ids
        assert ids_T is not None, "the first stage of the LLM is given its tokens"
        merged_TD: Tensor = self.embed_tokens(ids_T.masked_fill(ids_T < 0, self.image_token))
        for edge, features_ED in features.items():
            merged_TD = merged_TD.index_copy(0, context.data.placed[edge], features_ED)
        return merged_TD


class CrossBlock(StageLayer):
    """A block with cross-attention to images; the identity for items without one."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__({"block": f"{LANGUAGE.layers}.{index}"}, config.initializer_range)
        self.block = mllama.MllamaCrossAttentionDecoderLayer(config, index)
        self.block.cross_attn = ContextAttention(self.block.cross_attn)
        widen_norms(self, mllama.MllamaTextRMSNorm)

    def fill(self, name: str) -> Fill:
        return constant(0.0) if name.endswith("gate") else super().fill(name)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        assert hidden_TD is not None, "a block is given its input"
        if not features:
            return hidden_TD
        assert isinstance(context, CrossContext), "made by the adapter of a cross-attention model"
        context_ED = torch.cat([features[edge] for edge in context.data.context_images])
        if not context.reads:  # this rank's tokens have no context, but another rank waits for a gradient
            return hidden_TD + context_ED[:0].sum()
        rows = context.rows
        x_RD = hidden_TD if rows is None else hidden_TD.index_select(0, rows)
        y_RD = self._run(x_RD, context_ED, context)
        return y_RD if rows is None else hidden_TD.index_copy(0, rows, y_RD)

    def _run(self, x_RD: Tensor, context_ED: Tensor, context: CrossContext) -> Tensor:
        block = self.block
        both = torch.cat([block.input_layernorm(x_RD), context_ED])
        x_RD = x_RD + block.cross_attn_attn_gate.tanh() * block.cross_attn(both, len(x_RD), context.reads)
        y_RD: Tensor = block.mlp(block.post_attention_layernorm(x_RD))
        if context.blind is not None:
            y_RD = y_RD.masked_fill(context.blind, 0)
        return x_RD + block.cross_attn_mlp_gate.tanh() * y_RD


class CrossDecoderAdapter(DecoderAdapter):
    """Llama 3.2's language model, with or without images in front of it.

    Differs: every item is computed as transformers computes it alone. There, text without an image in a batch
    with a sample that has one attends to padding, so that results depend on the batch.
    """

    prefixes = ("", "language_model.")

    def __init__(self, module: Module) -> None:
        super().__init__(module, LANGUAGE)

    def first(self) -> StageLayer:
        return EmbedWithImageToken(self.config)

    def block(self, index: int) -> StageLayer:
        if index in self.config.cross_attention_layers:
            return CrossBlock(self.config, index)
        return super().block(index)

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        return cross_context(super().context(data, device, dtype), device, dtype)


@dataclass(frozen=True, slots=True)
class TiledContext(Context):
    """Context that the layers of a tiled encoder share.

    Args:
        ratios: index of each image's aspect ratio among the supported ones, from 1.
    """

    ratios: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Attention within every image, where patches see everything and padding sees only patches.

    Source: transformers' `_prepare_aspect_ratio_attention_mask`, which hides padding from padding only.

    Args:
        masks: per image, [T, T] 0 where a token sees another, else -inf; shared by images with as many tiles,
            and by all layers: boolean masks would be converted, and kept, by each.
    """

    masks: tuple[Tensor, ...]

    def attend(
        self,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[H, T, D], with as many heads of keys as of queries. Images of one mask run in a batch."""
        assert window is None, "the tower has no windows"
        assert sinks is None, "nor sinks"
        num = len(self.masks)
        q, k, v = (x.unflatten(1, (num, -1)).transpose(0, 1) for x in (q_HTD, k_GTD, v_GTD))
        outputs = [
            functional.scaled_dot_product_attention(
                q[first:last], k[first:last], v[first:last], attn_mask=self.masks[first], scale=scale
            )
            for first, last in self._alike()
        ]
        y_NHTD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return y_NHTD.transpose(1, 2).flatten(0, 1).transpose(0, 1)

    def _alike(self) -> list[tuple[int, int]]:
        """Runs [first, last) of images that share a mask."""
        starts = [i for i, mask in enumerate(self.masks) if i == 0 or mask is not self.masks[i - 1]]
        return list(zip(starts, [*starts[1:], len(self.masks)], strict=True))


def filled(tiles_BCYX: Tensor, num: int) -> Tensor:
    """The tiles, padded with zeros to `num`."""
    return functional.pad(tiles_BCYX, (0, 0, 0, 0, 0, 0, 0, num - len(tiles_BCYX)))


class TapProjector(ProjectorLayer):
    """The last layer: output and tapped outputs become one vector per token. No token is dropped."""

    def __init__(self, kind: str | None, widths: tuple[int, int], std: float, num_taps: int) -> None:
        super().__init__(kind, widths, std)
        self.num_taps = num_taps

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        del context
        width = x_TD.shape[1] // (1 + self.num_taps)
        taps_TD = x_TD[:, width:].unflatten(1, (self.num_taps, width)).transpose(1, 2).flatten(1)
        y_TD: Tensor = self.projector(torch.cat([x_TD[:, :width], taps_TD], dim=1))
        return y_TD


def tiled_attention(tiles: Sequence[Tiles], device: torch.device, dtype: torch.dtype) -> TiledAttention:
    """The attention of a microbatch's images, all of one number of tokens."""
    masks = {layout: _mask(layout, device, dtype) for layout in dict.fromkeys(tiles)}
    return TiledAttention(tuple(masks[layout] for layout in tiles))


def _mask(tiles: Tiles, device: torch.device, dtype: torch.dtype) -> Tensor:
    index_T = torch.arange(tiles.total, device=device)
    is_patch_T = (index_T % tiles.tokens < tiles.seen) & (index_T < tiles.filled * tiles.tokens)
    return additive(is_patch_T[:, None] | is_patch_T, dtype)


class EmbedTiles(StageLayer):
    """Layer 0: a class token, and patches with positions of tile and patch; padding ends each tile."""

    def __init__(self, config: MllamaVisionConfig, tower: Tiling) -> None:
        places = ("pre_tile_positional_embedding", "gated_positional_embedding")
        names = ("patch_embedding", *places, "class_embedding", "layernorm_pre")
        super().__init__({name: name for name in names}, config.initializer_range)
        self.tower = tower
        patch = config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.pre_tile_positional_embedding = mllama.MllamaPrecomputedAspectRatioEmbedding(
            config, is_gated=True
        )
        self.gated_positional_embedding = mllama.MllamaPrecomputedPositionEmbedding(config)
        self.layernorm_pre = nn.LayerNorm(config.hidden_size)

    def fill(self, name: str) -> Fill:
        return constant(0.0) if name.endswith("gate") else super().fill(name)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        assert isinstance(context, TiledContext), "made by a tiled adapter"
        tower, ratios = self.tower, context.ratios
        pixels_NBCYX = torch.stack([filled(image, tower.tiles) for image in context.data.raw])
        num = len(pixels_NBCYX)
        x_NPD = self.patch_embedding(pixels_NBCYX.flatten(0, 1)).flatten(2).transpose(1, 2)
        x_NBPD = self.pre_tile_positional_embedding(x_NPD.unflatten(0, (num, tower.tiles)), ratios)
        first_NB1D = self.class_embedding.expand(num, tower.tiles, 1, -1)
        x_NBPD = self.gated_positional_embedding(torch.cat([first_NB1D, x_NBPD], dim=2), ratios)
        x_NBPD = self.layernorm_pre(x_NBPD)
        return functional.pad(x_NBPD, (0, 0, 0, tower.padded - tower.patches)).flatten(0, 2)


class TileBlock(InnerLayer):
    """One block of either transformer. Outputs that the projector reads are appended to the hidden state."""

    def __init__(self, config: MllamaVisionConfig, tower: Tiling, index: int) -> None:
        is_global = index >= tower.num_local
        own = index - tower.num_local if is_global else index
        stack = "global_transformer" if is_global else "transformer"
        super().__init__({"block": f"{stack}.layers.{own}"}, config.initializer_range)
        self.block = mllama.MllamaVisionEncoderLayer(config, is_gated=is_global)
        self.width = config.hidden_size
        self.is_tapped = index in tower.taps

    def fill(self, name: str) -> Fill:
        return constant(math.pi / 4) if "gate_" in name else super().fill(name)

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        carried = x_TD[:, self.width :]
        y_TD = self._run(x_TD[:, : self.width].contiguous(), context)
        if not self.is_tapped and not carried.shape[1]:
            return y_TD
        return torch.cat([y_TD, carried, y_TD] if self.is_tapped else [y_TD, carried], dim=1)

    def _run(self, x_TD: Tensor, context: Context) -> Tensor:
        y_1TD: Tensor = self.block(x_TD[None], attention_mask=context.packing)
        return y_1TD[0]


class FirstGlobalBlock(TileBlock):
    """The first gated block, after a norm and the positions of tiles once more."""

    def __init__(self, config: MllamaVisionConfig, tower: Tiling) -> None:
        super().__init__(config, tower, tower.num_local)
        names = ("layernorm_post", "post_tile_positional_embedding")
        self.prefixes |= {name: name for name in names}
        self.shape = (tower.tiles, tower.padded)
        self.layernorm_post = nn.LayerNorm(config.hidden_size)
        self.post_tile_positional_embedding = mllama.MllamaPrecomputedAspectRatioEmbedding(
            config, is_gated=True
        )

    def fill(self, name: str) -> Fill:
        return constant(0.0) if name.endswith("embedding.gate") else super().fill(name)

    def _run(self, x_TD: Tensor, context: Context) -> Tensor:
        assert isinstance(context, TiledContext), "made by a tiled adapter"
        x_NBPD = self.layernorm_post(x_TD).unflatten(0, (-1, *self.shape))
        x_NBPD = self.post_tile_positional_embedding(x_NBPD, context.ratios)
        return super()._run(x_NBPD.flatten(0, 2), context)


class TiledAdapter(Adapter):
    """Llama 3.2 Vision's tower. An image is one item; its segment's grid is (rows, columns) of tiles."""

    config_class = MllamaVisionConfig
    undivided = "an encoder of tiles does not share tokens over ranks"
    prefixes = ("", "vision_model.", "model.vision_model.")

    def configured(self, fields: dict[str, Any]) -> PretrainedConfig:
        self.tower = tiling_of({"model_type": VISION_MODEL, **fields})
        return super().configured(fields)

    @property
    def num_blocks(self) -> int:
        return self.tower.num_local + self.tower.num_global

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        rows, columns = self._grid(segment.grid)
        tokens = (segment.tokens_in, segment.tokens_out)
        if tokens != (self.tower.tokens, 1):
            raise ValueError(
                f"segment {segment.modality}[{segment.k}]: module {self.module.name!r} makes "
                f"{self.tower.tokens} tokens of an image and 1 stands for it in the LLM, got {tokens}"
            )
        side = self.config.image_size
        return (rows * columns, self.config.num_channels, side, side)

    def tiles(self, segment: Segment) -> Tiles:
        return self._tiles(self._grid(segment.grid))

    def _tiles(self, grid: tuple[int, int]) -> Tiles:
        (rows, columns), tower = grid, self.tower
        return Tiles(num=tower.tiles, tokens=tower.padded, seen=tower.patches, filled=rows * columns)

    def _grid(self, grid: tuple[int, int] | None) -> tuple[int, int]:
        if grid is None:
            return self.tower.grid
        if grid not in self.tower.ratios:
            raise ValueError(
                f"module {self.module.name!r}: an image's tiles must be one of {list(self.tower.ratios)} "
                f"(rows, columns), got {grid}"
            )
        return grid

    def first(self) -> StageLayer:
        return EmbedTiles(self.config, self.tower)

    def block(self, index: int) -> StageLayer:
        if index == self.tower.num_local:
            return FirstGlobalBlock(self.config, self.tower)
        return TileBlock(self.config, self.tower, index)

    def last(self) -> StageLayer:
        widths = (self.module.layers[-2].out_width, self.module.layers[-1].out_width)
        return TapProjector(self.projector, widths, self.config.initializer_range, len(self.tower.taps))

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        super().context(data, device, dtype)
        grids = [self._grid(grid) for grid in data.grids or (None,) * len(data.items)]
        ratios = torch.tensor([[self.tower.ratios.index(grid) + 1] for grid in grids], device=device)
        attention = tiled_attention([self._tiles(grid) for grid in grids], device, dtype)
        return TiledContext(data=data, packing=attention, ratios=ratios)
