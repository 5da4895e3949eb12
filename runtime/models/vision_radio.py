"""RADIO's vision tower: DINOv2's blocks behind several class tokens, for images of any size."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.models.radio.modeling_radio import (
    RadioConfig,
    RadioLayer,
    RadioLayerScale,
    RadioPatchEmbeddings,
)

from runtime.models.adapter import CutKind, StageLayer
from runtime.models.projector import ClassTokens
from runtime.models.vision import EmbedImages, VisionAdapter
from runtime.models.vision_scaled import ScaledBlock
from workbench.model.model_graph import Module

# Shape suffixes: N = images, C = channels, H = height, W = width, T = patches of an image, S = side of the
# table of positions, D = hidden width.

VIDEO = "video_temporal_patch_size"


def cropped(table_SSD: Tensor, rows: int, columns: int) -> Tensor:
    """[T, D] positions of a grid of patches: those of the square around it, interpolated, and cut.

    Differs: transformers interpolates float64 in float32.
    """
    wide = table_SSD.to(torch.promote_types(table_SSD.dtype, torch.float32)).permute(2, 0, 1)[None]
    square = functional.interpolate(wide, (max(rows, columns),) * 2, mode="bilinear", align_corners=False)
    return square[0, :, :rows, :columns].flatten(1).T.to(table_SSD.dtype)


class EmbedRadio(EmbedImages):
    """A product with each patch, and its position, behind the class tokens."""

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        net = self.embeddings
        rows, columns = (pixels // net.patch_size for pixels in pixels_NCHW.shape[2:])
        table_SSD = net.position_embedding[0].unflatten(0, (net.max_rows, net.max_cols))
        x_NTD = net.patch_projection(net._image_to_patches(pixels_NCHW)) + cropped(table_SSD, rows, columns)
        return torch.cat((net.cls_register_token.expand(len(x_NTD), -1, -1), x_NTD), dim=1)


class RadioBlock(ScaledBlock):
    """One encoder layer."""

    cuts = ((RadioLayerScale, CutKind.WHOLE),)


class RadioAdapter(VisionAdapter):
    """Features are the patches of the last block. Images are normalised before, steps of videos not read."""

    config_class = RadioConfig
    prefixes = ("", "vision_model.")
    ignored = ("input_conditioner.", "summary_idxs", "embeddings.video_patch_projection.")

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.class_tokens = ClassTokens(before=self.config.num_summary_tokens)

    def configured(self, fields: dict[str, Any]) -> PretrainedConfig:
        """Without the projection of videos."""
        return super().configured(fields | {VIDEO: None})

    @property
    def neutral_buffers(self) -> Mapping[str, float]:
        return {"input_conditioner.norm_mean": 0.0, "input_conditioner.norm_std": 1.0}

    def first(self) -> StageLayer:
        return EmbedRadio(RadioPatchEmbeddings(self.config), self.std)

    def block(self, index: int) -> StageLayer:
        return RadioBlock(RadioLayer(self.config), index, self.std, self.config.layerscale_value)

    def last(self) -> StageLayer:
        return self.projected()

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = model
        patches_TD: Tensor = call(item[None]).features[0]
        return patches_TD
