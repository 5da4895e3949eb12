"""Models of images of any size: Qwen2-VL, Qwen2.5-VL and Mistral 3."""

from typing import Any

from workbench.model.composites.composite import (
    DECODER,
    LLM,
    VISION,
    Composite,
    Part,
    Parts,
    part_config,
    text_config,
    token_id,
    token_ids,
    two_linears,
    whole_or,
)
from workbench.model.config_fields import Config, number, text, whole
from workbench.model.projector import Merge, ProjectorStep
from workbench.model.transformer import Norm

PAGE_PX = [448, 448]  # an item where a job says nothing; these models have no size of their own
_NOT_TEXT = ("vision_config", "text_config", "audio_config", "model_type", "architectures")


def _qwen2_vl(config: Config) -> Parts:
    return _qwen(config, "qwen2_vl_vision", "qwen2_vl_text", emitted="hidden_size")


def _qwen2_5_vl(config: Config) -> Parts:
    return _qwen(config, "qwen2_5_vl_vision", "qwen2_5_vl_text", emitted="out_hidden_size")


def _qwen(config: Config, vision: str, llm: str, *, emitted: str) -> Parts:
    """Older files have the language model's keys at the top.

    Args:
        emitted: key of the vision tower's configuration that holds the width its merger gives.
    """
    inner = text_config(config, llm, ties=False)
    if config.get("text_config") is None:
        top = {key: value for key, value in config.items() if key not in _NOT_TEXT}
        inner = {**top, **inner}
    seen: dict[str, Any] = {**part_config(config, "vision_config", vision), "model_type": vision}
    check_width(config, seen, emitted, inner, 8192)
    return Parts(
        modules={
            VISION: Part(config=seen, weights={"": "model.visual."}, items={"images": [PAGE_PX]}),
            LLM: Part(config={**inner, "model_type": llm}, weights=DECODER),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_id")),
    )


def check_width(
    config: Config, tower: Config, key: str, llm: Config, usual: int, *, where: str = "vision_config"
) -> None:
    """ValueError unless a tower emits the width of the LLM, which is `usual` where it does not say."""
    width, given = whole(llm, "hidden_size", usual), whole(tower, key, 3584)
    if width != given:
        raise ValueError(
            f"{config['model_type']}: {where}.{key} must be the LLM's hidden_size {width}, got {given}; "
            f"nearest: {width}"
        )


def _mistral3(config: Config) -> Parts:
    """A norm, squares of patches merged back to the encoder's width, an MLP."""
    vision = part_config(config, "vision_config", "pixtral", _PIXTRAL)
    if whole_or(config, "vision_feature_layer", -1) != -1:
        raise ValueError(
            f"mistral3: vision_feature_layer must be -1, got {config['vision_feature_layer']}; nearest: -1"
        )
    llm = text_config(config, "mistral", absent=_MISTRAL_SMALL, ties=True)
    bias = bool(config.get("multimodal_projector_bias", False))
    out = ProjectorStep(linear_out=True, bias=bias)
    projector = (
        ProjectorStep(norm=Norm.RMS, eps=number(llm, "rms_norm_eps", 1e-6)),
        ProjectorStep(merge=whole(config, "spatial_merge_size", 2) ** 2, how=Merge.INTERLEAVE),
        ProjectorStep(linear=whole(vision, "hidden_size", 1024), bias=False),
        out,
        ProjectorStep(act=text(config, "projector_hidden_act", "gelu")),
        out,
    )
    return Parts(
        modules={
            VISION: Part(
                config=vision,
                projector=projector,
                items={"images": [PAGE_PX]},
                weights={
                    "": "model.vision_tower.",
                    "projector.0.": "model.multi_modal_projector.norm.",
                    "projector.2.": "model.multi_modal_projector.patch_merger.merging_layer.",
                    **two_linears(3, 5),
                },
            ),
            LLM: Part(config=llm, weights=DECODER),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_index", "image_token_id")),
    )


_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1540,
    "patch_size": 14,
}
_MISTRAL_SMALL = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
}
QWEN2_VL = Composite(name="Qwen2-VL", model_type="qwen2_vl", take_apart=_qwen2_vl)
QWEN2_5_VL = Composite(name="Qwen2.5-VL", model_type="qwen2_5_vl", take_apart=_qwen2_5_vl)
MISTRAL3 = Composite(name="Mistral 3 with images", model_type="mistral3", take_apart=_mistral3)
