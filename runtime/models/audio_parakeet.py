"""Parakeet's encoder: strided convolutions, and conformer blocks with scores of relative positions."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.models.parakeet.modeling_parakeet import (
    ParakeetEncoderBlock,
    ParakeetEncoderConfig,
    ParakeetEncoderSubsamplingConv2D,
)

from runtime.models.adapter import Context, InnerLayer, StageLayer
from runtime.models.attention import Packing
from runtime.models.audio_conformer import by_length, packed
from runtime.models.encoder import EncoderAdapter, ItemSize
from runtime.models.initialise import Fill, constant
from runtime.models.norm import replace_parts
from workbench.data.sample import Segment
from workbench.model.families.parakeet import tokens_of

# Shape suffixes: N = clips of one length L, P = 2 L - 1 relative positions, M = mel bins, S = mel frames,
# T = packed tokens, H = heads, W = width of a head, D = width.

_BASE = 10_000.0  # of the wavelengths of positions
_DROPOUTS = ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout")


def positions(num_tokens: int, width: int, device: torch.device) -> Tensor:
    """[P, D] sines and cosines of distances from L - 1 down to 1 - L, in float32 as in transformers."""
    halves = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    places = torch.arange(num_tokens - 1, -num_tokens, -1, device=device)[:, None].float()
    angles = places * (1.0 / _BASE**halves)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


def by_distance(scores_NHLP: Tensor) -> Tensor:
    """[N, H, L, L] the score of each pair's distance, of those of all distances.

    Source: Dai et al. 2019, "Transformer-XL", appendix B.
    """
    length, num = scores_NHLP.shape[2:]
    shifted = functional.pad(scores_NHLP, (1, 0)).flatten(2)[..., length:]
    return shifted.unflatten(2, (length, num))[..., :length]


class StoredBatchNorm(nn.Module):
    """A batch norm by stored statistics, which stay as they were read, in training, too."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        width = norm.num_features
        self.register_buffer("running_mean", torch.zeros(width, dtype=torch.float32, device="cpu"))
        self.register_buffer("running_var", torch.ones(width, dtype=torch.float32, device="cpu"))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64, device="cpu"))

    def forward(self, x_NDL: Tensor) -> Tensor:
        mean, var = (self.get_buffer(name).to(x_NDL.dtype) for name in ("running_mean", "running_var"))
        return functional.batch_norm(x_NDL, mean, var, self.weight, self.bias, eps=self.eps)


class ParakeetStem(StageLayer):
    """Layer 0: convolutions over time and mel bins that make one token of several frames."""

    def __init__(self, config: ParakeetEncoderConfig) -> None:
        super().__init__({"subsampling": "subsampling"}, config.initializer_range)
        self.subsampling = ParakeetEncoderSubsamplingConv2D(config)
        self.scale = sqrt(config.hidden_size) if config.scale_input else 1.0

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        embedded = [self.subsampling(clip_MS.t()[None])[0] for clip_MS in context.data.raw]
        return torch.cat(embedded) * self.scale


class ParakeetBlock(InnerLayer):
    """Layers 1..N: one conformer block, with clips of one length in a batch.

    Scores of positions are added as a mask in torch's own kernel; convolutions see a clip only.
    """

    def __init__(self, config: ParakeetEncoderConfig, index: int) -> None:
        super().__init__({"block": f"layers.{index}"}, config.initializer_range)
        self.block = ParakeetEncoderBlock(config, index)
        replace_parts(self.block, nn.BatchNorm1d, StoredBatchNorm)

    def fill(self, name: str) -> Fill:
        return constant(1.0) if name == "block.conv.norm.weight" else super().fill(name)

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        assert isinstance(context.packing, Packing), "made by this adapter"
        groups = by_length(x_TD, context.packing)
        return packed([self._run(x_NLD) for x_NLD in groups], context.packing)

    def _run(self, x_NLD: Tensor) -> Tensor:
        block = self.block
        x_NLD = x_NLD + 0.5 * block.feed_forward1(block.norm_feed_forward1(x_NLD))
        x_NLD = x_NLD + self._attended(block.norm_self_att(x_NLD))
        x_NLD = x_NLD + block.conv(block.norm_conv(x_NLD))
        x_NLD = x_NLD + 0.5 * block.feed_forward2(block.norm_feed_forward2(x_NLD))
        y_NLD: Tensor = block.norm_out(x_NLD)
        return y_NLD

    def _attended(self, x_NLD: Tensor) -> Tensor:
        attention: Any = self.block.self_attn
        q_NLHW, k_NLHW, v_NLHW = (
            project(x_NLD).unflatten(-1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        places_PD = positions(x_NLD.shape[1], x_NLD.shape[2], x_NLD.device).to(x_NLD.dtype)
        r_HWP = attention.relative_k_proj(places_PD).unflatten(-1, (-1, attention.head_dim)).permute(1, 2, 0)
        scores_NHLP = (q_NLHW + attention.bias_v).transpose(1, 2) @ r_HWP
        y_NHLW = functional.scaled_dot_product_attention(
            (q_NLHW + attention.bias_u).transpose(1, 2),
            k_NLHW.transpose(1, 2),
            v_NLHW.transpose(1, 2),
            attn_mask=by_distance(scores_NHLP) * attention.scaling,
            scale=attention.scaling,
        )
        y_NLD: Tensor = attention.o_proj(y_NHLW.transpose(1, 2).flatten(2))
        return y_NLD


class ParakeetAdapter(EncoderAdapter):
    """Parakeet's encoder; features are the last block's output.

    Differs: all frames of a clip are heard, where transformers masks the last one that its processor makes.
    """

    config_class = ParakeetEncoderConfig
    item_dims = 2
    undivided = "conformers do not share tokens"
    prefixes = ("", "audio_tower.", "encoder.")
    ignored = ("feature_extractor.",)

    def configured(self, fields: dict[str, Any]) -> PretrainedConfig:
        """Without dropout, which is off in training, too."""
        return super().configured(fields | dict.fromkeys(_DROPOUTS, 0.0))

    @property
    def factor(self) -> int:
        """Mel frames of a token."""
        return int(self.config.subsampling_factor)

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        return (self.config.num_mel_bins, self.factor * segment.tokens_in)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        tokens = tokens_of(shape[1], self.factor)
        return ItemSize(tokens, tokens)

    def nearest_shape(self, segment: Segment, shape: tuple[int, ...]) -> tuple[int, ...]:
        """All of a clip's frames, as the last token may have fewer."""
        bins, frames = self.raw_shape(segment)
        return bins, shape[1] if tokens_of(shape[1], self.factor) == segment.tokens_in else frames

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        features_TD: Tensor = call(item.t()[None]).last_hidden_state[0]
        return features_TD

    def first(self) -> StageLayer:
        return ParakeetStem(self.config)

    def block(self, index: int) -> StageLayer:
        return ParakeetBlock(self.config, index)

    def last(self) -> StageLayer:
        return self.projected()
