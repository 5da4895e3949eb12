"""Composites of Liquid AI: SigLIP 2 for images of any size, squares of patches through an MLP, LFM2."""

from workbench.model.composites.composite import (
    PAGE,
    PROJECTOR,
    SIGLIP_HEAD,
    TILES,
    VISION,
    VISION_TOWER,
    Composite,
    Part,
    Parts,
    joined,
    part_config,
    text_config,
    two_linears,
)
from workbench.model.config_fields import Config, flag, text, whole
from workbench.model.families.tiles import LFM2_VL, TILING
from workbench.model.projector import ProjectorStep
from workbench.model.transformer import Norm


def _lfm2_vl(config: Config) -> Parts:
    """A layer norm over squares of patches, where the configuration has one, then an MLP."""
    side = whole(config, "downsample_factor", 2)
    vision = {
        **part_config(config, "vision_config", "siglip2_vision_model"),
        TILING: LFM2_VL,
        "downsample_factor": side,
    }
    has_norm, bias = (
        flag(config, "projector_use_layernorm", default=True),
        flag(config, "projector_bias", default=True),
    )
    norm = (ProjectorStep(norm=Norm.LAYER),) if has_norm else ()
    tower = Part(
        config=vision,
        projector=(
            ProjectorStep(merge=side**2),
            *norm,
            ProjectorStep(linear=whole(config, "projector_hidden_size", 2560), bias=bias),
            ProjectorStep(act=text(config, "projector_hidden_act", "gelu")),
            ProjectorStep(linear_out=True, bias=bias),
        ),
        items=PAGE,
        weights={
            **VISION_TOWER,
            **PROJECTOR,
            **({"projector.1.": "model.multi_modal_projector.layer_norm."} if has_norm else {}),
            **two_linears(1 + has_norm, 3 + has_norm),
        },
    )
    ties = flag(config, "tie_embedding", default=flag(config, "tie_word_embeddings", default=True))
    llm = text_config({**config, "tie_word_embeddings": ties}, "lfm2")
    llm = {key: value for key, value in llm.items() if key != "tie_embedding"}
    return joined(config, {VISION: tower}, llm, dropped=(SIGLIP_HEAD,), notes=(TILES,))


COMPOSITES = (Composite(name="LFM2-VL", model_type="lfm2_vl", take_apart=_lfm2_vl),)
