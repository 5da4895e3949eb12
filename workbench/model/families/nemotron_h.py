"""Nemotron-H: blocks that are a Mamba-2 mixer, attention without positions, an MLP, or experts."""

from collections.abc import Callable, Mapping
from typing import Any

from workbench.model.config_fields import Config, count, flag, heads_of, text, whole
from workbench.model.experts import SIGMOID, Experts, expert_operators
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.grouped_router import check_groups
from workbench.model.layer import Layer, LayerKind, Operator
from workbench.model.mamba import Mamba, mamba_operators
from workbench.model.module_layers import MOST_BLOCKS, lm_head, token_embedding
from workbench.model.transformer import Mlp, Norm, attention_operators, mixer_operators, mlp_operators

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
OF_LETTER = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
OF_NAME = {kind: kind for kind in OF_LETTER.values()} | {"mamba": MAMBA, "attention": ATTENTION}
_LISTED = "layers_block_type"  # `layer_types` is its alias
_PATTERN = "hybrid_override_pattern"
_DEFAULT = (MAMBA, EXPERTS, ATTENTION, MLP)
_OTHER_KEYS = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "chunk_size": "mamba_chunk_size"}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_WIDTH = 4096


def letter_of(kind: str) -> str:
    """The letter that stands for a kind of block in a pattern."""
    return next(letter for letter, each in OF_LETTER.items() if each == kind)


def _nemotron_h(config: Config) -> Layers:
    if flag(config, "tie_word_embeddings"):
        raise ValueError("nemotron_h: tie_word_embeddings must be false, its head has weights of its own")
    vocab, width = whole(config, "vocab_size", 131072), whole(config, "hidden_size", _WIDTH)
    kinds = kinds_of(config)
    operators = {kind: _MIXERS[kind](config, width) for kind in dict.fromkeys(kinds)}
    blocks = tuple(
        Layer(name=f"block.{index}", kind=LayerKind.BLOCK, operators=operators[kind], out_width=width)
        for index, kind in enumerate(kinds)
    )
    return (token_embedding(vocab, width), *blocks, lm_head(vocab, width, Norm.RMS))


def kinds_of(config: Config) -> tuple[str, ...]:
    """[blocks] the kind of each one: as listed, else by the pattern's letters.

    Raises:
        ValueError: an unknown kind, or no or too many blocks.
    """
    key = _PATTERN if config.get(_LISTED) is None else _LISTED
    given = config.get(key)
    if given is None:
        return _DEFAULT
    is_pattern = key == _PATTERN
    known = OF_LETTER if is_pattern else OF_NAME
    is_listed = isinstance(given, str if is_pattern else list | tuple) and 0 < len(given) <= MOST_BLOCKS
    if not is_listed or not all(isinstance(each, str) and each in known for each in given):
        wanted = " or ".join(OF_LETTER) if is_pattern else " or ".join(OF_LETTER.values())
        raise ValueError(f"nemotron_h: {key} must be {wanted} for each block, got {given!r:.80}")
    return tuple(known[each] for each in given)


def _mamba(config: Config, width: int) -> tuple[Operator, ...]:
    sizes = dict(config) | {key: config[other] for key, other in _OTHER_KEYS.items() if other in config}
    bias = flag(config, "mamba_conv_bias", default=flag(config, "use_conv_bias", default=True))
    mamba = Mamba(
        num=whole(config, "mamba_num_heads", 128),
        groups=whole(sizes, "n_groups", 8),
        state=whole(config, "ssm_state_size", 128),
        dim=whole(config, "mamba_head_dim", 64),
        kernel=whole(sizes, "conv_kernel", 4),
        chunk=whole(sizes, "chunk_size", 128),
        bias=flag(config, "use_bias"),
        conv_bias=bias,
    )
    return mixer_operators("attention", width, mamba_operators(width, mamba))


def _attention(config: Config, width: int) -> tuple[Operator, ...]:
    num = whole(config, "num_attention_heads", 32)
    num_kv = whole(config, "num_key_value_heads", 8)
    heads = heads_of({"head_dim": 128, **config}, width=width, num=num, num_kv=num_kv)
    return mixer_operators("attention", width, attention_operators(width, heads))


def _mlp_of(config: Config, key: str, default: int) -> Mlp:
    """An MLP without a gate."""
    activation = text(config, "mlp_hidden_act", "relu2")
    return Mlp(
        width=whole(config, key, default), gated=False, activation=activation, bias=flag(config, "mlp_bias")
    )


def _mlp(config: Config, width: int) -> tuple[Operator, ...]:
    mlp = _mlp_of(config, "intermediate_size", 21504)
    return mixer_operators("mlp", width, mlp_operators("mlp", width, mlp))


def _experts(config: Config, width: int) -> tuple[Operator, ...]:
    latent = None if config.get("moe_latent_size") is None else whole(config, "moe_latent_size")
    shared = _mlp_of(config, "moe_shared_expert_intermediate_size", 7688)
    if latent is not None and shared.bias:
        raise ValueError("nemotron_h: mlp_bias must be false where experts are latent (moe_latent_size)")
    experts = Experts(
        num=count(config, "n_routed_experts", _ROUTED["n_routed_experts"]),
        num_chosen=whole(config, "num_experts_per_tok", _ROUTED["num_experts_per_tok"]),
        mlp=_mlp_of({**config, "mlp_bias": False}, "moe_intermediate_size", 7688),
        shared=shared,
        scores=SIGMOID,
        latent=latent,
    )
    return mixer_operators("mlp", width, expert_operators(width, experts))


_MIXERS: Mapping[str, Callable[[Config, int], tuple[Operator, ...]]] = {
    MAMBA: _mamba,
    ATTENTION: _attention,
    MLP: _mlp,
    EXPERTS: _experts,
}


def _check(config: Config) -> None:
    """Raise ValueError for groups with too few experts."""
    if EXPERTS in kinds_of(config):
        check_groups(config, _ROUTED)


_EXAMPLE: dict[str, Any] = EXAMPLE_LLM | {
    "head_dim": 32,
    "n_routed_experts": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 32,
}
_SPARSE = {
    "hybrid_override_pattern": "ME*E",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 176,
    "moe_shared_expert_intermediate_size": 352,
    "routed_scaling_factor": 2.5,
}
NEMOTRON_H = LanguageModel(
    name="Nemotron-H",
    model_type="nemotron_h",
    check_config=_check,
    examples={
        "nemotron-h": Example(config=_EXAMPLE | {"layers_block_type": [MAMBA, MLP, MAMBA, ATTENTION]}),
        "nemotron-h with experts": Example(config=_EXAMPLE | _SPARSE),
        "nemotron-h with latent experts": Example(config=_EXAMPLE | _SPARSE | {"moe_latent_size": 64}),
    },
    make=_nemotron_h,
)
