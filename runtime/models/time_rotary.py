"""Music Flamingo's rotation of audio features by their window in a clip and their time in it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.musicflamingo import modeling_musicflamingo as music
from transformers.models.musicflamingo.configuration_musicflamingo import MusicFlamingoConfig

from runtime.models.adapter import MicrobatchData

# Shape suffixes: T = packed tokens, D = width, W = windows of a microbatch.

_FRAMES = 4  # of a feature: a convolution's stride, and a mean of two


class TimeRotary:
    """Rotates features; clips are runs of items without text between them.

    Args:
        parameters: of the rotation, and the seconds of a mel frame as `frame_s`.
        width: of features; most: features of a full window.
    """

    def __init__(self, parameters: Mapping[str, Any], width: int, most: int) -> None:
        rope = {"rope_type": "default", **parameters}
        frame_s = rope.pop("frame_s")
        encoder = {"model_type": "audioflamingo3_encoder", "hidden_size": width}
        config = MusicFlamingoConfig(audio_config=encoder, rope_parameters=rope, audio_frame_step=frame_s)
        self.most, self.feature_s = most, frame_s * _FRAMES
        self.rotary = music.MusicFlamingoRotaryEmbedding(config)

    def __call__(self, x_TD: Tensor, data: MicrobatchData) -> Tensor:
        window_W1 = torch.tensor(data.windows)[:, None]
        time_s = torch.arange(self.most, dtype=torch.float32) * self.feature_s
        rotary = self.rotary.to(torch.promote_types(x_TD.dtype, torch.float32))
        angles = rotary(window_W1 * self.most * self.feature_s + time_s, seq_len=self.most)
        cos_TD, sin_TD = (
            torch.cat([each[:num] for each, num in zip(angle_WTD, data.tokens_out, strict=True)])
            for angle_WTD in angles
        )
        if data.pooling is not None:  # ranks share the tokens
            cos_TD, sin_TD = data.pooling.own(cos_TD), data.pooling.own(sin_TD)
        y_TD: Tensor = music.apply_rotary_time_emb(x_TD, cos_TD.to(x_TD.device), sin_TD.to(x_TD.device))
        return y_TD
