"""Gemma 4's language models: two shapes of attention, and routed experts beside an MLP in the sparse one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.model.composites.composite import (
    AUDIO,
    CLIP,
    PAGE,
    VISION,
    VISION_TOWER,
    Composite,
    Part,
    Parts,
    joined,
    part_config,
    text_config,
)
from workbench.model.config_fields import Config, attention_bias, count, flag, number, text, whole
from workbench.model.experts import (
    EXPERT_SCALE,
    EXPERTS_NORM,
    ROUTER_NORM,
    ROUTER_SCALE,
    Experts,
    expert_operators,
)
from workbench.model.families import gemma4_unified
from workbench.model.families.decoder import SLIDING, capped, default_sizes, llama_like, windowed
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.gemma4_vision import POOLED
from workbench.model.families.positions import check_causal_positions
from workbench.model.layer import Layer, Operator, Pointwise
from workbench.model.projector import Merge, ProjectorStep, Steps
from workbench.model.transformer import Mlp, Norm, Placement, norm, residual, value_norm

FULL = "full_attention"
BIDIRECTIONAL = "use_bidirectional_attention"
_FULL_EVERY, _FULL_HEAD = 6, 512  # blocks; default width of a head
_SIZES = default_sizes(
    262144,
    2304,
    9216,
    30,
    8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
)
_OF_A_BLOCK = ("head_dim", "num_key_value_heads")  # what `per_layer_config` may set
_PER_LAYER, _SHARED, _BY_BLOCK = "hidden_size_per_layer_input", "num_kv_shared_layers", "per_layer_config"
_SIZES_TAKEN = "gemma-4-31B and gemma-4-26B-A4B have none"


class _Shape(NamedTuple):
    """The attention of a block."""

    head_dim: int
    num_kv: int
    shares_kv: bool  # values are the keys before their norm


def _gemma4(config: Config) -> Layers:
    """Gemma 3's blocks, whose full attentions have other heads, and all of them norms of values."""
    _check_own_keys(config)
    kinds = _kinds(config)
    shapes = [_shape(config, block, kind) for block, kind in enumerate(kinds)]
    outlines = {shape: _outline(config, shape) for shape in dict.fromkeys(shapes)}
    embed, *_, head = outlines[shapes[0]]
    plain = (embed, *(outlines[shape][1 + block] for block, shape in enumerate(shapes)), head)
    sliding = {"sliding_window": 512, **config, "layer_types": kinds}
    return capped(config, windowed(sliding, plain))


def _outline(config: Config, shape: _Shape) -> Layers:
    """The model as if all of its blocks had this attention."""
    plain = llama_like(
        {**config, **dict(zip(_OF_A_BLOCK, shape[:2], strict=True))},
        defaults=_SIZES,
        heads={"bias": attention_bias(config), "qk_norm": Norm.RMS},
        mlp={},
        block={"placement": Placement.SANDWICH},
        scales_embedding=True,
    )
    embed, *blocks, head = plain
    experts = _experts(config) if flag(config, "enable_moe_block") else None
    return (embed, *(_block(block, shape, experts) for block in blocks), head)


def _block(block: Layer, shape: _Shape, experts: Experts | None) -> Layer:
    """The block with norms of values, its experts if it has any, and a factor for its output."""
    operators: list[Operator] = []
    for operator in block.operators:
        if operator.name == "v_proj" and shape.shares_kv:
            continue
        operators.append(operator)
        if operator.name == "k_norm":
            operators.append(value_norm(shape.num_kv, shape.head_dim))
        if operator.name == "mlp.down" and experts is not None:
            operators += _beside_mlp(block.out_width, experts)
    factor = Pointwise(name="layer_scale", width=block.out_width, num_passes=2)
    return replace(block, operators=(*operators, factor))


def _beside_mlp(width: int, experts: Experts) -> Iterator[Operator]:
    """Experts that read the same residual stream as the MLP, with norms and a router of their own."""
    yield norm("dense_norm", width, Norm.RMS)
    router, *others = expert_operators(width, experts)
    yield norm(ROUTER_NORM, width, Norm.UNSCALED)
    yield Pointwise(name=ROUTER_SCALE, width=width, num_passes=2, weights=(("weight", width),))
    yield router
    yield Pointwise(
        name=EXPERT_SCALE,
        width=experts.num_chosen,
        num_passes=2,
        weights=(("weight", experts.num),),
    )
    yield norm(EXPERTS_NORM, width, Norm.RMS)
    yield from others
    yield norm("routed_norm", width, Norm.RMS)
    yield residual("experts_residual", width)


def _experts(config: Config) -> Experts:
    width = whole(config, "moe_intermediate_size")
    activation = text(config, "hidden_activation", str(_SIZES["hidden_act"]))
    return Experts(
        num=count(config, "num_experts"),
        num_chosen=whole(config, "top_k_experts"),
        mlp=Mlp(width=width, gated=True, activation=activation, fused=True),
    )


def _kinds(config: Config) -> list[str]:
    """[blocks] the kind of each one's attention; the last one's is full whatever is listed.

    Raises:
        ValueError: an unknown kind, or not one for every block.
    """
    num = count(config, "num_hidden_layers", _SIZES["num_hidden_layers"])
    listed = config.get("layer_types")
    if listed is None:
        listed = [SLIDING if (block + 1) % _FULL_EVERY else FULL for block in range(num)]
    is_list = isinstance(listed, list | tuple) and len(listed) == num
    if not is_list or not all(kind in (SLIDING, FULL) for kind in listed):
        raise ValueError(
            f"{config['model_type']}: layer_types must be {SLIDING} or {FULL} for each of the {num} blocks, "
            f"got {listed!r:.80}"
        )
    return [*listed[:-1], FULL]


def _shape(config: Config, block: int, kind: str) -> _Shape:
    """The attention of a block: `per_layer_config` overrides the keys of whole kinds, as in transformers."""
    shares = kind == FULL and flag(config, "attention_k_eq_v")
    head_dim = whole(config, "head_dim", _SIZES["head_dim"])
    num_kv = whole(config, "num_key_value_heads", _SIZES["num_key_value_heads"])
    if config.get(_BY_BLOCK) is not None:
        own = _override(config, block)
        return _Shape(whole(own, "head_dim", head_dim), whole(own, "num_key_value_heads", num_kv), shares)
    if kind == SLIDING:
        return _Shape(head_dim, num_kv, shares)
    usual = whole(config, "num_global_key_value_heads", num_kv) if shares else num_kv
    return _Shape(whole(config, "global_head_dim", _FULL_HEAD), usual, shares)


def _override(config: Config, block: int) -> dict[str, Any]:
    """What `per_layer_config` says of a block, whose number may have leading zeros.

    Raises:
        ValueError: keys that do not shape its attention.
    """
    stated, name = config[_BY_BLOCK], config["model_type"]
    keys = stated if isinstance(stated, Mapping) else ("",)
    if not all(str(key).isdecimal() for key in keys):
        raise ValueError(f"{name}: {_BY_BLOCK} must be an object by number of block, got {stated!r:.60}")
    own: Any = next((stated[key] for key in keys if int(key) == block), {})
    if not isinstance(own, Mapping):
        raise ValueError(f"{name}: {_BY_BLOCK} must have an object for a block, got {own!r:.60}")
    if unknown := sorted(own.keys() - set(_OF_A_BLOCK)):
        raise ValueError(f"{name}: {_BY_BLOCK} may set {' and '.join(_OF_A_BLOCK)}, got {unknown[0]!r}")
    return {"model_type": name, **own}


def _check_own_keys(config: Config) -> None:
    """Raise ValueError for what crosses blocks: embeddings of each, and keys that later ones read."""
    for key, usual, what in (
        (_PER_LAYER, 256, "a further embedding for every block"),
        (_SHARED, 0, "keys and values that later blocks read"),
    ):
        if config.get(key, usual) != 0:
            raise ValueError(
                f"{config['model_type']}: {key} must be 0, got {config.get(key, usual)!r}: {what} (E2B, E4B) "
                f"would cross every stage boundary; {_SIZES_TAKEN}"
            )


def _check(config: Config) -> None:
    """Raise ValueError for positions that depend on the batch, and for attention that sees later text."""
    if config.get(BIDIRECTIONAL) not in (None, "vision"):
        raise ValueError(
            f"{BIDIRECTIONAL} must be null or 'vision', got {config[BIDIRECTIONAL]!r}: the language model "
            "predicts the next token"
        )
    check_causal_positions({**config, BIDIRECTIONAL: None})


def _parts(config: Config) -> Parts:
    """Means over squares of patches, a norm without weights, a matmul without bias.

    Raises:
        ValueError: no vision tower, or one for sound.
    """
    if config.get("audio_config") is not None:
        raise ValueError(
            "gemma4: audio_config must be null: a tower for sound (E2B, E4B) is not supported; "
            "gemma-4-31B and gemma-4-26B-A4B have none"
        )
    if config.get("vision_config") is None:
        raise ValueError("gemma4: vision_config must be an object, got none; plan its text_config alone")
    vision = part_config(config, "vision_config", "gemma4_vision")
    tower = Part(
        config=vision,
        projector=(
            ProjectorStep(merge=whole(vision, "pooling_kernel_size", POOLED) ** 2, how=Merge.MEAN),
            *_normed_matmul(vision),
        ),
        items=PAGE,
        weights={**VISION_TOWER, "projector.2.": "model.embed_vision.embedding_projection."},
    )
    return _before_llm(config, {VISION: tower}, text_config(config, "gemma4_text", ties=True), _IN_WINDOWS)


def _unified_parts(config: Config) -> Parts:
    """No towers: patches and samples through a norm and a matmul.

    Raises:
        ValueError: neither images nor sound.
    """
    encoders = {}
    if config.get("vision_config") is not None:
        vision = part_config(config, "vision_config", "gemma4_unified_vision")
        gemma4_unified.check_widths(vision)
        embedding = "model.embed_vision."
        encoders[VISION] = Part(
            config=vision,
            projector=_normed_matmul(vision),
            items=PAGE,
            weights={
                "": embedding,
                "projector.1.": f"{embedding}multimodal_embedder.embedding_projection.",
            },
            respelled=(
                ("embed_vision.", "vision_embedder."),
                ("vision_embedder.multimodal_embedder.", "embed_vision."),
            ),
        )
    if config.get("audio_config") is not None:
        encoders[AUDIO] = Part(
            config=part_config(config, "audio_config", "gemma4_unified_audio"),
            projector=(ProjectorStep(linear_out=True, bias=False),),
            items=CLIP,
            weights={"": "model.embed_audio.", "projector.0.": "model.embed_audio.embedding_projection."},
        )
    if not encoders:
        raise ValueError(
            "gemma4_unified: vision_config or audio_config must be an object, got none; plan its text_config "
            "alone"
        )
    llm = _UNIFIED | text_config(config, "", ties=True) | {"model_type": "gemma4_text", _PER_LAYER: 0}
    return _before_llm(config, encoders, llm, _IN_ALL)


_UNIFIED = {"sliding_window": 1024, BIDIRECTIONAL: "vision", "max_position_embeddings": 262_144}


def _normed_matmul(tower: Config) -> Steps:
    eps = number(tower, "rms_norm_eps", 1e-6)
    return (ProjectorStep(norm=Norm.UNSCALED, eps=eps), ProjectorStep(linear_out=True, bias=False))


def _before_llm(config: Config, encoders: Mapping[str, Part], llm: Config, note: str) -> Parts:
    """The parts, with a note about images where their tokens see each other."""
    notes = (note,) if VISION in encoders and llm.get(BIDIRECTIONAL) == "vision" else ()
    return joined(config, encoders, llm, notes=notes)


_IN_WINDOWS = "tokens of an image see each other in blocks with a window: give the mask gemma4 for it"
_IN_ALL = "tokens of an image see each other: give the mask gemma for it"
GEMMA4 = LanguageModel(
    name="Gemma 4",
    model_type="gemma4_text",
    check_config=_check,
    examples={
        name: Example(
            config=EXAMPLE_LLM
            | {
                "head_dim": 32,
                "global_head_dim": 64,
                "num_global_key_value_heads": 2,
                "attention_k_eq_v": True,
                "sliding_window": 64,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
                _PER_LAYER: 0,
            }
            | more
        )
        for name, more in {
            "gemma4": {},
            "gemma4 with experts": {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 96,
            },
        }.items()
    },
    make=_gemma4,
    composites=(
        Composite(name="Gemma 4 with images", model_type="gemma4", take_apart=_parts),
        Composite(name="Gemma 4 unified", model_type="gemma4_unified", take_apart=_unified_parts),
    ),
)
