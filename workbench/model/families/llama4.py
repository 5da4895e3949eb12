"""Llama 4's language model: routed and shared experts, and norms of queries and keys without weights."""

from workbench.model.composites.composite import (
    TILES,
    VISION,
    Composite,
    Part,
    Parts,
    joined,
    part_config,
    text_config,
)
from workbench.model.config_fields import Config, attention_bias, count, flag, number, text, whole
from workbench.model.experts import Experts, with_experts
from workbench.model.families.decoder import before_attention, default_sizes, llama_like, with_attention
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.layer import Attention, Layer, Pointwise, Shard
from workbench.model.projector import ProjectorStep
from workbench.model.transformer import Mlp

CHUNK = 8192  # tokens
_CHUNKED = "chunked_attention"
_NO_ROTATION_EVERY = 4  # blocks
_TOWER = "vision_model."


def _llama4(config: Config) -> Layers:
    """Decoder blocks, of which all or every n-th have a shared expert and routed ones."""
    defaults = default_sizes(202048, 5120, 8192, 48, 40, num_key_value_heads=8, head_dim=128)
    heads = {"bias": attention_bias(config)}
    dense = whole(config, "intermediate_size_mlp", 16384)
    plain = llama_like({**config, "intermediate_size": dense}, defaults=defaults, heads=heads, mlp={})
    embed, *blocks, head = plain
    rotates = _rotates(config, len(blocks))
    blocks = _in_chunks(config, blocks, rotates)
    if flag(config, "use_qk_norm", default=True):  # only of rotated queries and keys, without weights
        blocks = [
            before_attention(block, _norm_of) if is_rotated else block
            for block, is_rotated in zip(blocks, rotates, strict=True)
        ]
    activation = text(config, "hidden_act", "silu")
    width = whole(config, "intermediate_size", 8192)
    experts = Experts(
        num=count(config, "num_local_experts", 16),
        num_chosen=whole(config, "num_experts_per_tok", 1),
        mlp=Mlp(width=width, gated=True, activation=activation, fused=True),
        shared=Mlp(width=width, gated=True, activation=activation),
    )
    step = whole(config, "interleave_moe_layer_step", 1)
    mixed = config.get("moe_layers")
    indices = range(step - 1, len(blocks), step) if mixed is None else mixed
    return (
        embed,
        *(with_experts(block, experts) if i in indices else block for i, block in enumerate(blocks)),
        head,
    )


def _rotates(config: Config, num_blocks: int) -> list[bool]:
    """[blocks] whether queries and keys are rotated."""
    listed = config.get("no_rope_layers") or ()
    return [
        bool(listed[block] if block < len(listed) else (block + 1) % _NO_ROTATION_EVERY)
        for block in range(num_blocks)
    ]


def _in_chunks(config: Config, blocks: list[Layer], rotates: list[bool]) -> list[Layer]:
    """The blocks with chunked attention in those that the configuration lists, else in rotated ones."""
    if config.get("attention_chunk_size", CHUNK) is None:
        return blocks
    chunk, listed = whole(config, "attention_chunk_size", CHUNK), config.get("layer_types")
    within = rotates if listed is None else [kind == _CHUNKED for kind in listed]
    return [
        with_attention(block, chunk=chunk) if is_within else block
        for block, is_within in zip(blocks, within, strict=False)
    ]


def longest_item(config: Config) -> int:
    """Most tokens for which attention is neither chunked nor tempered by position."""
    limits = [whole(config, "max_position_embeddings", 131072)]
    if config.get("attention_chunk_size", CHUNK) is not None:
        limits.append(whole(config, "attention_chunk_size", CHUNK))
    if flag(config, "attn_temperature_tuning", default=True):
        limits.append(whole(config, "floor_scale", 8192) - 1)
    return min(limits)


def _norm_of(attention: Attention) -> Pointwise:
    width = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    return Pointwise(name="qk_norm", width=width, num_passes=2, shard=Shard.COLUMN)


def _parts(config: Config) -> Parts:
    """The tower's adapter (a shuffle and an MLP whose end is bent too), then a matmul."""
    vision = part_config(config, "vision_config", "llama4_vision_model")
    side = round(1 / number(vision, "pixel_shuffle_ratio", 0.5))
    inner = whole(vision, "projector_output_dim", 4096)
    for key, absent, expected in (
        ("vision_output_dim", 7680, inner),
        ("projector_input_dim", 4096, inner),
        ("intermediate_size", 5632, side**2 * whole(vision, "hidden_size", 768)),
    ):
        if (given := whole(vision, key, absent)) != expected:
            by_default = "" if key in vision else " by default"
            raise ValueError(
                f"llama4: vision_config.{key} must be {expected}, got {given}{by_default}; "
                f"nearest: {expected}"
            )
    bent = (ProjectorStep(linear=inner, bias=False), ProjectorStep(act="gelu"))
    bias = flag(vision, "multi_modal_projector_bias")
    vision_part = Part(
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
    )
    llm = text_config(config, "llama4_text", ties=False)
    weights = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    return joined(config, {VISION: vision_part}, llm, weights=weights, notes=(TILES,))


LLAMA4 = LanguageModel(
    name="Llama 4",
    model_type="llama4_text",
    examples={
        "llama4": Example(
            config=EXAMPLE_LLM
            | {
                "head_dim": 32,
                "intermediate_size_mlp": 352,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
            }
        )
    },
    make=_llama4,
    longest_item=longest_item,
    composites=(Composite(name="Llama 4", model_type="llama4", take_apart=_parts),),
)
