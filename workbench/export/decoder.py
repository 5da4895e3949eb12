"""The language model of a plan as training systems specify it, inferred from its layers and its source."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from workbench.model.config_fields import flag
from workbench.model.experts import EXPERT, JOIN, SCORES, SHARED, num_experts
from workbench.model.latent_attention import KV_DOWN, KV_UP, LATENT_NORMS, Q_DOWN, LatentHeads
from workbench.model.layer import Attention, Layer, LayerKind, Lookup, Matmul, Operator, Pointwise, Recurrence
from workbench.model.model_graph import Module
from workbench.model.short_conv import has_short_conv
from workbench.model.transformer import GATE, is_rms

USUAL_ROPE_BASE = 10000.0
_SUMS_TO_ONE = {"qwen3_moe": False}  # default of `norm_topk_prob` in a configuration
_BASES = {"mixtral": 1e6, "gpt_oss": 150000.0}  # default of `rope_theta` in a configuration
_SCALINGS: Mapping[str, Mapping[str, Any]] = {  # default of `rope_parameters` in a configuration
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
}
_PRE_NORM = ("attention_norm", "mlp_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder of equal blocks with pre-norm.

    Args:
        family: `model_type` of its source; empty without one.
        num_blocks: transformer layers.
        width, ffn, vocab: of the hidden state, of the MLP or of one expert, of the table.
        num_heads, num_kv_heads, head_dim: of attention.
        activation: its name in the plan, such as "silu".
        is_gated, is_rms, is_tied, is_rotary: MLP with a gate, RMS norms, head with the table, positions.
        qkv_bias, out_bias, mlp_bias: which products have a bias.
        qk_norm: norms of every head's queries and keys.
        eps: of its norms; None: not stated.
        rope_base: base frequency of the rotation.
        rope_scaling: as in the configuration; empty: none.
        source: its configuration; empty without one.
        most_positions: that it is built for; None: not stated.
        window: tokens that a query sees, its own among them; None: all before it.
        slides: by block, whether it has that window.
        has_sinks: whether the softmax's denominator has a learned number for each head.
        num_experts, experts_per_token: 0 without experts.
        latent: sizes of latent attention; None: queries, keys and values come from the hidden state.
        num_dense, dense_ffn: first blocks with an MLP before those with experts, and its width.
        shared_ffn: width of the expert for all tokens; 0: there is none.
        sums_to_one: whether the weights of a token's experts sum to one, instead of those of all experts.
    """

    family: str
    num_blocks: int
    width: int
    ffn: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    is_gated: bool
    is_rms: bool
    is_tied: bool
    is_rotary: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eps: float | None
    rope_base: float
    rope_scaling: Mapping[str, Any]
    source: Mapping[str, Any]
    most_positions: int | None
    window: int | None
    slides: tuple[bool, ...]
    has_sinks: bool
    num_experts: int = 0
    experts_per_token: int = 0
    sums_to_one: bool = True
    latent: LatentHeads | None = None
    num_dense: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0


def decoder_of(module: Module) -> Decoder:
    """The module's sizes.

    Raises:
        ValueError: blocks that differ, or have another structure; the message is that part alone.
    """
    blocks = [layer for layer in module.layers if layer.kind is LayerKind.BLOCK]
    block = blocks[-1]
    if any(map(_attends_to_chosen_keys, blocks)):
        raise ValueError(f"blocks of {module.name!r} with learned sparse attention")
    num_dense = _num_dense(module, blocks)
    _check_block(module, block)
    config = config_of(module)
    attention = _attention(block)
    products = {op.name: op for op in block.operators if isinstance(op, Matmul)}
    mlp_products = {name.split(".")[-1]: op for name, op in products.items() if _is_routed(name)}
    latent = _latent_heads(products, attention)
    qkv = next(products[name] for name in ("q_proj", "qkv_proj", "q_up_proj") if name in products)
    table = next(op for op in module.layers[0].operators if isinstance(op, Lookup))
    family = "" if module.source is None else module.source.architecture
    rope: Mapping[str, Any] = (
        config.get("rope_parameters") or config.get("rope_scaling") or _SCALINGS.get(family, {})
    )
    base = rope.get("rope_theta", config.get("rope_theta", _BASES.get(family, USUAL_ROPE_BASE)))
    experts = num_experts(block)
    windows = [_attention(layer).window for layer in blocks]
    return Decoder(
        family=family,
        num_blocks=len(blocks),
        width=block.out_width,
        ffn=mlp_products["down"].in_features,
        vocab=table.num_rows,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        activation=_activation(block.operators),
        is_gated=bool(mlp_products.keys() & {"gate", "gate_up"}),
        is_rms=is_rms(_norm(block)),
        is_tied=any(layer.tied for layer in module.layers),
        is_rotary=latent is not None or any(op.name == "rotary" for op in block.operators),
        qkv_bias=qkv.bias,
        out_bias=products["o_proj"].bias,
        mlp_bias=mlp_products["down"].bias,
        qk_norm=any(op.name == "q_norm" for op in block.operators),
        eps=next((config[key] for key in _EPS if key in config), None),
        rope_base=float(base),
        rope_scaling={} if rope.get("rope_type", rope.get("type", "default")) == "default" else rope,
        source=config,
        most_positions=config.get("max_position_embeddings"),
        window=next((window for window in windows if window is not None), None),
        slides=tuple(window is not None for window in windows),
        has_sinks=attention.has_sinks,
        num_experts=experts,
        experts_per_token=round(experts * mlp_products["down"].tokens_scale) if experts else 0,
        latent=latent,
        num_dense=num_dense,
        dense_ffn=_in_features(blocks[0], "mlp.down") if num_dense else 0,
        shared_ffn=_in_features(block, f"{SHARED}.down"),
        sums_to_one=flag(config, "norm_topk_prob", default=_SUMS_TO_ONE.get(family, True)),
    )


def _num_dense(module: Module, blocks: Sequence[Layer]) -> int:
    """The number of first blocks with an MLP before those with experts, all with latent attention."""
    dense = list(takewhile(lambda layer: not num_experts(layer), blocks))
    num_dense = len(dense) if len(dense) < len(blocks) else 0
    shapes = _but_for_windows(blocks)
    kinds = set(shapes[:num_dense]), set(shapes[num_dense:])
    is_latent = any(op.name == KV_DOWN for op in blocks[0].operators)
    if any(len(kind) > 1 for kind in kinds) or (num_dense and not is_latent):
        raise ValueError(f"blocks of {module.name!r} that differ from each other")
    return num_dense


def _attention(block: Layer) -> Attention:
    return next(op for op in block.operators if isinstance(op, Attention))


def _but_for_windows(blocks: Sequence[Layer]) -> list[tuple[Operator, ...]]:
    """The operators of each block, without windows if only some have one, and that is the same."""
    windows = {op.window for layer in blocks for op in layer.operators if isinstance(op, Attention)}
    if len(windows) != 2 or None not in windows:
        return [layer.operators for layer in blocks]
    return [
        tuple(replace(op, window=None) if isinstance(op, Attention) else op for op in layer.operators)
        for layer in blocks
    ]


def _is_routed(name: str) -> bool:
    return name.startswith("mlp.") and not name.startswith(SHARED)


def _in_features(block: Layer, name: str) -> int:
    """Of a product; 0 without it."""
    return next((op.in_features for op in block.operators if isinstance(op, Matmul) and op.name == name), 0)


def _latent_heads(products: Mapping[str, Matmul], attention: Attention) -> LatentHeads | None:
    if KV_DOWN not in products:
        return None
    kv_rank = products[KV_UP].in_features
    rope_dim = products[KV_DOWN].out_features - kv_rank
    return LatentHeads(
        num=attention.num_heads,
        q_rank=products[Q_DOWN].out_features if Q_DOWN in products else 0,
        kv_rank=kv_rank,
        nope_dim=attention.head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=attention.value_dim or attention.head_dim,
        bias=products[KV_DOWN].bias,
    )


_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")


def config_of(module: Module) -> dict[str, Any]:
    """The transformers configuration that the module was built from; empty without one."""
    config: dict[str, Any] = {} if module.source is None else json.loads(module.source.config)
    return config


def _check_block(module: Module, block: Layer) -> None:
    names = [op.name for op in block.operators]
    rule = next((op for op in block.operators if isinstance(op, Recurrence)), None)
    if rule is not None:
        raise ValueError(f"blocks of {module.name!r} with {rule.title}")
    if has_short_conv(block.operators):
        raise ValueError(f"blocks of {module.name!r} with short convolutions")
    if GATE in names:
        raise ValueError(f"attention of {module.name!r} with gates")
    norms = [op.name for op in block.operators if isinstance(op, Pointwise) and op.name.endswith("_norm")]
    outer = [name for name in norms if name not in ("q_norm", "k_norm", *LATENT_NORMS)]
    if outer != list(_PRE_NORM) or names[0] != _PRE_NORM[0]:
        raise ValueError(f"blocks of {module.name!r} with norms elsewhere than before attention and MLP")
    if sum(isinstance(op, Attention) for op in block.operators) != 1:
        raise ValueError(f"blocks of {module.name!r} with several attentions")
    if KV_DOWN not in names and any(op.name.startswith(SHARED) for op in block.operators):
        raise ValueError(f"blocks of {module.name!r} with an expert for all tokens")


def _attends_to_chosen_keys(block: Layer) -> bool:
    return any(isinstance(op, Attention) and op.top_k is not None for op in block.operators)


def _norm(block: Layer) -> Pointwise:
    return next(op for op in block.operators if isinstance(op, Pointwise) and op.name == "mlp_norm")


def _activation(operators: tuple[Operator, ...]) -> str:
    """The suffix after the last dot of the MLP's pointwise operator."""
    inner = (op for op in operators if isinstance(op, Pointwise) and op.name.startswith("mlp."))
    own = (op.name for op in inner if op.name not in (*SCORES, JOIN))
    ends = (name.rpartition(".")[2] for name in own if name.startswith(EXPERT) or name.count(".") == 1)
    return next(ends)
