"""Composites with InternViT: InternVL and Qianfan-OCR."""

from dataclasses import replace

from workbench.model.composites.composite import (
    DROPS_FIRST,
    TILES,
    VISION,
    VISION_TOWER,
    Composite,
    Dropped,
    Part,
    Parts,
    check_selected,
    joined,
    mlp_steps,
    part_config,
    text_config,
    two_linears,
    typed_config,
    unread_blocks,
    whole_or,
)
from workbench.model.config_fields import Config, text
from workbench.model.projector import ProjectorStep
from workbench.model.transformer import Norm

_INTERNVIT, _BLOCKS, _VIT = "internvl_vision", "encoder.layer", VISION_TOWER[""]
_SKIPS = "blocks of the tower are never skipped at random: its drop_path_rate counts as 0"


def _internvl(config: Config) -> Parts:
    llm = text_config(config, "qwen2", ties=True)
    return _internvit(config, part_config(config, "vision_config", _INTERNVIT), llm)


def _qianfan_ocr(config: Config) -> Parts:
    """InternVL's, with a list of blocks in the tower itself, before Qwen3."""
    seen = {"attention_bias": True, **typed_config(config, "vision_config", _INTERNVIT)}
    skipped = seen.pop("drop_path_rate", None)
    parts = _internvit(config, seen, text_config(config, "qwen3", ties=False), blocks="layers")
    return parts if skipped == 0 else replace(parts, notes=(*parts.notes, _SKIPS))


def _internvit(config: Config, vision: Config, llm: Config, blocks: str = _BLOCKS) -> Parts:
    """InternViT, a layer norm over a square of patches, then an MLP.

    Args:
        vision, llm: configurations of the tower and of the language model.
        blocks: the tower's list of blocks.
    """
    check_selected(config, vision, DROPS_FIRST)
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or ratio <= 0 or int(1 / ratio) < 1:
        raise ValueError(
            f"{config['model_type']}: downsample_ratio must be from 0 to 1, got {ratio!r}; nearest: 0.5"
        )
    projector = (
        ProjectorStep(merge=int(1 / ratio) ** 2),
        ProjectorStep(norm=Norm.LAYER),
        *mlp_steps(text(config, "projector_hidden_act", "gelu")),
    )
    layer = whole_or(config, "vision_feature_layer", -1)
    dropped: tuple[Dropped, ...] = ()
    if layer != -1:
        dropped = unread_blocks({"num_hidden_layers": 24, **vision}, layer, f"{_VIT}{blocks}")
    vision_part = Part(
        config=vision,
        projector=projector,
        feature_layer=None if layer == -1 else layer,
        weights={
            **VISION_TOWER,
            f"{_BLOCKS}.": f"{_VIT}{blocks}.",
            "projector.1.": "model.multi_modal_projector.layer_norm.",
            **two_linears(2, 4),
        },
    )
    return joined(config, {VISION: vision_part}, llm, dropped=dropped, notes=(TILES,))


COMPOSITES = (
    Composite(name="InternVL", model_type="internvl", take_apart=_internvl),
    Composite(name="Qianfan-OCR", model_type="qianfan_ocr", take_apart=_qianfan_ocr),
)
