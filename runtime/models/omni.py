"""Qwen2.5-Omni's towers: for windows of clips, and for images."""

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
    """Computed positions, in float32 as in transformers, where Whisper's are weights."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # on the meta device they would have no values
            table = omni.SinusoidsPositionEmbedding(num, width).positional_embedding
        self.weight = nn.Buffer(table, persistent=False)


class OmniAudioAdapter(Qwen2AudioAdapter):
    """Qwen2.5-Omni's audio encoder: Qwen2-Audio's on windows of a clip, with computed positions.

    Windows do not see each other, so each is an item. Its own `proj` is the projector of a composite; a
    module that is read alone omits it.
    """

    config_class = omni.Qwen2_5OmniAudioEncoderConfig
    ignored = ("audio_bos_eos_token.", "proj.")

    @property
    def std(self) -> float:
        return float(self.config.initializer_range)

    @property
    def max_tokens(self) -> int:
        """Tokens of a full window."""
        return int(self.config.n_window)

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        """Size of a clip: an odd last frame counts as a token, an odd last token is dropped."""
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
        """The input of its own `proj`."""
        return given_to("proj", model, item, torch.tensor([item.shape[1]], device=item.device))

    def first(self) -> StageLayer:
        return ConvStem(self.config, self.std, Sinusoids)

    def last(self) -> StageLayer:
        return self.projected(nn.LayerNorm(self.config.d_model), "ln_post")


class OmniVisionAdapter(Qwen25VisionAdapter):
    """Its tower for images: Qwen2.5-VL's with another attention class."""

    config_class = omni.Qwen2_5OmniVisionEncoderConfig
    rotary_class = omni.Qwen2_5OmniVisionRotaryEmbedding
    patches_class, merger_class = omni.Qwen2_5_VisionPatchEmbed, omni.Qwen2_5OmniPatchMerger
    layer_class, norm_class = omni.Qwen2_5OmniVisionBlock, omni.Qwen2_5OmniRMSNorm
