"""Audio encoders: Whisper's, and those with the same structure."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioEncoderConfig
from transformers.models.voxtral.configuration_voxtral import VoxtralEncoderConfig
from transformers.models.whisper.modeling_whisper import WhisperConfig, WhisperEncoderLayer, sinusoids

from runtime.models.adapter import StageLayer
from runtime.models.encoder import EmbedItems, EncoderAdapter, EncoderBlock, ItemSize
from runtime.models.initialise import Fill
from runtime.models.projector import PooledProjectorLayer
from runtime.models.time_rotary import TimeRotary
from workbench.data.sample import Segment
from workbench.model.families.whisper import TIME_ROTARY
from workbench.model.item_tokens import source_config

# Shape suffixes: N = clips, M = mel bins, S = mel frames, T = packed tokens, D = hidden width.

FRAMES_PER_TOKEN = 2  # the second convolution has stride 2


class Convolutions(EmbedItems):
    """Layer 0 without positions: two convolutions over mel frames."""

    def __init__(self, mel_bins: int, width: int, std: float, **more: str) -> None:
        super().__init__({"conv1": "conv1", "conv2": "conv2", **more}, std)
        self.conv1 = nn.Conv1d(mel_bins, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)

    def embed(self, mel_NMS: Tensor) -> Tensor:
        x_NDT = functional.gelu(self.conv2(functional.gelu(self.conv1(mel_NMS))))
        return x_NDT.transpose(1, 2)


class ConvStem(Convolutions):
    """Layer 0: two convolutions over mel frames, and positions.

    Differs: transformers requires every clip to be padded to 30 s; here a clip of fewer frames takes the
    first positions, so that plans know the length of each clip.
    """

    def __init__(
        self, config: WhisperConfig, std: float, positions: Callable[[int, int], nn.Module] = nn.Embedding
    ) -> None:
        super().__init__(config.num_mel_bins, config.d_model, std, embed_positions="embed_positions")
        self.embed_positions: Any = positions(config.max_source_positions, config.d_model)

    def embed(self, mel_NMS: Tensor) -> Tensor:
        x_NTD = super().embed(mel_NMS)
        positions_TD: Tensor = self.embed_positions.weight[: x_NTD.shape[1]]
        return x_NTD + positions_TD.to(x_NTD.dtype)

    def fill(self, name: str) -> Fill:
        if name == "embed_positions.weight":
            return lambda shape, _: sinusoids(*shape).to(torch.float32)
        return super().fill(name)


class AudioBlock(EncoderBlock):
    """One encoder layer on packed clips."""

    blocks = "layers"


class WhisperAdapter(EncoderAdapter):
    """Whisper's encoder; features are its final norm's output.

    Differs: transformers excludes the sinusoidal positions from training; here, as for every weight, the
    plan's layer says whether they are trained.
    """

    config_class = WhisperConfig
    item_dims = 2
    prefixes = ("", "model.encoder.", "encoder.")
    ignored: tuple[str, ...] = ("model.decoder.", "decoder.", "proj_out.")

    @property
    def std(self) -> float:
        return float(self.config.init_std)

    @property
    def num_blocks(self) -> int:
        return int(self.config.encoder_layers)

    @property
    def max_tokens(self) -> int:
        """Number of positions, for the longest clip."""
        return int(self.config.max_source_positions)

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        limit = self.max_tokens
        if segment.tokens_in > limit:
            raise ValueError(
                f"segment {segment.modality}[{segment.k}]: module {self.module.name!r} has {limit} "
                f"positions, got {segment.tokens_in} tokens"
            )
        return (self.config.num_mel_bins, FRAMES_PER_TOKEN * segment.tokens_in)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        tokens = shape[1] // FRAMES_PER_TOKEN
        return ItemSize(tokens, tokens)

    @property
    def max_frames(self) -> int:
        """Mel frames of the longest item."""
        return FRAMES_PER_TOKEN * self.max_tokens

    def clip_size(self, frames: int) -> ItemSize:
        """Of a clip that is read as one item; what is longer than the longest item is cut off.

        Where a projector merges tokens, so is a rest that makes none.
        """
        step = FRAMES_PER_TOKEN * self.num_merged
        size = self.item_size((0, min(frames, self.max_frames) // step * step))
        return size._replace(tokens_out=size.tokens_out // self.num_merged)

    def first(self) -> StageLayer:
        return ConvStem(self.config, self.std)

    def block(self, index: int) -> StageLayer:
        return AudioBlock(WhisperEncoderLayer(self.config), index, self.std)

    def last(self) -> StageLayer:
        return self.projected(nn.LayerNorm(self.config.d_model), "layer_norm")


def check_one_window(frames: int, most: int) -> None:
    """Raise ValueError for a clip that would be several items where it is to be one."""
    if frames > most:
        raise ValueError(f"{frames} frames are several windows of {most}, and a folder's clip is one; cut it")


class VoxtralAdapter(WhisperAdapter):
    """Voxtral's encoder: Whisper's layers under the keys of a decoder."""

    config_class = VoxtralEncoderConfig
    prefixes = ("", "audio_tower.", "model.audio_tower.")

    @property
    def std(self) -> float:
        return float(self.config.initializer_range)


class Qwen2AudioAdapter(WhisperAdapter):
    """Qwen2-Audio's encoder: Whisper's, with the mean of two tokens before the final norm.

    Its layers are Whisper's under the same names, so they are built as Whisper's.
    """

    config_class = Qwen2AudioEncoderConfig
    named_projector = PooledProjectorLayer
    prefixes = ("", "audio_tower.", "model.audio_tower.")

    @property
    def std(self) -> float:
        return float(self.config.initializer_range)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        tokens, *_ = super().item_size(shape)
        return ItemSize(tokens, tokens // 2)

    def last(self) -> StageLayer:
        layer, parameters = super().last(), source_config(self.module).get(TIME_ROTARY)
        if parameters is not None and isinstance(layer, PooledProjectorLayer):
            with torch.device("cpu"):  # on the meta device its angles would have no values
                layer.time_rotary = TimeRotary(parameters, self.config.d_model, self.max_tokens // 2)
        return layer
