"""Phi-4-multimodal's audio encoder: convolutions, and conformer blocks with one shared table of biases."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioConfig,
    Phi4MultimodalAudioConformerEncoderLayer,
    Phi4MultimodalAudioNemoConvSubsampling,
    Phi4MultimodalAudioRelativeAttentionBias,
)

from runtime.models.adapter import Context, InnerLayer, StageLayer
from runtime.models.attention import Packing
from runtime.models.encoder import EncoderAdapter, ItemSize
from workbench.data.sample import Segment
from workbench.model.families.phi4_audio import MOST_TOKENS

# Shape suffixes: N = clips of one length L, M = mel bins, S = mel frames, T = packed tokens, H = heads,
# D = width.

BIAS = "relative_attention_bias_layer"


def by_length(x_TD: Tensor, packing: Packing) -> list[Tensor]:
    """[N, L, D] for every length, in the order of the packing's groups."""
    return [
        (x_TD if group.index is None else x_TD.index_select(0, group.index)).unflatten(
            0, (group.count, group.length)
        )
        for group in packing.groups
    ]


def packed(groups: list[Tensor], packing: Packing) -> Tensor:
    """[T, D], the inverse of `by_length`."""
    flat_TD = torch.cat([group.flatten(0, 1) for group in groups])
    return flat_TD if packing.restore is None else flat_TD.index_select(0, packing.restore)


class ConvStem(StageLayer):
    """Layer 0: convolutions over time and mel bins that make one token of several frames.

    Differs: transformers first applies a mean and a scale, stored as buffers; here clips are already
    normalised.
    """

    def __init__(self, config: Phi4MultimodalAudioConfig) -> None:
        super().__init__({"embed": "embed"}, config.initializer_range)
        self.embed = Phi4MultimodalAudioNemoConvSubsampling(config)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        embedded = [self.embed(clip_MS.t()[None], None)[0][0] for clip_MS in context.data.raw]
        return torch.cat(embedded)


class ConformerBlock(InnerLayer):
    """Layers 1..N: one conformer block, with clips of one length in a batch.

    Its attention adds a learned bias to every score, so it runs in torch's own kernel with that bias as a
    mask; convolutions look back within a clip only.
    """

    def __init__(self, config: Phi4MultimodalAudioConfig, index: int) -> None:
        super().__init__({"block": f"encoders.{index}", "bias": BIAS}, config.initializer_range)
        self.block = Phi4MultimodalAudioConformerEncoderLayer(config)
        self.bias = Phi4MultimodalAudioRelativeAttentionBias(config)

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        assert isinstance(context.packing, Packing), "made by this adapter"
        groups = by_length(x_TD, context.packing)
        return packed([self._run(x_NLD) for x_NLD in groups], context.packing)

    def _run(self, x_NLD: Tensor) -> Tensor:
        block = self.block
        x_NLD = x_NLD + 0.5 * block.feed_forward_in(x_NLD)
        x_NLD = x_NLD + self._attended(block.layer_norm_att(x_NLD))
        x_NLD = x_NLD + block.conv(x_NLD)
        x_NLD = x_NLD + 0.5 * block.feed_forward_out(x_NLD)
        y_NLD: Tensor = block.layer_norm(x_NLD)
        return y_NLD

    def _attended(self, x_NLD: Tensor) -> Tensor:
        attention = self.block.self_attn
        q_NHLD, k_NHLD, v_NHLD = (
            project(x_NLD).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        y_NHLD = functional.scaled_dot_product_attention(
            q_NHLD, k_NHLD, v_NHLD, attn_mask=self.bias(x_NLD), scale=attention.scaling
        )
        y_NLD: Tensor = attention.o_proj(y_NHLD.transpose(1, 2).flatten(2))
        return y_NLD


class ConformerAdapter(EncoderAdapter):
    """Phi-4-multimodal's audio encoder; features are the last block's output."""

    config_class = Phi4MultimodalAudioConfig
    item_dims = 2
    items_key = "audio_input_features"
    undivided = "conformers do not share tokens"
    prefixes = ("", "encoder.", "audio_embed.encoder.", "model.embed_tokens_extend.audio_embed.encoder.")
    ignored = ("encoder_embedding.",)

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_blocks)

    @property
    def neutral_buffers(self) -> Mapping[str, float]:
        return {"encoder_embedding.global_mean": 0.0, "encoder_embedding.global_invstd": 1.0}

    @property
    def written_by(self) -> Mapping[str, int]:
        """Every block has the same table of biases, under one name."""
        return {f"{BIAS}.bias_values.weight": 1}

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        if segment.tokens_in > MOST_TOKENS:
            raise ValueError(
                f"segment {segment.modality}[{segment.k}]: module {self.module.name!r} takes clips of up to "
                f"{MOST_TOKENS} tokens, got {segment.tokens_in}"
            )
        return (self.config.input_size, self.config.time_reduction * segment.tokens_in)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        tokens = shape[1] // int(self.config.time_reduction)
        return ItemSize(tokens, tokens)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        features_TD: Tensor = call(item.t()[None], None)[0]
        return features_TD

    def first(self) -> StageLayer:
        return ConvStem(self.config)

    def block(self, index: int) -> StageLayer:
        return ConformerBlock(self.config, index)

    def last(self) -> StageLayer:
        return self.projected()
