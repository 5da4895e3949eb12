"""AIMv2's vision towers, and that of Ovis 2."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.models.aimv2 import modeling_aimv2 as aimv2
from transformers.models.ovis2 import modeling_ovis2 as ovis2

from runtime.models.adapter import StageLayer
from runtime.models.encoder import PIXELS, EncoderBlock
from runtime.models.norm import WideRMSNorm, widen_norms
from runtime.models.vision import EmbedImages, VisionAdapter

# Shape suffixes: T = packed tokens, D = hidden width.


class Aimv2Block(EncoderBlock):
    """One encoder layer."""

    regions = ("attention", "ffn")


class Aimv2Adapter(VisionAdapter):
    """Features are the final norm's output. The pooling head is not built.

    Patches have a norm, and learned positions for one image size, or sinusoidal ones.
    """

    config_class: type[PretrainedConfig] = aimv2.Aimv2VisionConfig
    ignored: tuple[str, ...] = (
        "head.",
        "text_model.",
        "visual_projection.",
        "text_projection.",
        "logit_scale",
    )
    embeddings_class: ClassVar[type[nn.Module]] = aimv2.Aimv2VisionEmbeddings
    layer_class: ClassVar[type[nn.Module]] = aimv2.Aimv2EncoderLayer
    norm_class: ClassVar[type[nn.Module]] = aimv2.Aimv2RMSNorm

    @property
    def takes_one_size(self) -> bool:
        return not self.config.is_native

    def first(self) -> StageLayer:
        embed = EmbedImages(self.embeddings_class(self.config), self.config.initializer_range)
        widen_norms(embed, self.norm_class)
        return embed

    def block(self, index: int) -> StageLayer:
        block = Aimv2Block(self.layer_class(self.config), index, self.config.initializer_range)
        widen_norms(block, self.norm_class)
        return block

    def last(self) -> StageLayer:
        norm = WideRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        return self.projected(norm, "rms_norm")


class Ovis2Adapter(Aimv2Adapter):
    """Ovis 2's: positions of one image size. Its head makes shares of a vocabulary: steps of a projector."""

    config_class = ovis2.Ovis2VisionConfig
    items_key = PIXELS
    prefixes = ("", "transformer.", "vision_tower.transformer.", "model.vision_tower.transformer.")
    ignored = ("head_linear.", "head_norm.")
    embeddings_class, layer_class = ovis2.Ovis2VisionEmbeddings, ovis2.Ovis2VisionEncoderLayer
    norm_class = ovis2.Ovis2RMSNorm

    @property
    def takes_one_size(self) -> bool:
        return True

    def features(self, model: PreTrainedModel, item: Tensor) -> Tensor:
        call: Callable[..., Any] = getattr(model, "transformer", model)  # before its head, if it has one
        states_TD: Tensor = call(item[None]).last_hidden_state[0]
        return states_TD
