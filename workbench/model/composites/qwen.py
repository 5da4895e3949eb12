"""Composites with Qwen's vision towers, which end with a merger: Qwen-VL, Cosmos 3, EXAONE 4.5 and others."""

from dataclasses import replace

from workbench.model.composites.composite import (
    LLM,
    PAGE,
    VISION,
    Composite,
    Dropped,
    Part,
    Parts,
    check_width,
    joined,
    merging_tower,
    part_config,
    text_config,
    typed_config,
)
from workbench.model.config_fields import Config, whole
from workbench.model.projector import ProjectorStep

_NOT_TEXT = ("vision_config", "text_config", "audio_config", "model_type", "architectures")


def _qwen(config: Config, name: str, *, emitted: str) -> Parts:
    """Qwen2-VL and Qwen2.5-VL, by that name; older files have the language model's keys at the top level.

    Args:
        emitted: key of the vision tower's configuration that holds the width its merger gives.
    """
    inner = text_config(config, f"{name}_text", ties=False)
    if config.get("text_config") is None:
        top = {key: value for key, value in config.items() if key not in _NOT_TEXT}
        inner = {**top, **inner}
    vision = typed_config(config, "vision_config", f"{name}_vision")
    check_width(config, vision, emitted, inner, 8192)
    return joined(config, {VISION: merging_tower(vision)}, {**inner, "model_type": f"{name}_text"})


def _qwen3_vl(
    config: Config, language_model: str = "qwen3_vl_text", vision: str = "qwen3_vl_vision", usual: int = 4096
) -> Parts:
    """A tower with a merger and a language model; `usual`: the default width of that."""
    llm = {**text_config(config, language_model, ties=False), "model_type": language_model}
    seen = typed_config(config, "vision_config", vision)
    check_width(config, seen, "out_hidden_size", llm, usual)
    return joined(config, {VISION: merging_tower(seen)}, llm)


def _with_head(config: Config, language_model: str, usual: int, vision: str = "qwen3_5_vision") -> Parts:
    """As Qwen3-VL; released checkpoints have a head besides that transformers leaves out."""
    head = Dropped(weights="mtp.", what="head that predicts several tokens")
    return replace(_qwen3_vl(config, language_model, vision, usual), dropped=(head,))


def _exaone(config: Config) -> Parts:
    """As Qwen3.5, before EXAONE 4; its first release named that otherwise."""
    kind = part_config(config, "text_config", _EXAONE)["model_type"]
    if kind not in (_EXAONE, "exaone4_5_text"):
        raise ValueError(
            f"exaone4_5: text_config.model_type must be {_EXAONE}, got {kind!r}; nearest: {_EXAONE}"
        )
    return _with_head(config, _EXAONE, 4096, "exaone4_5_vision")


_EXAONE = "exaone4"


def _hyperclovax(config: Config) -> Parts:
    """Qwen2.5-VL's tower and its merger, a matmul, and a language model whose positions have one axis."""
    vision = typed_config(config, "vision_config", "qwen2_5_vl_vision")
    width, side = whole(vision, "hidden_size", 3584), whole(vision, "spatial_merge_size", 2)
    tower = "model.vision_model."
    seen = Part(
        config=vision,
        projector=(
            ProjectorStep(merge=side**2),
            ProjectorStep(linear=side**2 * width),
            ProjectorStep(act="gelu"),
            ProjectorStep(linear=whole(vision, "out_hidden_size", 3584)),
            ProjectorStep(linear_out=True),
        ),
        items=PAGE,
        weights={
            "": tower,
            "projector.1.": f"{tower}merger.mlp.0.",
            "projector.3.": f"{tower}merger.mlp.2.",
            "projector.4.": "model.projector.",
        },
        respelled=(("model.projector.", "model.vision_projector."),),
    )
    llm = {**text_config(config, "", ties=True), "model_type": "hyperclovax"}
    parts = joined(config, {VISION: seen}, llm)
    stored = (
        ("model.language_model.", "model.language_model.model."),
        ("lm_head.", "model.language_model.lm_head."),
    )
    return replace(parts, modules={**parts.modules, LLM: replace(parts.modules[LLM], respelled=stored)})


COMPOSITES = (
    Composite(
        name="Qwen2-VL",
        model_type="qwen2_vl",
        take_apart=lambda config: _qwen(config, "qwen2_vl", emitted="hidden_size"),
    ),
    Composite(
        name="Qwen2.5-VL",
        model_type="qwen2_5_vl",
        take_apart=lambda config: _qwen(config, "qwen2_5_vl", emitted="out_hidden_size"),
    ),
    Composite(name="Qwen3-VL", model_type="qwen3_vl", take_apart=_qwen3_vl),
    Composite(name="Cosmos 3", model_type="cosmos3_omni", take_apart=_qwen3_vl),
    Composite(
        name="Qwen3-VL with experts",
        model_type="qwen3_vl_moe",
        take_apart=lambda config: _qwen3_vl(config, "qwen3_vl_moe_text", usual=2048),
    ),
    Composite(
        name="Qwen3.5",
        model_type="qwen3_5",
        take_apart=lambda config: _with_head(config, "qwen3_5_text", 4096),
    ),
    Composite(
        name="Qwen3.5 with experts",
        model_type="qwen3_5_moe",
        take_apart=lambda config: _with_head(config, "qwen3_5_moe_text", 2048),
    ),
    Composite(name="EXAONE 4.5", model_type="exaone4_5", take_apart=_exaone),
    Composite(
        name="Cohere Compass",
        model_type="cohere_compass",
        take_apart=lambda config: _qwen3_vl(config, "cohere_compass_text", usual=8192),
    ),
    Composite(name="HyperCLOVA X SEED Think", model_type="hyperclovax_vision_v2", take_apart=_hyperclovax),
)
