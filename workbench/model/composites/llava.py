"""LLaVA and its descendants: a ViT's hidden state, an MLP, a language model."""

from workbench.model.composites.composite import (
    DECODER,
    LLM,
    TILES,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    part_config,
    text_config,
    token_id,
    token_ids,
    two_linears,
    whole_or,
)
from workbench.model.config_fields import Config, count, text
from workbench.model.projector import Projector, ProjectorKind, ProjectorStep

_CLIP = "clip_vision_model"
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
    "siglip_vision_model": (
        Dropped(weights="model.vision_tower.post_layernorm.", what="final norm: an earlier state is read"),
        Dropped(weights="model.vision_tower.head.", what="SigLIP's pooling head"),
    ),
}
_NEWLINE = Dropped(weights="model.image_newline", what="learned token at the end of a row of tiles")


def _llava(config: Config) -> Parts:
    return _parts(config, part_config(config, "vision_config", _CLIP, _CLIP_336), "llama", feature_layer=-2)


def _llava_next(config: Config) -> Parts:
    vision = part_config(config, "vision_config", _CLIP, _CLIP_336)
    return _parts(config, vision, "llama", feature_layer=-2, dropped=(_NEWLINE,), notes=(TILES,))


def _llava_onevision(config: Config) -> Parts:
    vision = part_config(config, "vision_config", "siglip_vision_model", _SIGLIP_384)
    return _parts(config, vision, "qwen2", feature_layer=-1, dropped=(_NEWLINE,), notes=(TILES,))


def _parts(
    config: Config,
    vision: Config,
    llm: str,
    *,
    feature_layer: int,
    dropped: tuple[Dropped, ...] = (),
    notes: tuple[str, ...] = (),
) -> Parts:
    kind = str(vision["model_type"])
    layer = whole_or(config, "vision_feature_layer", feature_layer)
    heads, projector = _HEADS.get(kind, ()), _projector(config)
    return Parts(
        modules={
            VISION: Part(config=vision, weights=_names(projector), projector=projector, feature_layer=layer),
            LLM: Part(config=text_config(config, llm, ties=False), weights=DECODER),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_index", "image_token_id")),
        dropped=(*heads, *unread_blocks(vision, layer, "model.vision_tower.encoder.layers"), *dropped),
        notes=notes,
    )


def _names(projector: ProjectorKind) -> dict[str, str]:
    found = {"": "model.vision_tower.", "projector.": "model.multi_modal_projector."}
    return found if isinstance(projector, Projector) else found | two_linears(0, 2)


def unread_blocks(vision: Config, feature_layer: int, names: str) -> tuple[Dropped, ...]:
    """Blocks behind the hidden state that the projector reads."""
    num = count(vision, "num_hidden_layers", 12)
    if not -num - 1 <= feature_layer <= num:
        raise ValueError(f"vision_feature_layer must be from {-num - 1} to {num}, got {feature_layer!r:.60}")
    kept = feature_layer if feature_layer >= 0 else num + 1 + feature_layer
    what = f"block behind hidden state {feature_layer}, which nothing reads"
    return tuple(Dropped(weights=f"{names}.{index}.", what=what) for index in range(kept, num))


def _projector(config: Config) -> ProjectorKind:
    act = text(config, "projector_hidden_act", "gelu")
    bias = bool(config.get("multimodal_projector_bias", True))
    if act == "gelu" and bias:
        return Projector.MLP
    out = ProjectorStep(linear_out=True, bias=bias)
    return out, ProjectorStep(act=act), out


LLAVA = Composite(name="LLaVA", model_type="llava", take_apart=_llava)
LLAVA_NEXT = Composite(name="LLaVA-NeXT", model_type="llava_next", take_apart=_llava_next)
LLAVA_ONEVISION = Composite(name="LLaVA-OneVision", model_type="llava_onevision", take_apart=_llava_onevision)
