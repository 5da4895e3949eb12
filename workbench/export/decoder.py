"""The language model of a plan as training systems specify it, inferred from its layers and its source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.model.config_fields import flag
from workbench.model.experts import EXPERT, JOIN, SHARED, SIGMOID, SOFTMAX, num_experts
from workbench.model.latent_attention import KV_DOWN
from workbench.model.layer import Attention, DeltaRule, Layer, LayerKind, Lookup, Matmul, Operator, Pointwise
from workbench.model.model_graph import Module
from workbench.model.short_conv import has_short_conv
from workbench.model.transformer import GATE, is_rms

USUAL_ROPE_BASE = 10000.0
_SUMS_TO_ONE = {"qwen3_moe": False}  # default of `norm_topk_prob` in a configuration
_BASES = {"mixtral": 1e6}  # default of `rope_theta` in a configuration
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
        most_positions: that it is built for; None: not stated.
        window: tokens that a query sees; None: all before it.
        num_experts, experts_per_token: 0 without experts.
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
    most_positions: int | None
    window: int | None
    num_experts: int = 0
    experts_per_token: int = 0
    sums_to_one: bool = True


def decoder_of(module: Module) -> Decoder:
    """The module's sizes.

    Raises:
        ValueError: blocks that differ, or have another structure; the message is that part alone.
    """
    blocks = [layer for layer in module.layers if layer.kind is LayerKind.BLOCK]
    if len({layer.operators for layer in blocks}) > 1:
        raise ValueError(f"blocks of {module.name!r} that differ from each other")
    block = blocks[0]
    _check_block(module, block)
    config = config_of(module)
    attention = next(op for op in block.operators if isinstance(op, Attention))
    products = {op.name: op for op in block.operators if isinstance(op, Matmul)}
    mlp_products = {name.split(".")[-1]: op for name, op in products.items() if name.startswith("mlp.")}
    qkv = products.get("q_proj") or products["qkv_proj"]
    table = next(op for op in module.layers[0].operators if isinstance(op, Lookup))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    family = "" if module.source is None else module.source.architecture
    base = rope.get("rope_theta", config.get("rope_theta", _BASES.get(family, USUAL_ROPE_BASE)))
    experts = num_experts(block)
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
        is_rotary=any(op.name == "rotary" for op in block.operators),
        qkv_bias=qkv.bias,
        out_bias=products["o_proj"].bias,
        mlp_bias=mlp_products["down"].bias,
        qk_norm=any(op.name == "q_norm" for op in block.operators),
        eps=next((config[key] for key in _EPS if key in config), None),
        rope_base=float(base),
        rope_scaling={} if rope.get("rope_type", rope.get("type", "default")) == "default" else rope,
        most_positions=config.get("max_position_embeddings"),
        window=attention.window,
        num_experts=experts,
        experts_per_token=round(experts * mlp_products["down"].tokens_scale) if experts else 0,
        sums_to_one=flag(config, "norm_topk_prob", default=_SUMS_TO_ONE.get(family, True)),
    )


_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")


def config_of(module: Module) -> dict[str, Any]:
    """The transformers configuration that the module was built from; empty without one."""
    config: dict[str, Any] = {} if module.source is None else json.loads(module.source.config)
    return config


def _check_block(module: Module, block: Layer) -> None:
    names = [op.name for op in block.operators]
    if any(isinstance(op, DeltaRule) for op in block.operators):
        raise ValueError(f"blocks of {module.name!r} with linear attention")
    if KV_DOWN in names:
        raise ValueError(f"attention of {module.name!r} with latent queries, keys or values")
    if any(isinstance(op, Attention) and op.has_sinks for op in block.operators):
        raise ValueError(f"attention of {module.name!r} with sinks")
    if has_short_conv(block.operators):
        raise ValueError(f"blocks of {module.name!r} with short convolutions")
    if GATE in names:
        raise ValueError(f"attention of {module.name!r} with gates")
    norms = [op.name for op in block.operators if isinstance(op, Pointwise) and op.name.endswith("_norm")]
    outer = [name for name in norms if name not in ("q_norm", "k_norm")]
    if outer != list(_PRE_NORM) or names[0] != _PRE_NORM[0]:
        raise ValueError(f"blocks of {module.name!r} with norms elsewhere than before attention and MLP")
    if sum(isinstance(op, Attention) for op in block.operators) != 1:
        raise ValueError(f"blocks of {module.name!r} with several attentions")
    if any(op.name.startswith(SHARED) for op in block.operators):
        raise ValueError(f"blocks of {module.name!r} with an expert for all tokens")


def _norm(block: Layer) -> Pointwise:
    return next(op for op in block.operators if isinstance(op, Pointwise) and op.name == "mlp_norm")


def _activation(operators: tuple[Operator, ...]) -> str:
    """The suffix after the last dot of the MLP's pointwise operator."""
    inner = (op for op in operators if isinstance(op, Pointwise) and op.name.startswith("mlp."))
    own = (op.name for op in inner if op.name not in (SOFTMAX, SIGMOID, JOIN))
    ends = (name.rpartition(".")[2] for name in own if name.startswith(EXPERT) or name.count(".") == 1)
    return next(ends)
