"""Latent attention, and the routers that DeepSeek-V3 has with it, as fields of megatron-core.

Source: megatron-core 0.19.2 (Apache-2.0): transformer/multi_latent_attention.py, moe/moe_utils.py.
"""

from typing import Any

from workbench.export.decoder import Decoder
from workbench.export.scaled_positions import SCALES, USUAL, inexpressible_yarn, yarn_of
from workbench.export.trained import Trained
from workbench.model.families.deepseek import V3_SIZES

_ROUTER = V3_SIZES | {"routed_scaling_factor": 2.5}  # defaults of a configuration
_LATENT_EPS = 1e-6  # of the latents' norms, whatever the configuration states for the others


def inexpressible_latent(trained: Trained, decoder: Decoder) -> str | None:
    """What megatron-core lacks of a model with latent attention; None: nothing."""
    name, latent, config = trained.model.llm.name, decoder.latent, decoder.source
    assert latent is not None, "the caller asks of these alone"
    groups, within = (_setting(decoder, key) for key in ("n_group", "topk_group"))
    other_eps = decoder.eps not in (None, _LATENT_EPS)
    parts = {
        f"norms of the latents of {name!r} with another epsilon than other norms": other_eps,
        f"latent attention of {name!r} beside other modules": len(trained.model.modules) > 1,
        f"latent attention of {name!r} with biases": latent.bias or decoder.out_bias,
        f"rotated halves instead of pairs of {name!r}": not config.get("rope_interleave", True),
    }
    if decoder.num_experts:
        is_grouped = groups > 1 and decoder.experts_per_token // within != 2  # of a group's score
        not_one = not decoder.sums_to_one or decoder.experts_per_token == 1
        parts |= {
            f"weights of a token's experts of {name!r} that do not sum to one": not_one,
            f"groups of experts of {name!r} ranked by two experts' scores": is_grouped,
        }
    return next((part for part, is_so in parts.items() if is_so), None) or inexpressible_yarn(decoder)


def without_flags(decoder: Decoder) -> str | None:
    """A field whose value no flag of Megatron-LM sets; None: all have their defaults."""
    for key, value in latent_yarn_words(decoder).items():
        if value != USUAL[key]:
            return f"{key} {value} of scaled positions, not {USUAL[key]}"
    return None


def latent_yarn_words(decoder: Decoder) -> dict[str, Any]:
    """Fields of `MLATransformerConfig` for scaled positions that have no flags; empty without scaling."""
    scaling = yarn_of(decoder)
    return {key: scaling[key] for key in USUAL} if decoder.latent is not None and scaling else {}


def latent_words(decoder: Decoder) -> dict[str, Any]:
    """Fields of `MLATransformerConfig` that differ from those of other decoders and have flags."""
    latent, scaling = decoder.latent, yarn_of(decoder)
    assert latent is not None, "the caller asks of these alone"
    words: dict[str, Any] = {
        "multi_latent_attention": True,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "qk_layernorm": True,  # norms of the latents
        "layernorm_epsilon": _LATENT_EPS,
        "rope_type": "yarn" if scaling else "rope",
    }
    if latent.q_rank:
        words["q_lora_rank"] = latent.q_rank
    if scaling:
        words["rotary_scaling_factor"] = float(scaling["factor"])
        words |= {key: float(scaling[key]) for key in SCALES if key in scaling}
    return words | (_router_words(decoder) if decoder.num_experts else {})


def _router_words(decoder: Decoder) -> dict[str, Any]:
    """The correction of a router's choice stays as it is, and no loss balances experts."""
    words: dict[str, Any] = {
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(_setting(decoder, "routed_scaling_factor")),
        "moe_router_dtype": "fp32",
    }
    if _setting(decoder, "n_group") > 1:
        words["moe_router_num_groups"] = _setting(decoder, "n_group")
        words["moe_router_group_topk"] = _setting(decoder, "topk_group")
    if decoder.shared_ffn:
        words["moe_shared_expert_intermediate_size"] = decoder.shared_ffn
    if decoder.num_dense:
        rest = decoder.num_blocks - decoder.num_dense
        words["ffn_hidden_size"] = decoder.dense_ffn
        words["moe_layer_freq"] = [0] * decoder.num_dense + [1] * rest
    return words


def _setting(decoder: Decoder, key: str) -> Any:
    stated = decoder.source.get(key)
    return _ROUTER[key] if stated is None else stated
