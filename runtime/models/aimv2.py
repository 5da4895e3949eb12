"""AIMv2's vision towers."""

from transformers.models.aimv2.modeling_aimv2 import (
    Aimv2EncoderLayer,
    Aimv2RMSNorm,
    Aimv2VisionConfig,
    Aimv2VisionEmbeddings,
)

from runtime.models.adapter import StageLayer
from runtime.models.encoder import EncoderBlock
from runtime.models.norm import WideRMSNorm, widen_norms
from runtime.models.vision import EmbedImages, VisionAdapter

# Shape suffixes: N = images, C = channels, H = height, W = width, T = packed tokens, D = hidden width.


class EmbedAimv2(EmbedImages):
    """Patches with a norm, and learned positions for one image size, or sinusoidal ones."""

    def __init__(self, config: Aimv2VisionConfig) -> None:
        super().__init__(Aimv2VisionEmbeddings(config), config.initializer_range)
        widen_norms(self, Aimv2RMSNorm)


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

    @property
    def takes_one_size(self) -> bool:
        return not self.config.is_native

    def first(self) -> StageLayer:
        return EmbedAimv2(self.config)

    def block(self, index: int) -> StageLayer:
        return Aimv2Block(self.config, index)

    def last(self) -> StageLayer:
        norm = WideRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        return self.projected(norm, "rms_norm")
