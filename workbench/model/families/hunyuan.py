"""Hunyuan V1, dense and with experts: norms of heads after their rotation, which may be stretched."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, attention_bias, count, text, whole
from workbench.model.experts import Experts
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.families.positions import check_fixed_positions, rope_of
from workbench.model.transformer import Mlp, Norm

_SIZES = default_sizes(290943, 4096, 11008, 32, 32)


def _outline(config: Config) -> Layers:
    """Norms follow the rotation; their order is no different work."""
    heads = {"bias": attention_bias(config), "qk_norm": Norm.RMS}
    return llama_like(config, defaults=_SIZES, heads=heads, mlp={})


def _mixture(config: Config) -> Layers:
    """An MLP for all tokens beside the experts of every block."""
    width = whole(config, "intermediate_size", _SIZES["intermediate_size"])
    mlp = Mlp(width=width, gated=True, activation=text(config, "hidden_act", "silu"))
    experts = Experts(
        num=count(config, "num_experts", 1),
        num_chosen=whole(config, "moe_topk", 1),
        mlp=replace(mlp, fused=True),
        shared=mlp,
    )
    return sparse(_outline(config), experts)


def _check(config: Config) -> None:
    """Raise ValueError for heads without a width, and for positions that depend on a batch.

    Those called dynamic do not where they have an alpha.
    """
    if config.get("head_dim") is None:
        share = whole(config, "hidden_size", 4096) // whole(config, "num_attention_heads", 32)
        raise ValueError(f"{config['model_type']}: head_dim must be given to run; nearest: {share}")
    rope: Mapping[str, Any] = rope_of(config)
    is_stretched = rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha")
    check_fixed_positions({**config, "rope_parameters": {}, "rope_scaling": {}} if is_stretched else config)


_EXAMPLE = EXAMPLE_LLM | {
    "head_dim": 32,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0, "factor": 1.0},
}
HUNYUAN = LanguageModel(
    name="Hunyuan V1",
    model_type="hunyuan_v1_dense",
    check_config=_check,
    examples={"hunyuan v1": Example(config=_EXAMPLE)},
    make=_outline,
)
HUNYUAN_MOE = LanguageModel(
    name="Hunyuan V1 with experts",
    model_type="hunyuan_v1_moe",
    check_config=_check,
    examples={
        "hunyuan v1 with experts": Example(
            config=_EXAMPLE | {"intermediate_size": 96, "num_experts": 4, "moe_topk": 2}
        )
    },
    make=_mixture,
)
