"""Llama 4's tower: learned and rotary positions, and a class token after the patches."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import (
    Llama4UnfoldConvolution,
    Llama4VisionConfig,
    Llama4VisionEncoderLayer,
    Llama4VisionRotaryEmbedding,
)

from runtime.models.adapter import ONE_ROTATION, Context, MicrobatchData, StageLayer
from runtime.models.encoder import PIXELS, EmbedItems, EncoderBlock, given_to
from runtime.models.initialise import Fill, normal
from runtime.models.llama4 import PatchAttention
from runtime.models.projector import ClassTokens
from runtime.models.vision import VisionAdapter
from workbench.model.model_graph import Module

# Shape suffixes: N = images of L tokens, C = channels, Y, X = height, width of an image, T = packed tokens,
# D = width.


class EmbedLlama4(EmbedItems):
    """Patches, then the class token, learned positions, and a norm."""

    def __init__(self, config: Llama4VisionConfig, num_tokens: int) -> None:
        names = ("patch_embedding", "class_embedding", "positional_embedding_vlm", "layernorm_pre")
        super().__init__({name: name for name in names}, config.initializer_range)
        width = config.hidden_size
        self.patch_embedding = Llama4UnfoldConvolution(config)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding_vlm = nn.Parameter(torch.empty(num_tokens, width))
        self.layernorm_pre = nn.LayerNorm(width)

    def embed(self, pixels_NCYX: Tensor) -> Tensor:
        patches_NLD: Tensor = self.patch_embedding(pixels_NCYX)
        whole_NLD = torch.cat([patches_NLD, self.class_embedding.expand(len(patches_NLD), 1, -1)], dim=1)
        x_NLD: Tensor = self.layernorm_pre(whole_NLD + self.positional_embedding_vlm)
        return x_NLD

    def fill(self, name: str) -> Fill:
        if name in ("class_embedding", "positional_embedding_vlm"):
            return normal(self.class_embedding.shape[0] ** -0.5)
        return super().fill(name)


class Llama4VisionBlock(EncoderBlock):
    """One encoder layer with rotary positions."""

    blocks = "model.layers"

    def __init__(self, config: Llama4VisionConfig, index: int) -> None:
        block = Llama4VisionEncoderLayer(config)
        block.self_attn = PatchAttention(block.self_attn)
        super().__init__(block, index, config.initializer_range)

    def run(self, x_TD: Tensor, context: Context) -> Tensor:
        angles_1TD = context.rotary[ONE_ROTATION]
        y_1TD: Tensor = self.block(x_TD[None], freqs_ci=angles_1TD, attention_mask=context.packing)[0]
        return y_1TD[0]


class Llama4VisionAdapter(VisionAdapter):
    """Images of one size; features are the final norm's output, without the class token.

    Its own adapter, a shuffle and an MLP, are steps of a composite's projector; with another projector they
    are omitted.
    """

    config_class = Llama4VisionConfig
    class_tokens = ClassTokens(behind=1)
    items_key = PIXELS
    undivided = "encoders with rotary positions do not share tokens over ranks"
    ignored = ("vision_adapter.",)

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        with torch.device("cpu"):
            self._turns = Llama4VisionRotaryEmbedding(self.config)

    @property
    def takes_one_size(self) -> bool:
        return True

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        """The context with rotary angles for every image."""
        plain = super().context(data, device, dtype)
        angles_TD = self._turns.freqs_ci[:, 0].repeat(len(data.items), 1)
        return Context(plain.data, plain.packing, {ONE_ROTATION: angles_TD[None].to(device)})

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        return given_to("vision_adapter", model, item[None])[0]

    def first(self) -> StageLayer:
        return EmbedLlama4(self.config, self.native_tokens[0])

    def block(self, index: int) -> StageLayer:
        return Llama4VisionBlock(self.config, index)

    def last(self) -> StageLayer:
        return self.projected(nn.LayerNorm(self.config.hidden_size), "layernorm_post")
