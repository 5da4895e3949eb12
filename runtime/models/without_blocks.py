"""Gemma 4 unified's towers, which have no blocks: images in large patches, and clips as raw samples."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma4_unified.configuration_gemma4_unified import (
    Gemma4UnifiedAudioConfig,
    Gemma4UnifiedVisionConfig,
)

from runtime.models.adapter import StageLayer
from runtime.models.encoder import EmbedItems, EncoderAdapter, ItemSize
from runtime.models.norm import UnscaledRMSNorm
from runtime.models.vision import VisionAdapter
from runtime.models.vision_gemma4 import places
from runtime.models.vision_siglip2 import flat_patches
from workbench.data.sample import Segment

# Shape suffixes: N = items of one size, C = channels, H, W = height, width, T = packed tokens, P = numbers of
# a patch, or samples of a token, S = rows of a table of positions, D = width.

_TABLE = "pos_embedding"


class EmbedLargePatches(EmbedItems):
    """A matmul over each patch between norms, positions of its column and row, and a norm."""

    def __init__(self, config: Gemma4UnifiedVisionConfig, module_name: str) -> None:
        names = ("patch_ln1", "patch_dense", "patch_ln2", _TABLE, "pos_norm")
        super().__init__({name: name for name in names}, config.initializer_range)
        self.module_name, self.patch, width = module_name, config.model_patch_size, config.mm_embed_dim
        numbers = 3 * self.patch**2
        self.patch_ln1 = nn.LayerNorm(numbers)
        self.patch_dense = nn.Linear(numbers, width)
        self.patch_ln2, self.pos_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.pos_embedding = nn.Parameter(torch.empty(config.mm_posemb_size, 2, width))

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        rows, columns = (side // self.patch for side in pixels_NCHW.shape[2:])
        table_S2D = self.pos_embedding
        if (longest := max(rows, columns)) > len(table_S2D):
            raise ValueError(
                f"module {self.module_name!r} takes up to {len(table_S2D)} patches along a side of an image, "
                f"got {longest}"
            )
        column_T, row_T = places((rows, columns), 1).T.to(pixels_NCHW.device)
        patches_NTP = flat_patches(pixels_NCHW, self.patch)
        x_NTD: Tensor = self.patch_ln2(self.patch_dense(self.patch_ln1(patches_NTP)))
        y_NTD: Tensor = self.pos_norm(x_NTD + (table_S2D[column_T, 0] + table_S2D[row_T, 1]))
        return y_NTD


class EmbedSamples(EmbedItems):
    """A norm of the samples of each token; there is nothing to train."""

    def __init__(self, config: Gemma4UnifiedAudioConfig) -> None:
        super().__init__({}, config.initializer_range)
        self.norm = UnscaledRMSNorm(config.rms_norm_eps)

    def embed(self, frames_NPT: Tensor) -> Tensor:
        normal_NTP: Tensor = self.norm(frames_NPT.mT)
        return normal_NTP


class LargePatchAdapter(VisionAdapter):
    """Features are what the last norm gives, row by row."""

    config_class = Gemma4UnifiedVisionConfig
    items_key = "pixel_values"
    num_blocks = 0
    prefixes = ("", "embed_vision.", "model.embed_vision.")
    ignored = ("multimodal_embedder.",)
    channels = 3
    side = 0  # of no size of its own

    @property
    def patch_px(self) -> int:
        return int(self.config.model_patch_size)

    @property
    def widths(self) -> tuple[int, int]:
        return int(self.config.mm_embed_dim), self.module.layers[-1].out_width

    def first(self) -> StageLayer:
        return EmbedLargePatches(self.config, self.module.name)

    def block(self, index: int) -> NoReturn:
        raise IndexError(index)

    def last(self) -> StageLayer:
        return self.projected()

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        grid = (item.shape[1] // self.patch_px, item.shape[2] // self.patch_px)
        patches_1TP = flat_patches(item[None], self.patch_px)
        seen_TD: Tensor = call(patches_1TP, places(grid, 1)[None]).last_hidden_state[0]
        return seen_TD


class SampleAdapter(EncoderAdapter):
    """Features are normalised samples; all else is its projector."""

    config_class = Gemma4UnifiedAudioConfig
    item_dims = 2
    items_key = "input_features"
    num_blocks = 0
    prefixes = ("", "embed_audio.", "model.embed_audio.")
    ignored = ("embedding_projection.",)

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        return (self.config.audio_embed_dim, segment.tokens_in)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        return ItemSize(shape[1], shape[1])

    def first(self) -> StageLayer:
        return EmbedSamples(self.config)

    def block(self, index: int) -> NoReturn:
        raise IndexError(index)

    def last(self) -> StageLayer:
        return self.projected()

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Any = model
        normal_TP: Tensor = call.embedding_pre_projection_norm(item.mT)
        return normal_TP
