"""GLM's language models: a part of every head is rotated; norms around each part of a block, or experts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workbench.model.config_fields import Config, attention_bias, flag, whole
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.grouped_router import check_groups, mixed
from workbench.model.families.positions import (
    check_axes,
    check_causal_positions,
    rope_of,
    rotary_dim,
)
from workbench.model.transformer import Norm, Placement

_SECTION = (8, 12, 12)  # angles of time, row and column
_HALF = 0.5  # of a head is rotated
_DENSE = default_sizes(151552, 4096, 13696, 40, 32, num_key_value_heads=2)
_OCR = default_sizes(59392, 1024, 4096, 16, 16, num_key_value_heads=8)
_SPARSE = default_sizes(151552, 4096, 10944, 46, 96, num_key_value_heads=8, attention_bias=False)
_ROUTED = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SPARSE_VISION = _SPARSE | {"vocab_size": 151424, "attention_bias": True}

HeadDim = Callable[[Config], int]


def _share(config: Config, sizes: Mapping[str, Any]) -> int:
    """Width of a head that shares the hidden width with the others, rounded down."""
    width = whole(config, "hidden_size", sizes["hidden_size"])
    return width // whole(config, "num_attention_heads", sizes["num_attention_heads"])


def _head_of_glm4(config: Config) -> int:
    return whole(config, "head_dim", 128)


def _head_of_text(config: Config) -> int:
    """GLM-4V's attention gives its heads all of the width; another `head_dim` would rotate another part."""
    share = _share(config, _DENSE)
    head_dim = whole(config, "head_dim", share)
    if head_dim != share:
        raise ValueError(
            f"{config['model_type']}: head_dim must be {share}, hidden_size over num_attention_heads, got "
            f"{head_dim}; nearest: {share}"
        )
    return share


def _head_of_ocr(config: Config) -> int:
    return whole(config, "head_dim", _share(config, _OCR))


def _head_of_sparse(config: Config) -> int:
    return whole(config, "head_dim", _share(config, _SPARSE))


def _dense(config: Config, head_dim: HeadDim, default: float, sizes: Mapping[str, Any] = _DENSE) -> Layers:
    """Norms before and after attention and MLP; only queries, keys and values have biases.

    Args:
        default: share of a head that is rotated where nothing says it.
        sizes: defaults of the configuration.
    """
    width = head_dim(config)
    return llama_like(
        {**config, "head_dim": width},
        defaults=sizes,
        heads={
            "bias": attention_bias(config, "qkv", default=True),
            "rotary_dim": rotary_dim(config, width, default),
        },
        mlp={"fused": True},
        block={"placement": Placement.SANDWICH},
    )


def _glm4v_text(config: Config) -> Layers:
    """Always with biases."""
    return _dense({**config, "attention_bias": True}, _head_of_text, 1.0)


def _ocr_text(config: Config) -> Layers:
    """Always without biases."""
    return _dense({**config, "attention_bias": False}, _head_of_ocr, 1.0, _OCR)


def _mixture(config: Config, sizes: Mapping[str, Any]) -> Layers:
    """Blocks with routed experts and a shared one, after some with an MLP; `sizes`: defaults."""
    width = _head_of_sparse(config)
    heads = {
        "bias": attention_bias(config, "qkv", default=sizes["attention_bias"]),
        "rotary_dim": rotary_dim(config, width, _HALF),
        "qk_norm": Norm.RMS if flag(config, "use_qk_norm") else None,
    }
    plain = llama_like({**config, "head_dim": width}, defaults=sizes, heads=heads, mlp={})
    return mixed(config, plain, _ROUTED)


def _check_axes(config: Config, head_dim: HeadDim, default: float) -> None:
    """As `check_fixed_positions`, for three axes that fill the rotated part of a head."""
    check_causal_positions(config)
    half = rotary_dim(config, head_dim(config), default) // 2
    check_axes(rope_of(config).get("mrope_section", _SECTION), half, "half of a head's rotated part")


def _check_sparse(config: Config) -> None:
    """Raise ValueError for positions that depend on a batch, and for groups with too few experts."""
    check_causal_positions(config)
    check_groups(config, _ROUTED)


def _check_sparse_axes(config: Config) -> None:
    _check_axes(config, _head_of_sparse, _HALF)
    _check_sparse(config)


_ROTATED = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": _HALF}}
_AXES = {
    "rope_parameters": {
        "rope_type": "default",
        "partial_rotary_factor": _HALF,
        "mrope_section": [2, 3, 3],
    }
}
_MIXED = {
    "head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "routed_scaling_factor": 1.5,
}
GLM4 = LanguageModel(
    name="GLM-4",
    model_type="glm4",
    check_config=check_causal_positions,
    examples={"glm-4": Example(config=EXAMPLE_LLM | _ROTATED | {"head_dim": 32, "pad_token_id": 0})},
    make=partial(_dense, head_dim=_head_of_glm4, default=_HALF),
)
GLM4V_TEXT = LanguageModel(
    name="GLM-4.1V text",
    model_type="glm4v_text",
    check_config=partial(_check_axes, head_dim=_head_of_text, default=1.0),
    examples={"glm-4.1v text": Example(config=EXAMPLE_LLM | _AXES)},
    make=_glm4v_text,
)
GLM_OCR_TEXT = LanguageModel(
    name="GLM-OCR text",
    model_type="glm_ocr_text",
    check_config=partial(_check_axes, head_dim=_head_of_ocr, default=1.0),
    examples={"glm-ocr text": Example(config=EXAMPLE_LLM | _AXES | {"head_dim": 32})},
    make=_ocr_text,
)
GLM4_MOE = LanguageModel(
    name="GLM-4.5",
    model_type="glm4_moe",
    check_config=_check_sparse,
    examples={"glm-4.5": Example(config=EXAMPLE_LLM | _ROTATED | _MIXED | {"use_qk_norm": True})},
    make=partial(_mixture, sizes=_SPARSE),
)
GLM4V_MOE_TEXT = LanguageModel(
    name="GLM-4.5V text",
    model_type="glm4v_moe_text",
    check_config=_check_sparse_axes,
    examples={"glm-4.5v text": Example(config=EXAMPLE_LLM | _AXES | _MIXED)},
    make=lambda config: _mixture({**config, "use_qk_norm": False}, _SPARSE_VISION),  # a key of GLM-4.5 alone
)
