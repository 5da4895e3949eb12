"""Llama 4: squares of patches side by side, two MLPs, experts."""

from workbench.model.composites.composite import (
    LLM,
    TILES,
    VISION,
    Composite,
    Part,
    Parts,
    part_config,
    text_config,
    token_id,
    token_ids,
)
from workbench.model.config_fields import Config, number, whole
from workbench.model.projector import ProjectorStep

_TOWER = "vision_model."


def _llama4(config: Config) -> Parts:
    """The tower's adapter (a shuffle and an MLP whose end is bent too), then a matmul."""
    vision = part_config(config, "vision_config", "llama4_vision_model")
    side = round(1 / number(vision, "pixel_shuffle_ratio", 0.5))
    inner = whole(vision, "projector_output_dim", 4096)
    for key, want in (
        ("vision_output_dim", inner),
        ("projector_input_dim", inner),
        ("intermediate_size", side**2 * whole(vision, "hidden_size", 768)),
    ):
        if vision.get(key, want) != want:
            raise ValueError(
                f"llama4: vision_config.{key} must be {want}, got {vision[key]}; nearest: {want}"
            )
    bent = (ProjectorStep(linear=inner, bias=False), ProjectorStep(act="gelu"))
    bias = bool(vision.get("multi_modal_projector_bias", False))
    return Parts(
        modules={
            VISION: Part(
                config=vision,
                projector=(
                    ProjectorStep(merge=side**2),
                    *bent,
                    *bent,
                    ProjectorStep(linear_out=True, bias=bias),
                ),
                weights={
                    "": _TOWER,
                    "projector.1.": f"{_TOWER}vision_adapter.mlp.fc1.",
                    "projector.3.": f"{_TOWER}vision_adapter.mlp.fc2.",
                    "projector.5.": "multi_modal_projector.linear_1.",
                },
            ),
            LLM: Part(
                config=text_config(config, "llama4_text", ties=False),
                weights={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
            ),
        },
        token_ids=token_ids(vision=token_id(config, "image_token_index", "image_token_id")),
        notes=(TILES,),
    )


LLAMA4 = Composite(name="Llama 4", model_type="llama4", take_apart=_llama4)
