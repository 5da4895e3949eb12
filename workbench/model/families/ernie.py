"""ERNIE 4.5, dense and with experts: heads rotate pairs of neighbours; one key gives all products a bias."""

from collections.abc import Mapping
from typing import Any

from workbench.model.config_fields import Config, count, flag, text, whole
from workbench.model.experts import WIDE_SOFTMAX, Experts
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.transformer import Mlp

_DENSE = default_sizes(
    103424, 1024, 3072, 18, 16, num_key_value_heads=2, head_dim=128, tie_word_embeddings=True
)
_SPARSE = default_sizes(103424, 2560, 12288, 28, 20, num_key_value_heads=4, tie_word_embeddings=True)


def _outline(config: Config, sizes: Mapping[str, Any], *, head_bias: bool = False) -> Layers:
    has_bias = flag(config, "use_bias")
    heads = {"bias": "qkvo" if has_bias else ""}
    return llama_like(config, defaults=sizes, heads=heads, mlp={"bias": has_bias}, head_bias=head_bias)


def _ernie4_5_moe(config: Config) -> Layers:
    """Experts, and one for all tokens, in every n-th block from one to another; experts have no biases.

    The correction of a router's choice is no weight.
    """
    has_bias = flag(config, "use_bias")
    width, activation = whole(config, "moe_intermediate_size", 1536), text(config, "hidden_act", "silu")
    num_shared = _number(config, "moe_num_shared_experts", 2)
    shared = Mlp(width=max(1, width * num_shared), gated=True, activation=activation, bias=has_bias)
    experts = Experts(
        num=count(config, "moe_num_experts", 64),
        num_chosen=whole(config, "moe_k", 6),
        mlp=Mlp(width=width, gated=True, activation=activation, fused=True),
        scores=WIDE_SOFTMAX,
        shared=shared if num_shared else None,
    )
    plain = _outline(config, _SPARSE, head_bias=has_bias)
    step, first = whole(config, "moe_layer_interval", 1), _number(config, "moe_layer_start_index", 1)
    stated = _number(config, "moe_layer_end_index", 27)
    last = len(plain) if stated == -1 else stated
    return sparse(plain, experts, lambda block: first <= block <= last and (block + 1) % step == 0)


def _number(config: Config, key: str, default: int) -> int:
    """A whole number that may be 0, or -1 where it means the last block."""
    value = config.get(key)
    return default if value is None else 0 if value == 0 else -1 if value == -1 else whole(config, key)


_EXAMPLE = EXAMPLE_LLM | {"head_dim": 32, "pad_token_id": 0, "use_bias": True}
ERNIE4_5 = LanguageModel(
    name="ERNIE 4.5",
    model_type="ernie4_5",
    examples={"ernie 4.5": Example(config=_EXAMPLE | {"tie_word_embeddings": True})},
    make=lambda config: _outline(config, _DENSE),
)
ERNIE4_5_MOE = LanguageModel(
    name="ERNIE 4.5 with experts",
    model_type="ernie4_5_moe",
    examples={
        "ernie 4.5 with experts": Example(
            config=_EXAMPLE
            | {
                "moe_num_experts": 4,
                "moe_k": 2,
                "moe_intermediate_size": 96,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": -1,
            }
        )
    },
    make=_ernie4_5_moe,
)
