"""GLM-ASR's encoder: Whisper's with rotary positions, over windows that are filled up with silence."""

import torch
from torch import nn
from transformers.models.glmasr import modeling_glmasr as glmasr
from transformers.models.glmasr.configuration_glmasr import GlmAsrEncoderConfig

from runtime.models.adapter import ONE_ROTATION, Context, MicrobatchData, StageLayer
from runtime.models.audio import Convolutions, WhisperAdapter
from runtime.models.encoder import ItemSize, RotaryBlock
from workbench.model.model_graph import Module

# Shape suffixes: T = packed tokens, D = width.


class GlmAsrBlock(RotaryBlock):
    """One encoder layer on packed clips."""

    blocks = "layers"


class GlmAsrAdapter(WhisperAdapter):
    """Features are the final norm's output, of the tokens of a clip and of the silence behind it."""

    config_class = GlmAsrEncoderConfig
    rotary_name = "rotary_emb"
    prefixes = ("", "audio_tower.", "model.audio_tower.")
    ignored = ()
    undivided = "encoders with rotary positions do not share tokens over ranks"
    _rotary: nn.Module

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self._rotary = glmasr.GlmAsrRotaryEmbedding(self.config)

    @property
    def std(self) -> float:
        return float(self.config.initializer_range)

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def max_tokens(self) -> int:
        return int(self.config.max_position_embeddings)

    def clip_size(self, frames: int) -> ItemSize:
        """As long as a window, whatever the clip's length."""
        return super().clip_size(frames)._replace(tokens_in=self.max_tokens)

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        plain = super().context(data, device, dtype)
        places_T = torch.cat([torch.arange(num, device=device) for num in data.tokens_in])
        like = torch.empty(0, dtype=dtype, device=device)
        return Context(plain.data, plain.packing, {ONE_ROTATION: self._rotary(like, places_T[None])})

    def first(self) -> StageLayer:
        return Convolutions(self.config.num_mel_bins, self.config.hidden_size, self.std)

    def block(self, index: int) -> StageLayer:
        return GlmAsrBlock(glmasr.GlmAsrEncoderLayer(self.config, index), index, self.std)

    def last(self) -> StageLayer:
        return self.projected(nn.LayerNorm(self.config.hidden_size), "norm")
