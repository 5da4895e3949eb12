"""SigLIP 2's tower for images of any size."""

from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2EncoderLayer, Siglip2VisionEmbeddings

from runtime.models.adapter import StageLayer
from runtime.models.vision import EmbedImages, SiglipAdapter, XavierBlock
from workbench.data.sample import Segment

# Shape suffixes: N = images, C = channels, H = height, W = width, T = patches of an image, S = side of the
# table of positions, P = numbers of a patch, D = hidden width.


def flat_patches(pixels_NCHW: Tensor, patch: int) -> Tensor:
    """[N, T, P] patches row by row; in each, rows and columns of pixels, then channels."""
    x = pixels_NCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def between(table_SSD: Tensor, rows: int, columns: int) -> Tensor:
    """[T, D] positions of a grid of patches, from those of a square one, in float32 or wider.

    Differs: transformers rounds float64 to float32, see `WideRMSNorm`.
    """
    wide = table_SSD.to(torch.promote_types(table_SSD.dtype, torch.float32)).permute(2, 0, 1)[None]
    x = functional.interpolate(wide, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
    return x[0].flatten(1).T.to(table_SSD.dtype)


class EmbedAnySize(EmbedImages):
    """A matmul over each patch, and its position between those of the table."""

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        patch, side = self.embeddings.patch_size, self.embeddings.position_embedding_size
        rows, columns = (pixels // patch for pixels in pixels_NCHW.shape[2:])
        table_SSD = self.embeddings.position_embedding.weight.unflatten(0, (side, side))
        x_NTD: Tensor = self.embeddings.patch_embedding(flat_patches(pixels_NCHW, patch))
        return x_NTD + between(table_SSD, rows, columns)


class Siglip2Adapter(SiglipAdapter):
    """SigLIP 2's vision tower; features are its final norm's output. The pooling head is not built."""

    config_class = Siglip2VisionConfig

    @property
    def side(self) -> int:
        return isqrt(self.config.num_patches)

    def sides(self, segment: Segment) -> tuple[int, int]:
        rows, columns = self.grid_of(segment.tokens_in, segment.grid)
        return rows // self.merged_side, columns // self.merged_side

    def first(self) -> StageLayer:
        return EmbedAnySize(Siglip2VisionEmbeddings(self.config), self.std)

    def block(self, index: int) -> StageLayer:
        return XavierBlock(Siglip2EncoderLayer(self.config), index, self.std)

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Any = model
        flat = flat_patches(item[None], self.patch_px)
        grid = torch.tensor([[side // self.patch_px for side in item.shape[1:]]])
        seen_TD: Tensor = call(flat, torch.ones(flat.shape[:2]), grid).last_hidden_state[0]
        return seen_TD
