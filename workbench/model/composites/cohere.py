"""Composites of Cohere: SigLIP, squares of patches through a gated MLP, a language model of Cohere 2."""

from typing import Any

from workbench.model.composites.composite import (
    KEEPS_ALL,
    SIGLIP_HEAD,
    TILES,
    VISION,
    VISION_TOWER,
    Composite,
    Dropped,
    Part,
    Parts,
    check_selected,
    joined,
    part_config,
    text_config,
    two_linears,
    unread_blocks,
    whole_or,
)
from workbench.model.config_fields import Config, number, whole
from workbench.model.families.tiles import AYA, COMMAND_A, TILING
from workbench.model.projector import GATED, ProjectorStep
from workbench.model.transformer import Norm

_LLM, _SIGLIP = "cohere2", "siglip_vision_model"
_WIDTH = 8192  # default of the language model
_AYA_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 14,
    "vision_use_head": False,
}
_COMMAND_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "image_size": 512,
    "num_hidden_layers": 27,
    "num_attention_heads": 12,
}
_FINAL_NORM = Dropped(
    weights="model.vision_tower.post_layernorm.", what="final norm: an earlier state is read"
)


def _aya(config: Config) -> Parts:
    """A hidden state of SigLIP without its final norm; a layer norm over squares of patches."""
    vision = {**part_config(config, "vision_config", _SIGLIP, _AYA_VISION), TILING: AYA}
    check_selected(config, vision, KEEPS_ALL)
    layer = whole_or(config, "vision_feature_layer", -1)
    llm = _language_model(config)
    inner = whole(config, "alignment_intermediate_size", whole(llm, "hidden_size", _WIDTH))
    tower = Part(
        config=vision,
        projector=(
            _merge(config),
            ProjectorStep(norm=Norm.LAYER, eps=number(config, "adapter_layer_norm_eps", 1e-6)),
            *_gated(config, inner),
        ),
        feature_layer=layer,
        weights={
            **VISION_TOWER,
            "projector.1.": "model.multi_modal_projector.layernorm.",
            **two_linears(2, 4),
        },
    )
    unread = unread_blocks(vision, layer, "model.vision_tower.encoder.layers")
    return joined(config, {VISION: tower}, llm, dropped=(_FINAL_NORM, SIGLIP_HEAD, *unread), notes=(TILES,))


def _command_a(config: Config) -> Parts:
    """SigLIP's output behind its final norm."""
    vision = {**part_config(config, "vision_config", _SIGLIP, _COMMAND_VISION), TILING: COMMAND_A}
    tower = Part(
        config=vision,
        projector=(_merge(config), *_gated(config, whole(config, "alignment_intermediate_size", 36864))),
        weights={**VISION_TOWER, **two_linears(1, 3)},
    )
    return joined(config, {VISION: tower}, _language_model(config), dropped=(SIGLIP_HEAD,), notes=(TILES,))


def _language_model(config: Config) -> dict[str, Any]:
    llm = text_config(config, _LLM, ties=True)
    if llm["model_type"] != _LLM:
        raise ValueError(
            f"{config['model_type']}: text_config.model_type must be {_LLM}, got {llm['model_type']!r}"
        )
    return llm


def _merge(config: Config) -> ProjectorStep:
    return ProjectorStep(merge=whole(config, "downsample_factor", 2) ** 2)


def _gated(config: Config, inner: int) -> tuple[ProjectorStep, ...]:
    """A matmul to `inner`, of which one half gates the other, and one to the language model's width.

    Raises:
        ValueError: an odd width.
    """
    if inner % 2:
        raise ValueError(
            f"{config['model_type']}: alignment_intermediate_size must be even, as one half gates the other, "
            f"got {inner}; nearest: {inner + 1}"
        )
    return ProjectorStep(linear=inner), ProjectorStep(act=GATED), ProjectorStep(linear_out=True)


COMPOSITES = (
    Composite(name="Aya Vision", model_type="aya_vision", take_apart=_aya),
    Composite(name="Command A Vision", model_type="cohere2_vision", take_apart=_command_a),
)
