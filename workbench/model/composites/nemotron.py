"""Nemotron 3 Nano Omni: RADIO, squares of patches through an MLP, and Nemotron-H."""

from typing import Any

from workbench.model.composites.composite import (
    PAGE,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    joined,
    part_config,
    typed_config,
)
from workbench.model.config_fields import Config, number, whole, whole_or_zero
from workbench.model.projector import ProjectorStep, Steps
from workbench.model.transformer import Norm

_TOWER, _PROJECTOR = "vision_model.", "multi_modal_projector."
_SIDE = 2  # of the squares of patches that become one token
_EARLIER = {  # names in released checkpoints -> those of transformers, and their defaults
    "img_context_token_id": ("image_token_id", None),
    "sound_context_token_id": ("audio_token_id", None),
    "llm_config": ("text_config", None),
    "sound_config": ("audio_config", None),
    "vit_hidden_size": ("vision_hidden_size", 1280),
}
_VIDEOS = Dropped(
    weights=f"{_TOWER}embeddings.video_patch_projection.", what="patches of videos, which are not read"
)


def _omni(config: Config) -> Parts:
    """Squares of patches side by side, an RMS norm, an MLP without biases."""
    config = _renamed(config)
    if config.get("audio_config") is not None:
        raise ValueError(
            "nemotron_h_omni: audio_config must be null, as its audio tower (parakeet_encoder) is not "
            "supported; set it, or sound_config, to null to plan images and text without it"
        )
    vision = typed_config(config, "vision_config", "radio")
    llm = part_config(config, "text_config", "nemotron_h")
    _check(config, vision)
    inner = ProjectorStep(linear=whole(config, "projector_hidden_size", 4096), bias=False)
    tail = (
        ProjectorStep(merge=_SIDE**2),
        ProjectorStep(norm=Norm.RMS),
        inner,
        ProjectorStep(act="relu2"),
        ProjectorStep(linear_out=True, bias=False),
    )
    first: Steps = ()
    weights = {"": _TOWER}
    if whole_or_zero(llm, "num_nextn_predict_layers", 0):
        first = (ProjectorStep(norm=Norm.LAYER, eps=number(vision, "layer_norm_eps", 1e-6)),)
        weights["projector.0."] = "vision_final_layernorm."
    at = len(first)
    weights |= {
        f"projector.{at + 1}.": f"{_PROJECTOR}layer_norm.",
        f"projector.{at + 2}.": f"{_PROJECTOR}linear_1.",
        f"projector.{at + 4}.": f"{_PROJECTOR}linear_2.",
    }
    tower = Part(config=vision, projector=(*first, *tail), items=PAGE, weights=weights)
    return joined(config, {VISION: tower}, llm, weights=_DECODER, dropped=(_VIDEOS,))


_DECODER = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


def _renamed(config: Config) -> dict[str, Any]:
    """With transformers' names of keys; what is not the default counts before a value by an earlier name."""
    named = dict(config)
    for earlier, (name, usual) in _EARLIER.items():
        value = named.pop(earlier, None)
        if value is not None and named.get(name) in (None, usual):
            named[name] = value
    return named


def _check(config: Config, vision: Config) -> None:
    """Raise ValueError for squares that transformers does not merge, and features of another width."""
    ratio = config.get("downsample_ratio")
    if ratio not in (None, 1 / _SIDE):
        raise ValueError(f"nemotron_h_omni: downsample_ratio must be {1 / _SIDE}, got {ratio!r}")
    width = whole(vision, "hidden_size", 1280)
    given = whole(config, "vision_hidden_size", 1280)
    if width != given:
        raise ValueError(
            f"nemotron_h_omni: vision_hidden_size must be the tower's hidden_size {width}, got {given}; "
            f"nearest: {width}"
        )


COMPOSITES = (Composite(name="Nemotron 3 Nano Omni", model_type="nemotron_h_omni", take_apart=_omni),)
