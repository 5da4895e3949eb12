"""Qwen3-Omni's audio encoder and vision tower."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

from runtime.models.adapter import Context, StageLayer
from runtime.models.attention import Packing
from runtime.models.audio import AudioBlock, WhisperAdapter, check_one_window
from runtime.models.encoder import ItemSize, given_to
from runtime.models.omni import Sinusoids
from runtime.models.patch_attention import PackedAttention
from runtime.models.vision_stacked import Qwen3VisionAdapter
from workbench.data.sample import Segment
from workbench.model.families.qwen3_omni_audio import CHUNK_TOKENS, NUM_CONVOLUTIONS, frames_of, tokens_of

# Shape suffixes: N = chunks, M = mel bins, S = mel frames, C = channels, T = packed tokens, D = hidden width.


class ChunkStem(StageLayer):
    """Layer 0: convolutions over chunks of mel frames, and positions that restart in each chunk.

    Differs: transformers pads a chunk to the longest of its batch; here every chunk is padded to a full one,
    so that a clip has the same features in every batch. Both are equal if any clip of the batch has a full
    chunk.
    """

    def __init__(self, adapter: "Qwen3OmniAudioAdapter") -> None:
        names = [f"conv2d{index}" for index in range(1, NUM_CONVOLUTIONS + 1)]
        super().__init__({name: name for name in (*names, "conv_out", "positional_embedding")}, adapter.std)
        config, self.chunk = adapter.config, adapter.chunk
        bins, channels = config.num_mel_bins, config.downsample_hidden_size
        for name in names:
            read = 1 if name == names[0] else channels
            self.add_module(name, nn.Conv2d(read, channels, kernel_size=3, stride=2, padding=1))
            bins = (bins + 1) // 2
        self.names = names
        self.conv_out = nn.Linear(channels * bins, config.d_model, bias=False)
        self.positional_embedding = Sinusoids(config.max_source_positions, config.d_model)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        clips = context.data.raw
        chunks = [chunk_MS for clip_MS in clips for chunk_MS in clip_MS.split(self.chunk, dim=1)]
        whole_NMS = torch.stack([functional.pad(each, (0, self.chunk - each.shape[1])) for each in chunks])
        x_NTD = self._convolved(whole_NMS)
        positions_TD = self.positional_embedding.weight[: x_NTD.shape[1]]
        x_NTD = x_NTD + positions_TD.to(x_NTD.dtype)
        lengths = [tokens_of(chunk_MS.shape[1], self.chunk) for chunk_MS in chunks]
        return torch.cat([x_TD[:length] for x_TD, length in zip(x_NTD, lengths, strict=True)])

    def _convolved(self, mel_NMS: Tensor) -> Tensor:
        x_NCMS = mel_NMS[:, None]
        for name in self.names:
            x_NCMS = functional.gelu(self.get_submodule(name)(x_NCMS))
        x_NTD: Tensor = self.conv_out(x_NCMS.permute(0, 3, 1, 2).flatten(2))
        return x_NTD


class ClipAttention(PackedAttention):
    """Attention of clips, window by window."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Packing) -> Tensor:
        """[T, D]; the arguments have the names that transformers' layers give them."""
        projections = [self.get_submodule(f"{letter}_proj") for letter in "qkv"]
        heads_THD = [project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in projections]
        y_TD: Tensor = self.get_submodule("out_proj")(self.attend(heads_THD, cu_seqlens))
        return y_TD


class ClipBlock(AudioBlock):
    """One encoder layer on packed windows."""

    def run(self, x_TD: Tensor, context: Any) -> Tensor:
        y_TD: Tensor = self.block(x_TD, cu_seqlens=context.packing)[0]
        return y_TD


class Qwen3OmniAudioAdapter(WhisperAdapter):
    """Qwen3-Omni's audio encoder; features are its final norm's output.

    Tokens attend within windows of chunks only, so each window is an item. The encoder's own MLP is the
    projector of a composite, and is left out if the encoder is used alone.
    """

    config_class = omni.Qwen3OmniMoeAudioEncoderConfig
    prefixes = ("", "audio_tower.", "model.audio_tower.")
    ignored = ("proj1.", "proj2.")

    @property
    def std(self) -> float:
        return float(self.config.initializer_range)

    @property
    def chunk(self) -> int:
        """Mel frames of a chunk."""
        return 2 * int(self.config.n_window)

    @property
    def max_tokens(self) -> int:
        """Tokens of a full window."""
        return int(self.config.n_window_infer) // self.chunk * CHUNK_TOKENS

    @property
    def max_frames(self) -> int:
        return self.max_tokens // CHUNK_TOKENS * self.chunk

    def clip_size(self, frames: int) -> ItemSize:
        check_one_window(frames, self.max_frames)
        return self.item_size((0, frames))

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        bins, _ = super().raw_shape(segment)
        return bins, frames_of(segment.tokens_in, self.chunk)[-1]

    def nearest_shape(self, segment: Segment, shape: tuple[int, ...]) -> tuple[int, ...]:
        bins, _ = self.raw_shape(segment)
        fitting = frames_of(segment.tokens_in, self.chunk)
        return bins, min(max(shape[1], fitting[0]), fitting[-1])

    def item_size(self, shape: tuple[int, ...]) -> ItemSize:
        tokens = tokens_of(shape[1], self.chunk)
        return ItemSize(tokens, tokens)

    def windows(self, item: Tensor) -> tuple[Tensor, ...]:
        return item.split(self.max_frames, dim=1)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        """Input of the model's own `proj1`; a partial chunk runs next to a full one, so that it is padded."""
        length = item.shape[1]
        if length >= self.chunk:
            return given_to("proj1", model, item, torch.tensor([length], device=item.device))
        filling = item.new_zeros(item.shape[0], self.chunk)
        lengths = torch.tensor([length, self.chunk], device=item.device)
        heard_TD = given_to("proj1", model, torch.cat((item, filling), dim=1), lengths)
        return heard_TD[: tokens_of(length, self.chunk)]

    def first(self) -> StageLayer:
        return ChunkStem(self)

    def block(self, index: int) -> StageLayer:
        layer = omni.Qwen3OmniMoeAudioEncoderLayer(self.config)
        layer.self_attn = ClipAttention(layer.self_attn)
        return ClipBlock(layer, index, self.std)

    def last(self) -> StageLayer:
        return self.projected(nn.LayerNorm(self.config.d_model), "ln_post")


class Qwen3OmniVisionAdapter(Qwen3VisionAdapter):
    """Qwen3-VL's vision tower with other names of its mergers."""

    config_class = omni.Qwen3OmniMoeVisionEncoderConfig
    rotary_class = omni.Qwen3OmniMoeVisionRotaryEmbedding
    patches_class, layer_class = omni.Qwen3OmniMoeVisionPatchEmbed, omni.Qwen3OmniMoeVisionBlock
    merger_class = omni.Qwen3OmniMoeVisionPatchMerger
    mergers, merger_matmuls = "merger_list", ("mlp.0", "mlp.2")
