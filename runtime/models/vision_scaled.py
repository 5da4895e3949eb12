"""Vision encoders with scaled residual branches: DINOv2 and InternViT."""

import inspect
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.dinov2.modeling_dinov2 import (
    Dinov2Config,
    Dinov2Embeddings,
    Dinov2Layer,
    Dinov2LayerScale,
)
from transformers.models.internvl.modeling_internvl import (
    InternVLVisionConfig,
    InternVLVisionEmbeddings,
    InternVLVisionLayer,
    InternVLVisionRMSNorm,
)

from runtime.models.adapter import Context, CutKind, StageLayer
from runtime.models.encoder import EncoderBlock
from runtime.models.initialise import Fill, constant
from runtime.models.norm import widen_norms
from runtime.models.projector import ClassTokens
from runtime.models.vision import EmbedImages, VisionAdapter
from workbench.model.model_graph import Module

# Shape suffixes: N = images, C = channels, H = height, W = width, T = packed tokens, D = hidden width.


class ScaledBlock(EncoderBlock):
    """One encoder layer, whose scales start at the configured value."""

    blocks = "encoder.layer"
    cuts = ((Dinov2LayerScale, CutKind.WHOLE),)

    def __init__(self, block: nn.Module, index: int, std: float, scale: float) -> None:
        super().__init__(block, index, std)
        self.scale = scale

    def fill(self, name: str) -> Fill:
        if "lambda" in name:
            return constant(self.scale)
        return super().fill(name)


class InternVitBlock(ScaledBlock):
    """One encoder layer, called part by part, as transformers' own passes no mask to its attention."""

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        block: Any = self.block
        x_1TD = x_TD[None]
        attended_1TD, _ = block.attention(block.layernorm_before(x_1TD), attention_mask=context.packing)
        x_1TD = x_1TD + block.lambda_1 * attended_1TD
        y_1TD: Tensor = x_1TD + block.lambda_2 * block.mlp(block.layernorm_after(x_1TD))
        return y_1TD[0]


class ScaledVitAdapter(VisionAdapter):
    """Features are patches after the final norm, if there is one; the class token is dropped."""

    class_tokens = ClassTokens(before=1)
    ignored = ("embeddings.mask_token",)
    prefixes = ("", "dinov2.", "vision_tower.", "model.vision_tower.")

    def _final_norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)


class Dinov2Adapter(ScaledVitAdapter):
    """DINOv2. Differs: positions of other sizes are interpolated in float32, as in transformers."""

    config_class = Dinov2Config

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        if "attention_mask" not in inspect.signature(Dinov2Layer.forward).parameters:
            raise ValueError(
                f"module {module.name!r}: DINOv2's layers take no attention mask in transformers "
                f"{transformers.__version__}, so images would see each other; want 5.23 or newer"
            )

    def first(self) -> StageLayer:
        return EmbedImages(Dinov2Embeddings(self.config), self.std)

    def block(self, index: int) -> StageLayer:
        config = self.config
        return ScaledBlock(Dinov2Layer(config), index, config.initializer_range, config.layerscale_value)

    def last(self) -> StageLayer:
        return self.projected(self._final_norm(), "layernorm")


class InternVitAdapter(ScaledVitAdapter):
    """InternVL's vision tower. Its pixel shuffle is a step of the projector in its configuration."""

    config_class = InternVLVisionConfig

    def first(self) -> StageLayer:
        return EmbedImages(InternVLVisionEmbeddings(self.config), self.std)

    def block(self, index: int) -> StageLayer:
        config = self.config
        block = InternVLVisionLayer(config)
        layer = InternVitBlock(block, index, config.initializer_range, config.layer_scale_init_value)
        widen_norms(layer, InternVLVisionRMSNorm)
        return layer

    def last(self) -> StageLayer:
        return self.projected(None if self.config.use_mean_pooling else self._final_norm(), "layernorm")
