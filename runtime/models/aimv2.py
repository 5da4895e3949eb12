"""AIMv2's vision towers."""

import torch
from torch import Tensor
from transformers.models.aimv2.modeling_aimv2 import (
    Aimv2EncoderLayer,
    Aimv2RMSNorm,
    Aimv2VisionConfig,
    Aimv2VisionEmbeddings,
)

from runtime.models.adapter import StageLayer
from runtime.models.encoder import EmbedItems, EncoderBlock
from runtime.models.norm import WideRMSNorm, widen_norms
from runtime.models.vision import VisionAdapter
from workbench.data.sample import Segment

# Shape suffixes: N = images, C = channels, H = height, W = width, T = packed tokens, D = hidden width.


class EmbedAimv2(EmbedItems):
    """Patches, a norm and positions: learned ones of one size of image, or waves."""

    def __init__(self, config: Aimv2VisionConfig) -> None:
        super().__init__({"embeddings": "embeddings"}, config.initializer_range)
        self.embeddings = Aimv2VisionEmbeddings(config)
        num_positions = self.embeddings.position_ids.numel()
        with torch.device("cpu"):  # the only buffer; made on the meta device it would hold nothing
            self.embeddings.position_ids = torch.arange(num_positions).expand((1, -1))
        widen_norms(self, Aimv2RMSNorm)

    def embed(self, pixels_NCHW: Tensor) -> Tensor:
        x_NTD: Tensor = self.embeddings(pixels_NCHW)
        return x_NTD


class Aimv2Block(EncoderBlock):
    """One encoder layer."""

    regions = ("attention", "ffn")

    def __init__(self, config: Aimv2VisionConfig, index: int) -> None:
        super().__init__(Aimv2EncoderLayer(config), index, config.initializer_range)
        widen_norms(self, Aimv2RMSNorm)


class Aimv2Adapter(VisionAdapter):
    """Features are the final norm's output. The pooling head is not built."""

    config_class = Aimv2VisionConfig
    ignored = ("head.", "text_model.", "visual_projection.", "text_projection.", "logit_scale")

    def raw_shape(self, segment: Segment) -> tuple[int, ...]:
        shape = super().raw_shape(segment)
        patch, side = self.patch_px, self.side
        if not self.config.is_native and shape[1:] != (side * patch, side * patch):
            raise ValueError(
                f"segment {segment.modality}[{segment.k}]: module {self.module.name!r} has positions of "
                f"{side} x {side} patches, got {shape[1] // patch} x {shape[2] // patch}"
            )
        return shape

    def first(self) -> StageLayer:
        return EmbedAimv2(self.config)

    def block(self, index: int) -> StageLayer:
        return Aimv2Block(self.config, index)

    def last(self) -> StageLayer:
        norm = WideRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        return self.projected(self.config.initializer_range, norm, "rms_norm")
