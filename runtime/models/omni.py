"""Qwen2.5-Omni's towers: of clips, window by window, and of images."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni

from runtime.models.adapter import StageLayer
from runtime.models.audio import FRAMES_PER_TOKEN, ConvStem, Qwen2AudioAdapter, check_one_window
from runtime.models.encoder import ItemSize, given_to
from runtime.models.vision_rotary import Qwen25VisionAdapter
from workbench.data.sample import Segment

# Shape suffixes: T = packed tokens, D = width.


class Sinusoids(nn.Module):
    """Positions that are computed, in float32 as transformers does it, where Whisper's are weights."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # made on the meta device they would hold nothing
            table = omni.SinusoidsPositionEmbedding(num, width).positional_embedding
        self.weight = nn.Buffer(table, persistent=False)


class OmniAudioAdapter(Qwen2AudioAdapter):
    """Qwen2.5-Omni's audio encoder: Qwen2-Audio's on windows of a clip, under computed positions.

    No window sees another, so each is an item. Its own `proj` is what a composite has as its projector; a
    module that is read alone leaves it out.
    """

    config_class = omni.Qwen2_5OmniAudioEncoderConfig
    ignored = ("audio_bos_eos_token.", "proj.")

    @property
    def std(self) -> float:
        return float(self.config.initializer_range)

    @property
    def max_tokens(self) -> int:
        """Of a full window."""
        return int(self.config.n_window)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        """A last frame without a neighbour is a token too; a last token without one is not."""
        return super().item_size((shape[0], shape[1] + 1))

    def nearest_shape(self, segment: Segment, shape: tuple[int, ...]) -> tuple[int, ...]:
        bins, frames = super().nearest_shape(segment, shape)
        return bins, frames - 1 if shape[1] == frames - 1 else frames

    def clip_size(self, frames: int) -> ItemSize:
        check_one_window(frames, self.max_frames)
        return super().clip_size(frames)

    def windows(self, item: Tensor) -> tuple[Tensor, ...]:
        cut = item.split(FRAMES_PER_TOKEN * self.max_tokens, dim=1)
        return tuple(window for window in cut if window.shape[1] > FRAMES_PER_TOKEN)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        """What its own `proj` would read."""
        return given_to("proj", model, item, torch.tensor([item.shape[1]], device=item.device))

    def first(self) -> StageLayer:
        return ConvStem(self.config, self.std, Sinusoids)

    def last(self) -> StageLayer:
        return self.projected(nn.LayerNorm(self.config.d_model), "ln_post")


class OmniVisionAdapter(Qwen25VisionAdapter):
    """Its tower of images: Qwen2.5-VL's, but for what its attention is made of."""

    config_class = omni.Qwen2_5OmniVisionEncoderConfig
    rotary_class = omni.Qwen2_5OmniVisionRotaryEmbedding
    patches_class, merger_class = omni.Qwen2_5_VisionPatchEmbed, omni.Qwen2_5OmniPatchMerger
    layer_class, norm_class = omni.Qwen2_5OmniVisionBlock, omni.Qwen2_5OmniRMSNorm
