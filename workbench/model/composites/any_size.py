"""Composites with SigLIP's towers for images of any size, squares of whose patches go through an MLP."""

from dataclasses import replace

from workbench.model.composites.composite import (
    LLM,
    PAGE,
    PROJECTOR,
    SIGLIP_HEAD,
    TILES,
    VISION,
    VISION_TOWER,
    Composite,
    Dropped,
    Part,
    Parts,
    joined,
    normed_squares,
    part_config,
    text_config,
    two_linears,
    typed_config,
)
from workbench.model.config_fields import Config, flag, text, whole
from workbench.model.families.minicpm_vision import SIDE
from workbench.model.families.tiles import COSMOS_EDGE, LFM2_VL, TILING
from workbench.model.projector import ProjectorStep
from workbench.model.transformer import Norm


def _lfm2_vl(config: Config) -> Parts:
    """A layer norm over squares of patches, where the configuration has one, then an MLP."""
    side = whole(config, "downsample_factor", 2)
    vision = {
        **part_config(config, "vision_config", _SIGLIP2),
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


_COSMOS_SEEN = {  # what its tower has where its configuration leaves it out
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}


_COSMOS_NAMES = (
    *((f".self_attn.{letter}_proj.", f".self_attn.to_{letter}.") for letter in "qkv"),
    (".self_attn.o_proj.", ".self_attn.to_out."),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)


def _cosmos_edge(config: Config) -> Parts:
    """A norm of every patch before squares are merged; the language model has three axes.

    Head and embedding are never tied: transformers names no weights that could be.
    """
    given = {**_COSMOS_SEEN, **typed_config(config, "vision_config", _SIGLIP2), TILING: COSMOS_EDGE}
    width, side = whole(given, "hidden_size"), whole(given, _SIDE, 2)
    tower = Part(
        config={key: value for key, value in given.items() if key != _SIDE},  # a matter of the projector
        projector=normed_squares(width, side, inner=whole(config, "projector_hidden_size", 11520), eps=1e-6),
        items=PAGE,
        weights={
            "": "model.visual.",
            "projector.0.": "model.projector.norm.",
            "projector.2.": "model.projector.linear_fc1.",
            "projector.4.": "model.projector.linear_fc2.",
        },
        respelled=_COSMOS_NAMES,
    )
    llm = text_config({**config, "tie_word_embeddings": False}, "cosmos3_edge_text")
    parts = joined(config, {VISION: tower}, llm)
    named = replace(parts.modules[LLM], respelled=(*_COSMOS_NAMES, ("model.language_model.", "")))
    return replace(parts, modules={**parts.modules, LLM: named})


def _minicpm(config: Config, *, few: str, ties: bool) -> Parts:
    """Squares of patches merged, once or more often, each time through a norm and an MLP.

    Args:
        few: the default of `downsample_mode`; ties: of `tie_word_embeddings`.

    Raises:
        ValueError: another mode, or other squares.
    """
    kind, mode = config["model_type"], text(config, MODE, few)
    if mode not in _TOWERS:
        raise ValueError(f"{kind}: {MODE} must be {MANY!r} or {FEW!r}, got {mode!r}; nearest: {few!r}")
    if (square := list(config.get(_SQUARE) or (SIDE, SIDE))) != [SIDE, SIDE]:
        raise ValueError(f"{kind}: {_SQUARE} must be {[SIDE, SIDE]}, got {square}; nearest: {[SIDE, SIDE]}")
    vision = typed_config(config, "vision_config", _TOWERS[mode])
    if mode == FEW:
        vision[_AT] = config.get(_AT, 6)
    square_width = SIDE**2 * whole(vision, "hidden_size", 768)
    steps: list[ProjectorStep] = []
    weights = dict(VISION_TOWER)
    for index in range(times := whole(config, "merger_times", 1)):
        is_last = index == times - 1
        out = ProjectorStep(linear_out=True) if is_last else ProjectorStep(linear=square_width // SIDE**2)
        for number, name in ((1, "pre_norm"), (2, "linear_1"), (4, "linear_2")):
            weights[f"projector.{len(steps) + number}."] = f"model.merger.mlp.{index}.{name}."
        steps += [
            ProjectorStep(merge=SIDE**2),
            ProjectorStep(norm=Norm.LAYER, eps=1e-6),
            ProjectorStep(linear=square_width),
            ProjectorStep(act="gelu"),
            out,
        ]
    tower = Part(config=vision, projector=tuple(steps), items=PAGE, weights=weights)
    llm = text_config(config, "qwen3_5_text", ties=ties)
    return joined(config, {VISION: tower}, llm, dropped=(_INSIDE,) if mode == MANY else (), notes=(TILES,))


MODE, MANY, FEW = "downsample_mode", "4x", "16x"  # how many tokens an image has
_TOWERS = {MANY: "minicpm_ocr_vision", FEW: "minicpmv4_6_vision"}
_AT, _SQUARE = "insert_layer_id", "merge_kernel_size"
_INSIDE = Dropped(
    weights="model.vision_tower.vit_merger.", what="merger inside the tower, which 4x does not read"
)
_SIGLIP2, _SIDE = "siglip2_vision_model", "spatial_merge_size"
COMPOSITES = (
    Composite(name="LFM2-VL", model_type="lfm2_vl", take_apart=_lfm2_vl),
    Composite(name="Cosmos 3 Edge", model_type="cosmos3_edge", take_apart=_cosmos_edge),
    Composite(
        name="MiniCPM-V 4.6",
        model_type="minicpmv4_6",
        take_apart=lambda config: _minicpm(config, few=FEW, ties=False),
    ),
    Composite(
        name="MiniCPM-OCR",
        model_type="minicpm_ocr",
        take_apart=lambda config: _minicpm(config, few=MANY, ties=True),
    ),
)
