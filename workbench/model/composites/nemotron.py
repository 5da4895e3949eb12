"""Nemotron 3 Nano Omni: RADIO and Parakeet, each through an MLP, and Nemotron-H."""

from typing import Any

from workbench.model.composites.composite import (
    AUDIO,
    CLIP,
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
from workbench.model.config_fields import Config, flag, number, whole, whole_or_zero
from workbench.model.projector import ProjectorStep, Steps
from workbench.model.transformer import Norm

_TOWER = "vision_model."
_OF_PROJECTOR = ("projection_hidden_size", "projection_bias")
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
    vision = typed_config(config, "vision_config", "radio")
    llm = part_config(config, "text_config", "nemotron_h")
    _check(config, vision)
    tail = (
        ProjectorStep(merge=_SIDE**2),
        *_mlp(whole(config, "projector_hidden_size", 4096), bias=False),
    )
    first: Steps = ()
    weights = {"": _TOWER}
    if whole_or_zero(llm, "num_nextn_predict_layers", 0):
        first = (ProjectorStep(norm=Norm.LAYER, eps=number(vision, "layer_norm_eps", 1e-6)),)
        weights["projector.0."] = "vision_final_layernorm."
    weights |= _names(len(first) + 1, "multi_modal_projector.")
    encoders = {VISION: Part(config=vision, projector=(*first, *tail), items=PAGE, weights=weights)}
    if config.get("audio_config") is not None:
        encoders[AUDIO] = _heard(config)
    return joined(config, encoders, llm, weights=_DECODER, dropped=(_VIDEOS,))


def _heard(config: Config) -> Part:
    """Parakeet without biases, where the configuration does not say, behind an MLP of the same kind."""
    given = typed_config(config, "audio_config", "parakeet_encoder")
    heard = {"attention_bias": False, "scale_input": False, **given}
    inner, bias = whole(heard, "projection_hidden_size"), flag(heard, "projection_bias")
    return Part(
        config={key: value for key, value in heard.items() if key not in _OF_PROJECTOR},
        projector=_mlp(inner, bias=bias),
        items=CLIP,
        weights={"": "audio_tower.", **_names(0, "embed_audio.")},
    )


def _mlp(inner: int, *, bias: bool) -> Steps:
    return (
        ProjectorStep(norm=Norm.RMS),
        ProjectorStep(linear=inner, bias=bias),
        ProjectorStep(act="relu2"),
        ProjectorStep(linear_out=True, bias=bias),
    )


def _names(first: int, projector: str) -> dict[str, str]:
    """Prefixes of an MLP's weights, whose norm is this step."""
    parts = {first: "layer_norm.", first + 1: "linear_1.", first + 3: "linear_2."}
    return {f"projector.{step}.": projector + name for step, name in parts.items()}


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
