"""PaddleOCR-VL's vision tower: VideoLLaMA 3's, with positions interpolated from a table besides."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddleocr
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from runtime.models.adapter import Context, StageLayer
from runtime.models.vision_kimi import cut
from runtime.models.vision_video_llama import VideoLlamaAdapter, VideoLlamaBlock

# Shape suffixes: T = packed patches, D = width, C = channels, P = pixels of a patch's side, N = rows of the
# table around a patch.


class EmbedPaddle(StageLayer):
    """Patches row by row, and positions between those of a square table, bilinear."""

    def __init__(self, adapter: "PaddleOcrAdapter") -> None:
        names = ("patch_embedding", "position_embedding")
        super().__init__({name: f"embeddings.{name}" for name in names}, adapter.std)
        config = adapter.config
        self.patch, self.side = config.patch_size, config.image_size // config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, self.patch, self.patch)
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        del hidden_TD, features
        patches_TCPP = torch.cat([cut(image, self.patch) for image in context.data.raw])
        x_TD: Tensor = self.patch_embedding(patches_TCPP).flatten(1)
        return x_TD + self._positions(context.data.raw).to(x_TD.dtype)

    def _positions(self, images: tuple[Tensor, ...]) -> Tensor:
        """[T, D] positions in float32 or wider; sums in one pass, so that no [T, N, D] are kept."""
        table = self.position_embedding.weight
        grids = [[1, *(length // self.patch for length in image.shape[-2:])] for image in images]
        index_TN, share_TN = get_vision_interpolation_indices_and_weights(
            torch.tensor(grids, device=table.device), self.side
        )
        wide = table.to(torch.promote_types(table.dtype, torch.float32))
        y_TD: Tensor = functional.embedding_bag(
            index_TN, wide, per_sample_weights=share_TN.to(wide.dtype), mode="sum"
        )
        return y_TD


class PaddleOcrAdapter(VideoLlamaAdapter):
    """Features are the final norm's output, patch by patch; squares of them merge in the projector."""

    config_class = paddleocr.PaddleOCRVisionConfig
    rotary_class = paddleocr.PaddleOCRVisionRotaryEmbedding
    rotary_name = "encoder.rotary_pos_emb"
    prefixes = ("", "vision_model.", "visual.vision_model.", "model.visual.vision_model.")
    ignored = ("head.", "embeddings.packing_position_embedding.")

    @property
    def std(self) -> float:
        return float(self.config.hidden_size**-0.5)

    @property
    def merge(self) -> int:
        return 1

    def first(self) -> StageLayer:
        return EmbedPaddle(self)

    def block(self, index: int) -> StageLayer:
        return VideoLlamaBlock(paddleocr.PaddleOCRVisionEncoderLayer(self.config), index, self.std)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        patch = self.config.patch_size
        grid = torch.tensor([[1, *(length // patch for length in item.shape[-2:])]])
        seen_TD: Tensor = call(cut(item, patch)[None], grid_thw=grid).last_hidden_state
        return seen_TD
