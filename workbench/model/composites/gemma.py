"""Gemma 3 and PaliGemma: SigLIP in front of Gemma."""

from math import isqrt

from workbench.model.composites.composite import (
    DECODER,
    LLM,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    part_config,
    text_config,
    token_id,
    token_ids,
)
from workbench.model.config_fields import Config, number, whole
from workbench.model.projector import Merge, Projector, ProjectorStep
from workbench.model.transformer import Norm

_SIGLIP = "siglip_vision_model"
_HEAD = Dropped(weights="model.vision_tower.head.", what="SigLIP's pooling head")


def _gemma3(config: Config) -> Parts:
    """Means over squares of patches, an RMS norm, a matmul without bias."""
    vision = part_config(config, "vision_config", _SIGLIP)
    side = whole(vision, "image_size", 224) // whole(vision, "patch_size", 16)
    tokens = whole(config, "mm_tokens_per_image", 256)
    if isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
        raise ValueError(
            f"gemma3: mm_tokens_per_image must be a square whose side divides the {side} patches of a row, "
            f"got {tokens}; nearest: {side**2}"
        )
    projector = (
        ProjectorStep(merge=(side // isqrt(tokens)) ** 2, how=Merge.MEAN),
        ProjectorStep(norm=Norm.RMS, eps=number(vision, "layer_norm_eps", 1e-6), offset=1.0),
        ProjectorStep(linear_out=True, bias=False),
    )
    return Parts(
        modules={
            VISION: Part(
                config=vision,
                projector=projector,
                weights={
                    "": "model.vision_tower.",
                    "projector.1.": "model.multi_modal_projector.mm_soft_emb_norm.",
                    "projector.2.weight": "model.multi_modal_projector.mm_input_projection_weight",
                },
                transposed=("projector.2.weight",),
            ),
            LLM: Part(config=text_config(config, "gemma3_text", ties=True), weights=DECODER),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_index", "image_token_id")),
        dropped=(_HEAD,),
    )


def _paligemma(config: Config) -> Parts:
    vision = part_config(config, "vision_config", _SIGLIP, _PALIGEMMA_VISION)
    return Parts(
        modules={
            VISION: Part(
                config=vision,
                projector=Projector.LINEAR,
                weights={"": "model.vision_tower.", "projector.": "model.multi_modal_projector."},
            ),
            LLM: Part(
                config=text_config(config, "gemma", absent=_PALIGEMMA_TEXT, ties=True), weights=DECODER
            ),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_index", "image_token_id")),
        dropped=(_HEAD,),
        notes=("the prompt is read in both directions: give a mask for it",),
    )


_PALIGEMMA_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "vision_use_head": False,
}
_PALIGEMMA_TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257152,
}
GEMMA3 = Composite(name="Gemma 3 with images", model_type="gemma3", take_apart=_gemma3)
PALIGEMMA = Composite(name="PaliGemma", model_type="paligemma", take_apart=_paligemma)
