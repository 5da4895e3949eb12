"""Composites of DeepSeek: a tower like SigLIP's, an MLP with biases, and Llama."""

from workbench.model.composites.composite import (
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    check_width,
    joined,
    mlp_steps,
    part_config,
    text_config,
    typed_config,
)
from workbench.model.config_fields import Config, count, text
from workbench.model.projector import ProjectorStep

_OUT = ProjectorStep(linear_out=True)
_TOWER, _ALIGNER = "model.vision_model.", "model.aligner."


def _deepseek_vl(config: Config) -> Parts:
    """SigLIP's final states through an MLP with biases."""
    vision_part = Part(
        config=part_config(config, "vision_config", "siglip_vision_model"),
        projector=mlp_steps("gelu"),
        weights={"": _TOWER, "projector.0.": f"{_ALIGNER}linear1.", "projector.2.": f"{_ALIGNER}linear2."},
    )
    head = Dropped(weights=f"{_TOWER}head.", what="SigLIP's pooling head")
    return joined(config, {VISION: vision_part}, text_config(config, "llama", ties=True), dropped=(head,))


def _janus(config: Config) -> Parts:
    """What Janus understands images with: its tower, and matmuls with an activation before all but one."""
    vision = typed_config(config, "vision_config", "janus_vision_model")
    llm = text_config(config, "llama", ties=True)
    check_width(config, {"projection_dim": 2048, **vision}, "projection_dim", llm, 4096)
    further = count(vision, "depth", 2) - 1
    names = {f"projector.{2 * index + 2}.": f"{_ALIGNER}hidden_layers.{index}." for index in range(further)}
    vision_part = Part(
        config=vision,
        projector=(_OUT, *(ProjectorStep(act=text(vision, "hidden_act", "gelu")), _OUT) * further),
        weights={"": _TOWER, "projector.0.": f"{_ALIGNER}fc1.", **names},
    )
    return joined(config, {VISION: vision_part}, llm, dropped=_GENERATION)


_GENERATION = tuple(
    Dropped(weights=f"model.{name}", what=f"{what}, which are not trained")
    for name, what in (
        ("vqmodel.", "tokenizer of generated images"),
        ("generation_embeddings.", "embedding of generated images"),
        ("generation_aligner.", "projector of generated images"),
        ("generation_head.", "head for generated images"),
    )
)
COMPOSITES = (
    Composite(name="DeepSeek-VL", model_type="deepseek_vl", take_apart=_deepseek_vl),
    Composite(name="Janus", model_type="janus", take_apart=_janus),
)
