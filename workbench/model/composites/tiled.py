"""Idefics3, SmolVLM and InternVL: squares of patches side by side in front of a language model."""

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
from workbench.model.composites.llava import unread_blocks
from workbench.model.config_fields import Config, text, whole
from workbench.model.projector import ProjectorStep
from workbench.model.transformer import Norm

_TEXT_MODEL = {"model.": "model.text_model.", "lm_head.": "lm_head."}


def _idefics3(config: Config) -> Parts:
    return _shuffled(config, "idefics3_vision")


def _smolvlm(config: Config) -> Parts:
    return _shuffled(config, "smolvlm_vision")


def _shuffled(config: Config, vision: str) -> Parts:
    """One matmul without bias over a square of patches."""
    projector = (
        ProjectorStep(merge=whole(config, "scale_factor", 2) ** 2),
        ProjectorStep(linear_out=True, bias=False),
    )
    return Parts(
        modules={
            VISION: Part(
                config=part_config(config, "vision_config", vision),
                projector=projector,
                weights={
                    "": "model.vision_model.",
                    "projector.1.": "model.connector.modality_projection.proj.",
                },
            ),
            LLM: Part(config=text_config(config, "llama", ties=False), weights=_TEXT_MODEL),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_id")),
        notes=(TILES,),
    )


def _internvl(config: Config) -> Parts:
    """A layer norm over a square of patches, then an MLP."""
    vision = part_config(config, "vision_config", "internvl_vision")
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or ratio <= 0 or int(1 / ratio) < 1:
        raise ValueError(f"internvl: downsample_ratio must be from 0 to 1, got {ratio!r}; nearest: 0.5")
    out = ProjectorStep(linear_out=True)
    projector = (
        ProjectorStep(merge=int(1 / ratio) ** 2),
        ProjectorStep(norm=Norm.LAYER),
        out,
        ProjectorStep(act=text(config, "projector_hidden_act", "gelu")),
        out,
    )
    layer = whole_or(config, "vision_feature_layer", -1)
    dropped: tuple[Dropped, ...] = ()
    if layer != -1:
        dropped = unread_blocks(
            {"num_hidden_layers": 24, **vision}, layer, "model.vision_tower.encoder.layer"
        )
    return Parts(
        modules={
            VISION: Part(
                config=vision,
                projector=projector,
                feature_layer=None if layer == -1 else layer,
                weights={
                    "": "model.vision_tower.",
                    "projector.1.": "model.multi_modal_projector.layer_norm.",
                    **two_linears(2, 4),
                },
            ),
            LLM: Part(config=text_config(config, "qwen2", ties=True), weights=DECODER),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_id")),
        dropped=dropped,
        notes=(TILES,),
    )


IDEFICS3 = Composite(name="Idefics3", model_type="idefics3", take_apart=_idefics3)
SMOLVLM = Composite(name="SmolVLM", model_type="smolvlm", take_apart=_smolvlm)
INTERNVL = Composite(name="InternVL", model_type="internvl", take_apart=_internvl)
