"""Composites of the LLaVA family: an image encoder, an MLP and a language model; larger images in tiles."""

from dataclasses import replace
from typing import Any

from workbench.model.composites.composite import (
    DROPS_FIRST,
    KEEPS_ALL,
    PACKED,
    PROJECTOR,
    SIGLIP_HEAD,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    check_selected,
    feature_layers,
    joined,
    part_config,
    text_config,
    two_linears,
    unread_blocks,
)
from workbench.model.config_fields import Config, flag, number, text, whole
from workbench.model.families.tiles import GRIDS, NEWLINE, USUAL_PX
from workbench.model.feature_layers import FeatureLayers
from workbench.model.projector import Projector, ProjectorKind, ProjectorStep
from workbench.model.transformer import Norm

_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"
_CLIP_336 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_VIDEO_LLAVA = {**_CLIP_336, "image_size": 224}
_SIGLIP_384 = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
_HEADS = {  # of encoders, that no projector reads
    _CLIP: {"post_layernorm.": "norm of CLIP's pooled output"},
    _SIGLIP: {
        "post_layernorm.": "final norm: an earlier state is read",
        "head.": SIGLIP_HEAD.what,
    },
}


def _llava(config: Config) -> Parts:
    vision = part_config(config, "vision_config", _CLIP, _CLIP_336)
    check_selected(config, vision, DROPS_FIRST)
    return _llava_parts(config, vision, "llama", feature_layer=-2)


def _llava_next(config: Config) -> Parts:
    vision = _tiled(config, part_config(config, "vision_config", _CLIP, _CLIP_336), {})
    check_selected(config, vision, DROPS_FIRST)
    return _llava_parts(config, vision, "llama", feature_layer=-2, notes=(PACKED,))


def _llava_next_video(config: Config) -> Parts:
    """LLaVA-NeXT's images; what pools videos has weights where it is a convolution."""
    parts = _llava_next(config)
    if text(config, "spatial_pool_mode", "average") != "conv":
        return parts
    pool = Dropped(weights="model.vision_resampler.", what="convolution over videos, which are not planned")
    return replace(parts, dropped=(*parts.dropped, pool))


def _video_llava(config: Config) -> Parts:
    """LLaVA's images, before a tower of their own."""
    vision = part_config(config, "vision_config", _CLIP, _VIDEO_LLAVA)
    check_selected(config, vision, DROPS_FIRST)
    parts = _llava_parts(config, vision, "llama", feature_layer=-2, tower="model.image_tower.")
    videos = Dropped(weights="model.video_tower.", what="tower of videos, which are not planned")
    return replace(parts, dropped=(*parts.dropped, videos))


def _vipllava(config: Config) -> Parts:
    """LLaVA's, with a norm of several states side by side; the class token is always dropped."""
    vision = part_config(config, "vision_config", _CLIP, _CLIP_336)
    check_selected(config, vision, DROPS_FIRST)
    parts = _llava_parts(config, vision, "llama", feature_layer=_VIP_STATES)
    tower = parts.modules[VISION]
    out = ProjectorStep(linear_out=True)
    steps = (
        ProjectorStep(norm=Norm.LAYER, eps=number(config, "projector_layernorm_eps", 1e-5)),
        out,
        ProjectorStep(act=text(config, "projector_hidden_act", "gelu")),
        out,
    )
    names = {"": "model.vision_tower.", "projector.0.": "model.multi_modal_projector.projector_layernorm."}
    seen = replace(tower, projector=steps, weights={**names, **two_linears(1, 3)})
    return replace(parts, modules={**parts.modules, VISION: seen})


_VIP_STATES = (-2, -5, -8, -11, 6)


def _llava_onevision(config: Config) -> Parts:
    vision = _tiled(config, part_config(config, "vision_config", _SIGLIP, _SIGLIP_384), _ONEVISION)
    check_selected(config, vision, KEEPS_ALL)
    return _llava_parts(config, vision, "qwen2", feature_layer=-1, notes=(PACKED,))


_USUAL_TILES = 2  # along a side of an image, where a job says nothing
_ONEVISION = {
    "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
    "vision_aspect_ratio": "anyres_max_9",
}


def _tiled(config: Config, vision: Config, absent: Config) -> dict[str, Any]:
    """The encoder's configuration with what the composite's says of tiles.

    Args:
        absent: what it means where it says nothing.
    """
    said = {key: config[key] for key in (GRIDS, *absent) if config.get(key) is not None}
    return {**vision, **absent, **said, NEWLINE: True}


def _llava_parts(
    config: Config,
    vision: Config,
    llm: str,
    *,
    feature_layer: FeatureLayers,
    tower: str = "model.vision_tower.",
    notes: tuple[str, ...] = (),
) -> Parts:
    """An encoder, an MLP and a language model.

    Args:
        llm: its model_type, and feature_layer: which state is read, where the configuration does not say.
        tower: prefix of the encoder's weights.
    """
    layer = feature_layers(config, feature_layer)
    heads = _HEADS.get(str(vision["model_type"]), {})
    dropped = (Dropped(weights=tower + name, what=what) for name, what in heads.items())
    projector = _projector(config)
    names, items = {"": tower} | _names(projector), dict[str, Any]()
    if NEWLINE in vision:
        names = names | {NEWLINE: f"model.{NEWLINE}"}
        usual, grids = [_USUAL_TILES * whole(vision, "image_size", USUAL_PX)] * 2, vision.get(GRIDS)
        if grids is None or (isinstance(grids, list | tuple) and usual in grids):
            items = {"images": [usual]}
    part = Part(config=vision, weights=names, items=items, projector=projector, feature_layer=layer)
    unread = unread_blocks(vision, layer, f"{tower}encoder.layers")
    inner = text_config(config, llm, ties=False)
    return joined(config, {VISION: part}, inner, dropped=(*dropped, *unread), notes=notes)


def _names(projector: ProjectorKind) -> dict[str, str]:
    return PROJECTOR if isinstance(projector, Projector) else two_linears(0, 2)


def _projector(config: Config) -> ProjectorKind:
    act = text(config, "projector_hidden_act", "gelu")
    bias = flag(config, "multimodal_projector_bias", default=True)
    if act == "gelu" and bias:
        return Projector.MLP
    out = ProjectorStep(linear_out=True, bias=bias)
    return out, ProjectorStep(act=act), out


COMPOSITES = (
    Composite(name="LLaVA", model_type="llava", take_apart=_llava),
    Composite(name="LLaVA-NeXT", model_type="llava_next", take_apart=_llava_next),
    Composite(name="LLaVA-NeXT-Video", model_type="llava_next_video", take_apart=_llava_next_video),
    Composite(name="Video-LLaVA", model_type="video_llava", take_apart=_video_llava),
    Composite(name="ViP-LLaVA", model_type="vipllava", take_apart=_vipllava),
    Composite(name="LLaVA-OneVision", model_type="llava_onevision", take_apart=_llava_onevision),
)
