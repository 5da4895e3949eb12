"""DeepSeek-V2, V3 and GLM-4.7-Flash: latent attention, first blocks with an MLP, the others with experts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.model.config_fields import Config, count, flag, text, whole
from workbench.model.experts import SIGMOID, WIDE_SOFTMAX
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.grouped_router import FIRST_DENSE, check_groups, mixed
from workbench.model.families.positions import PARTIAL, check_causal_positions, rotated_share
from workbench.model.latent_attention import LatentHeads, with_latent_attention
from workbench.model.layer import Layer, LayerKind

_CHOSEN = "num_experts_per_tok"
_GROUPED = "group_limited_greedy"
_METHODS = ("greedy", _GROUPED)  # of choosing experts
_V2 = default_sizes(102400, 4096, 11008, 32, 32) | {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    _CHOSEN: 6,  # as in DeepSeek-V2; transformers has no default
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
V3_SIZES = default_sizes(129280, 7168, 18432, 61, 128) | {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
}


_LITE = default_sizes(154880, 2048, 10240, 47, 20) | {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
}


def deepseek_like(config: Config, sizes: Mapping[str, Any], scores: str) -> Layers:
    """As Llama but for its attention and its experts; `sizes`: defaults, `scores`: as of `Experts`."""
    heads = _heads(config, sizes)
    # The heads of this outline are replaced.
    outline = {**config, "head_dim": heads.key_dim, "num_key_value_heads": heads.num}
    plain = llama_like(outline, defaults=sizes, heads={}, mlp={"bias": flag(config, "mlp_bias")})
    return mixed(config, tuple(_with_heads(layer, heads) for layer in plain), sizes, scores)


def _v3(config: Config) -> Layers:
    return deepseek_like({**config, "mlp_bias": False}, V3_SIZES, SIGMOID)  # a key of DeepSeek-V2 alone


def _with_heads(layer: Layer, heads: LatentHeads) -> Layer:
    if layer.kind is not LayerKind.BLOCK:
        return layer
    return replace(layer, operators=with_latent_attention(layer.operators, heads))


def _heads(config: Config, sizes: Mapping[str, Any]) -> LatentHeads:
    """Its queries have no latent where the configuration says null."""

    def size(key: str) -> int:
        return whole(config, key, sizes[key])

    has_latent = config.get("q_lora_rank", sizes["q_lora_rank"]) is not None
    return LatentHeads(
        num=size("num_attention_heads"),
        q_rank=size("q_lora_rank") if has_latent else 0,
        kv_rank=size("kv_lora_rank"),
        nope_dim=size("qk_nope_head_dim"),
        rope_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim"),
        bias=flag(config, "attention_bias"),
    )


def _check_v2(config: Config) -> None:
    method = text(config, "topk_method", _METHODS[0])
    if method not in _METHODS:
        raise ValueError(
            f"{config['model_type']}: topk_method must be {' or '.join(_METHODS)}, got {method!r}; nearest: "
            f"{_METHODS[0]}"
        )
    if config.get(_CHOSEN) is None:
        raise ValueError(f"{config['model_type']}: {_CHOSEN} must be given to run; nearest: {_V2[_CHOSEN]}")
    if method == _GROUPED:
        check_groups(config, _V2, least=1)
    check_latent(config, _V2)


def _check_v3(config: Config) -> None:
    check_groups(config, V3_SIZES)
    check_latent(config, V3_SIZES)


def _lite(config: Config) -> Layers:
    """DeepSeek-V3's attention and experts; the configuration lists which blocks have an MLP."""
    return deepseek_like({**with_first_dense(config, _LITE), "mlp_bias": False}, _LITE, SIGMOID)


def with_first_dense(config: Config, sizes: Mapping[str, Any]) -> Config:
    """The configuration with the number of first blocks that have an MLP, from the list of all blocks.

    Raises:
        ValueError: blocks with an MLP after one with experts, or a list of another length.
    """
    num = count(config, "num_hidden_layers", sizes["num_hidden_layers"])
    kinds = config.get(MLP_KINDS, [_DENSE] + [_SPARSE] * (num - 1))
    is_list = isinstance(kinds, list | tuple)
    first = list(kinds).count(_DENSE) if is_list else 0
    if not is_list or list(kinds) != [_DENSE] * first + [_SPARSE] * (num - first):
        raise ValueError(
            f"{config['model_type']}: {MLP_KINDS} must be {_DENSE} of first blocks and {_SPARSE} of others, "
            f"{num} in all, got {kinds!r:.60}"
        )
    return {**config, FIRST_DENSE: first}


def _check_lite(config: Config) -> None:
    check_groups(config, _LITE)
    check_latent(config, _LITE)
    if (share := rotated_share(config, 1.0)) != 1.0:
        raise ValueError(f"{PARTIAL} must be 1, as all of qk_rope_head_dim turns, got {share:g}; nearest: 1")


def check_latent(config: Config, sizes: Mapping[str, Any]) -> None:
    """Refuse positions that depend on a batch, and heads that cannot run."""
    check_causal_positions(config)
    heads = _heads(config, sizes)
    if heads.rope_dim % 2:
        raise ValueError(
            f"qk_rope_head_dim must be even, as rotary positions turn pairs of channels, got "
            f"{heads.rope_dim}; nearest: {heads.rope_dim + 1}"
        )
    if heads.value_dim > heads.key_dim:
        raise ValueError(
            f"v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim {heads.key_dim} to run, got "
            f"{heads.value_dim}; nearest: {heads.key_dim}"
        )
    num_keys = whole(config, "num_key_value_heads", heads.num)
    if num_keys != heads.num:
        raise ValueError(
            f"num_key_value_heads must be num_attention_heads {heads.num}, as each head has its own key from "
            f"the latent, got {num_keys}; nearest: {heads.num}"
        )


MLP_KINDS, _DENSE, _SPARSE = "mlp_layer_types", "dense", "sparse"
EXAMPLE = EXAMPLE_LLM | {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V2 = LanguageModel(
    name="DeepSeek-V2",
    model_type="deepseek_v2",
    check_config=_check_v2,
    examples={"deepseek-v2": Example(config=EXAMPLE | {"topk_method": _GROUPED})},
    make=partial(deepseek_like, sizes=_V2, scores=WIDE_SOFTMAX),
    width_holds_heads=True,
)
DEEPSEEK_V3 = LanguageModel(
    name="DeepSeek-V3",
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    check_config=_check_v3,
    examples={"deepseek-v3": Example(config=EXAMPLE)},
    make=_v3,
)
GLM4_MOE_LITE = LanguageModel(
    name="GLM-4.7-Flash",
    model_type="glm4_moe_lite",
    check_config=_check_lite,
    examples={
        "glm-4.7-flash": Example(
            config={key: value for key, value in EXAMPLE.items() if key != FIRST_DENSE}
            | {MLP_KINDS: [_DENSE, _DENSE, _SPARSE, _SPARSE]}
        )
    },
    make=_lite,
)
