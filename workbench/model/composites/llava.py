"""Composites of the LLaVA family: an image encoder, an MLP and a language model; larger images in tiles."""

from typing import Any

from workbench.model.composites.composite import (
    DROPS_FIRST,
    KEEPS_ALL,
    PACKED,
    PROJECTOR,
    SIGLIP_HEAD,
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
from workbench.model.config_fields import Config, flag, text, whole
from workbench.model.families.tiles import GRIDS, NEWLINE, USUAL_PX
from workbench.model.projector import Projector, ProjectorKind, ProjectorStep

_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"
_CLIP_336 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
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
    _CLIP: (Dropped(weights="model.vision_tower.post_layernorm.", what="norm of CLIP's pooled output"),),
    _SIGLIP: (
        Dropped(weights="model.vision_tower.post_layernorm.", what="final norm: an earlier state is read"),
        SIGLIP_HEAD,
    ),
}


def _llava(config: Config) -> Parts:
    vision = part_config(config, "vision_config", _CLIP, _CLIP_336)
    check_selected(config, vision, DROPS_FIRST)
    return _llava_parts(config, vision, "llama", feature_layer=-2)


def _llava_next(config: Config) -> Parts:
    vision = _tiled(config, part_config(config, "vision_config", _CLIP, _CLIP_336), {})
    check_selected(config, vision, DROPS_FIRST)
    return _llava_parts(config, vision, "llama", feature_layer=-2, notes=(PACKED,))


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
    feature_layer: int,
    notes: tuple[str, ...] = (),
) -> Parts:
    kind = str(vision["model_type"])
    layer = whole_or(config, "vision_feature_layer", feature_layer)
    heads, projector = _HEADS.get(kind, ()), _projector(config)
    names, items = _names(projector), dict[str, Any]()
    if NEWLINE in vision:
        names = names | {NEWLINE: f"model.{NEWLINE}"}
        usual, grids = [_USUAL_TILES * whole(vision, "image_size", USUAL_PX)] * 2, vision.get(GRIDS)
        if grids is None or (isinstance(grids, list | tuple) and usual in grids):
            items = {"images": [usual]}
    part = Part(config=vision, weights=names, items=items, projector=projector, feature_layer=layer)
    unread = unread_blocks(vision, layer, "model.vision_tower.encoder.layers")
    inner = text_config(config, llm, ties=False)
    return joined(config, {VISION: part}, inner, dropped=(*heads, *unread), notes=notes)


def _names(projector: ProjectorKind) -> dict[str, str]:
    found = VISION_TOWER | PROJECTOR
    return found if isinstance(projector, Projector) else found | two_linears(0, 2)


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
    Composite(name="LLaVA-OneVision", model_type="llava_onevision", take_apart=_llava_onevision),
)
