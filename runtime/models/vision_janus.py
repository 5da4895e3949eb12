"""Janus's tower for understanding images."""

from transformers.models.janus import modeling_janus as janus

from runtime.models.adapter import CutKind, StageLayer
from runtime.models.encoder import EncoderBlock
from runtime.models.vision import EmbedPatches, SiglipAdapter


class JanusBlock(EncoderBlock):
    """One encoder layer."""

    cuts = (("block.self_attn.projection_layer", CutKind.ROW),)


class JanusAdapter(SiglipAdapter):
    """Features are the final norm's output, which its own aligner reads in a composite."""

    config_class = janus.JanusVisionConfig
    prefixes = ("", "vision_model.", "model.vision_model.")
    ignored = ()

    @property
    def std(self) -> float:
        return float(self.config.initializer_range)

    def first(self) -> StageLayer:
        return EmbedPatches(janus.JanusVisionEmbeddings(self.config), self.std)

    def block(self, index: int) -> StageLayer:
        return JanusBlock(janus.JanusVisionEncoderLayer(self.config), index, self.std)
