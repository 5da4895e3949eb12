"""VideoLLaMA 3's vision tower: attention over whole images under rotary positions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.video_llama_3 import modeling_video_llama_3 as llama_3

from runtime.models.adapter import Context, StageLayer
from runtime.models.attention import Packing
from runtime.models.encoder import PIXELS
from runtime.models.patch_attention import PatchAttention, PatchBlock
from runtime.models.patch_grid import patches_of
from runtime.models.vision_rotary import GridAdapter

# Shape suffixes: T = packed patches, D = width.


class EmbedVideoLlama(StageLayer):
    """Patches in the order in which they merge."""

    def __init__(self, adapter: "VideoLlamaAdapter") -> None:
        super().__init__({"embeddings": "embeddings"}, adapter.std)
        self.embeddings = llama_3.VideoLlama3VisionEmbeddings(adapter.config)
        self.cut = adapter.cut

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        x_TD: Tensor = self.embeddings(torch.cat([self.cut(image) for image in context.data.raw]))
        return x_TD


class SeenAttention(PatchAttention):
    """As transformers' blocks call it: with nothing beside the output."""

    out = "out_proj"

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Packing, position_embeddings: tuple[Tensor, Tensor]
    ) -> Any:
        return super().forward(hidden_states, cu_seqlens, position_embeddings), None


class VideoLlamaBlock(PatchBlock):
    """One encoder layer on all patches of an image."""

    attention_name, attention_class = "self_attn", SeenAttention


class VideoLlamaAdapter(GridAdapter):
    """Features are the final norm's output, and the mean of squares of it where there are squares."""

    config_class = llama_3.VideoLlama3VisionConfig
    rotary_class = llama_3.VideoLlama3VisionRotaryEmbedding
    items_key = PIXELS
    prefixes: tuple[str, ...] = ("", "vision_model.", "model.vision_model.")

    @property
    def merge(self) -> int:
        return int(getattr(self.config, "spatial_merge_size", 1))

    @property
    def _channels(self) -> int:
        return int(self.config.num_channels)

    def cut(self, image: Tensor) -> Tensor:
        """[T, D] patches of an image, as its processor gives them."""
        return patches_of(image, self.config.patch_size, self.merge, 1)

    def first(self) -> StageLayer:
        return EmbedVideoLlama(self)

    def block(self, index: int) -> StageLayer:
        return VideoLlamaBlock(llama_3.VideoLlama3VisionEncoderLayer(self.config), index, self.std)

    def last(self) -> StageLayer:
        norm = nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)
        return self.projected(norm, "post_layernorm")

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        grid = [1, *(length // self.config.patch_size for length in item.shape[-2:])]
        seen_TD: Tensor = call(self.cut(item), torch.tensor([grid]), torch.tensor([self.merge]))[0]
        return seen_TD
