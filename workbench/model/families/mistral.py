"""Ministral 3 and Mistral Small 4: queries grow with the logarithm of their position beyond a length."""

from collections.abc import Callable
from functools import partial

from workbench.model.config_fields import Config
from workbench.model.experts import WIDE_SOFTMAX
from workbench.model.families.decoder import before_attention, default_sizes, llama_like, windowed
from workbench.model.families.deepseek import check_latent, deepseek_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.grouped_router import check_groups
from workbench.model.families.positions import check_fixed_positions, rope_of
from workbench.model.layer import Attention, Pointwise, Shard
from workbench.model.transformer import QUERY_SCALE

_SIZES = default_sizes(131072, 4096, 14336, 34, 32, num_key_value_heads=8, head_dim=128)
_SPARSE = default_sizes(131072, 4096, 12288, 36, 32) | {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}


def _ministral3(config: Config) -> Layers:
    layers = llama_like(config, defaults=_SIZES, heads={}, mlp={})
    return _scaled(windowed(config, layers, default=None))


def _mistral4(config: Config) -> Layers:
    """DeepSeek-V3's attention and experts, chosen by a softmax over their scores."""
    return _scaled(deepseek_like({**config, "mlp_bias": False}, _SPARSE, WIDE_SOFTMAX))


def _scaled(layers: Layers) -> Layers:
    return tuple(before_attention(layer, _scale_of) for layer in layers)


def _scale_of(attention: Attention) -> Pointwise:
    width = attention.num_heads * attention.head_dim
    return Pointwise(name=QUERY_SCALE, width=width, num_passes=2, shard=Shard.COLUMN)


def _check(config: Config, others: Callable[[Config], None]) -> None:
    """Raise ValueError for positions without what queries are scaled by; `others`: further checks."""
    others(config)
    rope = rope_of(config)
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if rope and rope.get(key) is None:
            raise ValueError(f"{config['model_type']}: rope_parameters.{key} must be given to run")


def _check_mistral4(config: Config) -> None:
    check_groups(config, _SPARSE)
    check_latent(config, _SPARSE)


_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4,
    "max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_EXAMPLE = EXAMPLE_LLM | {"pad_token_id": 0, "max_position_embeddings": 128, "rope_parameters": _ROPE}
MINISTRAL3 = LanguageModel(
    name="Ministral 3",
    model_type="ministral3",
    check_config=partial(_check, others=partial(check_fixed_positions, head_dim=_SIZES["head_dim"])),
    examples={"ministral 3": Example(config=_EXAMPLE | {"head_dim": 32})},
    make=_ministral3,
)
MISTRAL4 = LanguageModel(
    name="Mistral Small 4",
    model_type="mistral4",
    check_config=partial(_check, others=_check_mistral4),
    examples={
        "mistral small 4": Example(
            config=_EXAMPLE
            | {
                "num_key_value_heads": 4,
                "q_lora_rank": 48,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 32,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "moe_intermediate_size": 96,
                "routed_scaling_factor": 1.5,
                "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
            }
        )
    },
    make=_mistral4,
)
