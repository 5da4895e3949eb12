"""GLM's language models: a part of every head is rotated; norms around each part of a block, or experts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workbench.model.config_fields import Config, count, flag, number, text, whole
from workbench.model.experts import SIGMOID, Experts
from workbench.model.families.decoder import default_sizes, llama_like
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.mixtures import sparse
from workbench.model.families.positions import check_axes, check_causal_positions, rope_of
from workbench.model.transformer import Mlp, Norm, Placement

_SECTION = (8, 12, 12)  # angles of time, row and column
_HALF = 0.5  # of a head is rotated
_DENSE = default_sizes(151552, 4096, 13696, 40, 32, num_key_value_heads=2)
_SPARSE = default_sizes(151552, 4096, 10944, 46, 96, num_key_value_heads=8)
_SPARSE_VISION = _SPARSE | {"vocab_size": 151424}

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
    if whole(config, "head_dim", share) != share:
        raise ValueError(
            f"{config['model_type']}: head_dim must be {share}, the width of {config.get('hidden_size')} "
            f"over its heads, got {config['head_dim']}; nearest: {share}"
        )
    return share


def _head_of_sparse(config: Config) -> int:
    return whole(config, "head_dim", _share(config, _SPARSE))


def _rotary_dim(config: Config, head_dim: int, default: float) -> int:
    """Numbers of a head that are rotated, in pairs."""
    rope = rope_of(config)
    known = config if rope.get("partial_rotary_factor") is None else rope
    share = number({"model_type": config["model_type"], **known}, "partial_rotary_factor", default)
    rotated = int(head_dim * share)
    return rotated + rotated % 2


def _dense(config: Config, head_dim: HeadDim, default: float) -> Layers:
    """Norms before and after attention and MLP; only queries, keys and values have biases."""
    width = head_dim(config)
    has_bias = config["model_type"] == "glm4v_text" or flag(config, "attention_bias", default=True)
    return llama_like(
        {**config, "head_dim": width},
        defaults=_DENSE,
        heads={"bias": "qkv" if has_bias else "", "rotary_dim": _rotary_dim(config, width, default)},
        mlp={"fused": True},
        block={"placement": Placement.SANDWICH},
    )


def _mixture(config: Config, sizes: Mapping[str, Any], *, has_bias: bool) -> Layers:
    """Blocks with routed experts and a shared one, after some with an MLP.

    Args:
        sizes: defaults of the configuration.
        has_bias: whether queries, keys and values have biases where nothing says it.
    """
    width = _head_of_sparse(config)
    heads = {
        "bias": "qkv" if flag(config, "attention_bias", default=has_bias) else "",
        "rotary_dim": _rotary_dim(config, width, _HALF),
        "qk_norm": Norm.RMS if flag(config, "use_qk_norm") else None,
    }
    plain = llama_like({**config, "head_dim": width}, defaults=sizes, heads=heads, mlp={})
    num_dense = _num_dense(config)
    return sparse(plain, _experts(config), lambda block: block >= num_dense)


def _experts(config: Config) -> Experts:
    width = whole(config, "moe_intermediate_size", 1408)
    activation = text(config, "hidden_act", "silu")
    return Experts(
        num=count(config, "n_routed_experts", 128),
        num_chosen=whole(config, "num_experts_per_tok", 8),
        mlp=Mlp(width=width, gated=True, activation=activation, fused=True),
        scores=SIGMOID,
        shared=Mlp(width=width * whole(config, "n_shared_experts", 1), gated=True, activation=activation),
    )


def _num_dense(config: Config) -> int:
    """The number of first blocks without experts, which may be 0."""
    key = "first_k_dense_replace"
    return 0 if config.get(key) == 0 else whole(config, key, 1)


def _check(config: Config, head_dim: HeadDim, default: float, *, has_axes: bool) -> None:
    """Raise ValueError for rotations that the runtime does not support, as `check_fixed_positions`.

    Args:
        default: share of a head that is rotated where nothing says it.
        has_axes: whether positions have three axes.
    """
    check_causal_positions(config)
    if has_axes:
        half = _rotary_dim(config, head_dim(config), default) // 2
        check_axes(rope_of(config).get("mrope_section", _SECTION), half, "half of a head's rotated part")


def _check_sparse(config: Config, *, has_axes: bool) -> None:
    """As `_check`, and for groups of experts from which a token cannot choose."""
    _check(config, _head_of_sparse, _HALF, has_axes=has_axes)
    num, groups = count(config, "n_routed_experts", 128), whole(config, "n_group", 1)
    per_group, rest = divmod(num, groups)
    if rest or per_group < 2:
        raise ValueError(
            f"{config['model_type']}: n_group must divide {num} experts into groups of 2 or more, got "
            f"{groups}; nearest: 1"
        )
    chosen, within = whole(config, "num_experts_per_tok", 8), whole(config, "topk_group", 1)
    if within > groups or chosen > within * per_group:
        raise ValueError(
            f"{config['model_type']}: topk_group must be at most n_group {groups}, and so many groups have "
            f"the {chosen} experts of a token, got {within}; nearest: {groups}"
        )


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
    check_config=partial(_check, head_dim=_head_of_glm4, default=_HALF, has_axes=False),
    examples={"glm-4": Example(config=EXAMPLE_LLM | _ROTATED | {"head_dim": 32, "pad_token_id": 0})},
    make=partial(_dense, head_dim=_head_of_glm4, default=_HALF),
)
GLM4V_TEXT = LanguageModel(
    name="GLM-4.1V text",
    model_type="glm4v_text",
    check_config=partial(_check, head_dim=_head_of_text, default=1.0, has_axes=True),
    examples={"glm-4.1v text": Example(config=EXAMPLE_LLM | _AXES)},
    make=partial(_dense, head_dim=_head_of_text, default=1.0),
)
GLM4_MOE = LanguageModel(
    name="GLM-4.5",
    model_type="glm4_moe",
    check_config=partial(_check_sparse, has_axes=False),
    examples={"glm-4.5": Example(config=EXAMPLE_LLM | _ROTATED | _MIXED | {"use_qk_norm": True})},
    make=partial(_mixture, sizes=_SPARSE, has_bias=False),
)
GLM4V_MOE_TEXT = LanguageModel(
    name="GLM-4.5V text",
    model_type="glm4v_moe_text",
    check_config=partial(_check_sparse, has_axes=True),
    examples={"glm-4.5v text": Example(config=EXAMPLE_LLM | _AXES | _MIXED)},
    make=partial(_mixture, sizes=_SPARSE_VISION, has_bias=True),
)
