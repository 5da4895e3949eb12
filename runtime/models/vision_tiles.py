"""Llama 3.2 Vision's tower: images cut into tiles, padded, and read by an LLM's cross-attention."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mllama import modeling_mllama as mllama
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig

from runtime.models.adapter import ATTENTION, Adapter, Context, MicrobatchData, StageLayer, Tiles
from runtime.models.attention import additive
from runtime.models.initialise import Fill, constant
from runtime.models.projector import ProjectorLayer
from workbench.data.sample import Segment
from workbench.model.mllama import VISION_MODEL, Tower, tower_of
from workbench.model.model_graph import Module

# Shape suffixes: N = images, B = tiles, C = channels, Y and X = rows and columns of pixels, P = tokens of a
# tile, T = packed tokens, H = heads, D = hidden width.


@dataclass(frozen=True, slots=True)
class TiledContext(Context):
    """What layers of a tiled encoder share.

    Args:
        ratios: which of the supported ratios each image has, from 1.
    """

    ratios: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Inside every image, patches see everything and padding sees patches alone.

    Source: transformers' `_prepare_aspect_ratio_attention_mask`, which hides padding from padding only.

    Args:
        masks: by image, [T, T] 0 where a token sees another and else -inf; images with as many tiles
            share one, and all layers do: booleans would be turned into numbers and kept by each.
    """

    masks: tuple[Tensor, ...]

    def attend(
        self, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """[H, T, D], as many heads of keys as of queries. Images of one mask run together."""
        assert window is None, "the tower has no windows"
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


class EmbedTiles(StageLayer):
    """Layer 0: patches with the places of tile and patch, behind a class token; padding ends each tile."""

    def __init__(self, config: MllamaVisionConfig, tower: Tower) -> None:
        names = ("patch_embedding", "pre_tile_positional_embedding", "gated_positional_embedding")
        names = (*names, "class_embedding", "layernorm_pre")
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
        pixels_NBCYX = torch.stack([_filled(image, tower.tiles) for image in context.data.raw])
        num = len(pixels_NBCYX)
        x_NPD = self.patch_embedding(pixels_NBCYX.flatten(0, 1)).flatten(2).transpose(1, 2)
        x_NBPD = self.pre_tile_positional_embedding(x_NPD.unflatten(0, (num, tower.tiles)), ratios)
        first_NB1D = self.class_embedding.expand(num, tower.tiles, 1, -1)
        x_NBPD = self.gated_positional_embedding(torch.cat([first_NB1D, x_NBPD], dim=2), ratios)
        x_NBPD = self.layernorm_pre(x_NBPD)
        return functional.pad(x_NBPD, (0, 0, 0, tower.padded - tower.patches)).flatten(0, 2)


def _filled(tiles_BCYX: Tensor, num: int) -> Tensor:
    """With zeros for the tiles that the image does not fill."""
    return functional.pad(tiles_BCYX, (0, 0, 0, 0, 0, 0, 0, num - len(tiles_BCYX)))


class TileBlock(StageLayer):
    """One block of either transformer. Outputs that the projector reads travel behind the hidden state."""

    def __init__(self, config: MllamaVisionConfig, tower: Tower, index: int) -> None:
        is_global = index >= tower.num_local
        own = index - tower.num_local if is_global else index
        stack = "global_transformer" if is_global else "transformer"
        super().__init__({"block": f"{stack}.layers.{own}"}, config.initializer_range)
        self.block = mllama.MllamaVisionEncoderLayer(config, is_gated=is_global)
        self.width = config.hidden_size
        self.is_tapped = index in tower.taps

    def fill(self, name: str) -> Fill:
        return constant(math.pi / 4) if "gate_" in name else super().fill(name)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features
        assert hidden_TD is not None, "a block is given its input"
        x_TD, carried = hidden_TD[:, : self.width].contiguous(), hidden_TD[:, self.width :]
        y_TD = self._run(x_TD, context)
        if not self.is_tapped and not carried.shape[1]:
            return y_TD
        return torch.cat([y_TD, carried, y_TD] if self.is_tapped else [y_TD, carried], dim=1)

    def _run(self, x_TD: Tensor, context: Context) -> Tensor:
        y_1TD: Tensor = self.block(x_TD[None], attention_mask=context.packing)
        return y_1TD[0]


class FirstGlobalBlock(TileBlock):
    """The first gated block, behind a norm and once more the places of tiles."""

    def __init__(self, config: MllamaVisionConfig, tower: Tower) -> None:
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


class TapProjector(ProjectorLayer):
    """The last layer: output and tapped outputs become one vector a token. No token is dropped."""

    def __init__(self, kind: str | None, widths: tuple[int, int], std: float, num_taps: int) -> None:
        super().__init__(kind, widths, std)
        self.num_taps = num_taps

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del features, context
        assert hidden_TD is not None, "a projector is given its input"
        width = hidden_TD.shape[1] // (1 + self.num_taps)
        taps_TD = hidden_TD[:, width:].unflatten(1, (self.num_taps, width)).transpose(1, 2).flatten(1)
        y_TD: Tensor = self.projector(torch.cat([hidden_TD[:, :width], taps_TD], dim=1))
        return y_TD


class TiledAdapter(Adapter):
    """Llama 3.2 Vision's tower. An image is one item; its segment's grid is (rows, columns) of tiles."""

    def __init__(self, module: Module, config: str, projector: str | None) -> None:
        super().__init__(module)
        given = json.loads(config)
        self.tower = tower_of({"model_type": VISION_MODEL, **given})
        self.config = MllamaVisionConfig.from_dict(given)
        self.config._attn_implementation = ATTENTION
        self.projector = projector

    @property
    def num_layers(self) -> int:
        return self.tower.num_local + self.tower.num_global + 2

    @property
    def prefixes(self) -> tuple[str, ...]:
        return ("", "vision_model.", "model.vision_model.")

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
        rows, columns = self._grid(segment.grid)
        tower = self.tower
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

    def _layer(self, index: int) -> StageLayer:
        config, tower = self.config, self.tower
        if index == 0:
            return EmbedTiles(config, tower)
        if index == tower.num_local + 1:
            return FirstGlobalBlock(config, tower)
        if index < self.num_layers - 1:
            return TileBlock(config, tower, index - 1)
        widths = (self.module.layers[-2].out_width, self.module.layers[-1].out_width)
        return TapProjector(self.projector, widths, config.initializer_range, len(tower.taps))

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        if data.attention is not None:
            raise ValueError(
                f"module {self.module.name!r}: an encoder of tiles does not share tokens over ranks; "
                "want cp 1"
            )
        grids = [self._grid(grid) for grid in data.grids or (None,) * len(data.items)]
        ratios = torch.tensor([[self.tower.ratios.index(grid) + 1] for grid in grids], device=device)
        attention = _attention(self.tower, [rows * columns for rows, columns in grids], device, dtype)
        return TiledContext(data=data, packing=attention, ratios=ratios)


def _attention(
    tower: Tower, filled: Sequence[int], device: torch.device, dtype: torch.dtype
) -> TiledAttention:
    place_T = torch.arange(tower.tokens, device=device)
    inside_T = place_T % tower.padded < tower.patches
    masks: dict[int, Tensor] = {}
    for num in filled:
        real_T = inside_T & (place_T < num * tower.padded)
        masks.setdefault(num, additive(real_T[:, None] | real_T, dtype))
    return TiledAttention(tuple(masks[num] for num in filled))
