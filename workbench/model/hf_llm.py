"""Language models as transformers builds them: embed, blocks, head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, heads_of, text, whole
from workbench.model.experts import Experts, with_experts
from workbench.model.layer import Layer, Pointwise
from workbench.model.mllama import TEXT_MODEL, text_layers
from workbench.model.module_layers import block_layers, learned_positions, lm_head, token_embedding
from workbench.model.transformer import Block, Mlp, Norm, Placement
from workbench.model.windows import capped, normed, windowed


def _llama_like(
    config: Config,
    *,
    defaults: Mapping[str, int],
    activation: str = "silu",
    tied: bool = False,
    heads: Mapping[str, Any],
    mlp: Mapping[str, Any],
    placement: Placement = Placement.PRE,
) -> tuple[Layer, ...]:
    """RMS norms, rotary grouped-query attention, gated MLP."""
    width = whole(config, "hidden_size", defaults["hidden_size"])
    vocab = whole(config, "vocab_size", defaults["vocab_size"])
    num = whole(config, "num_attention_heads", defaults["num_attention_heads"])
    num_kv = whole(config, "num_key_value_heads", defaults.get("num_key_value_heads", num))
    full = {"head_dim": defaults["head_dim"], **config} if "head_dim" in defaults else config
    if full.get("head_dim", 1) is None:
        full = {key: value for key, value in full.items() if key != "head_dim"}
    attention = heads_of(full, width=width, num=num, num_kv=num_kv)
    ffn = whole(config, "intermediate_size", defaults["intermediate_size"])
    activation = text(config, "hidden_activation", text(config, "hidden_act", activation))
    block = Block(
        width=width,
        heads=replace(attention, rotary=True, **heads),
        mlp=Mlp(width=ffn, gated=True, activation=activation, **mlp),
        norm=Norm.RMS,
        placement=placement,
    )
    is_tied = bool(config.get("tie_word_embeddings", tied))
    scale = (Pointwise(name="scale", width=width, num_passes=2),) if "gemma" in config["model_type"] else ()
    return (
        token_embedding(vocab, width, more=scale, tied=is_tied),
        *block_layers(block, whole(config, "num_hidden_layers", defaults["num_hidden_layers"])),
        lm_head(vocab, width, Norm.RMS, tied=is_tied),
    )


def _defaults(vocab: int, hidden: int, ffn: int, layers: int, heads: int, **more: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def _llama(config: Config) -> tuple[Layer, ...]:
    return _llama_like(
        config,
        defaults=_defaults(32000, 4096, 11008, 32, 32),
        heads={"bias": "qkvo" if config.get("attention_bias") else ""},
        mlp={"bias": bool(config.get("mlp_bias"))},
    )


def _qwen2(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(151936, 4096, 22016, 32, 32, num_key_value_heads=32)
    return windowed(config, _llama_like(config, defaults=defaults, heads={"bias": "qkv"}, mlp={}))


def _mistral(config: Config) -> tuple[Layer, ...]:
    """Work beyond a sliding window is counted; rows are rarely longer than one."""
    defaults = _defaults(32000, 4096, 14336, 32, 32, num_key_value_heads=8)
    return windowed(config, _llama_like(config, defaults=defaults, heads={}, mlp={}))


def _gemma(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(256000, 3072, 24576, 28, 16, num_key_value_heads=16, head_dim=256)
    heads = {"bias": "qkvo" if config.get("attention_bias") else ""}
    return _llama_like(
        config, defaults=defaults, activation="gelu_pytorch_tanh", tied=True, heads=heads, mlp={}
    )


def _gemma2(config: Config) -> tuple[Layer, ...]:
    """Norms around attention and MLP. Work beyond the sliding window of every other layer is counted."""
    layers = _llama_like(
        config,
        defaults=_defaults(256000, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256),
        activation="gelu_pytorch_tanh",
        tied=True,
        heads={"bias": "qkvo" if config.get("attention_bias") else ""},
        mlp={},
        placement=Placement.SANDWICH,
    )
    return capped(config, windowed(config, layers))


def _phi3(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(32064, 3072, 8192, 32, 32)
    layers = _llama_like(config, defaults=defaults, heads={"fused": True}, mlp={"fused": True})
    return windowed(config, layers)


def _phi(config: Config) -> tuple[Layer, ...]:
    width, vocab = whole(config, "hidden_size", 2048), whole(config, "vocab_size", 51200)
    num = whole(config, "num_attention_heads", 32)
    heads = heads_of(config, width=width, num=num, num_kv=whole(config, "num_key_value_heads", num))
    qk_norm = Norm.LAYER if config.get("qk_layernorm") else None
    activation = text(config, "hidden_act", "gelu_new")
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo", rotary=True, qk_norm=qk_norm),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 8192), gated=False, activation=activation, bias=True
        ),
        norm=Norm.LAYER,
        placement=Placement.PARALLEL,
    )
    tied = bool(config.get("tie_word_embeddings", False))
    return (
        token_embedding(vocab, width, tied=tied),
        *block_layers(block, whole(config, "num_hidden_layers", 24)),
        lm_head(vocab, width, Norm.LAYER, tied=tied, bias=True),
    )


def _qwen3(config: Config) -> tuple[Layer, ...]:
    defaults = _defaults(151936, 4096, 22016, 32, 32, num_key_value_heads=32, head_dim=128)
    bias = "qkvo" if config.get("attention_bias") else ""
    layers = _llama_like(config, defaults=defaults, heads={"bias": bias, "qk_norm": Norm.RMS}, mlp={})
    return windowed(config, layers)


def _gemma3(config: Config) -> tuple[Layer, ...]:
    """Gemma 2's outline, with norms of heads in place of soft caps."""
    bias = "qkvo" if config.get("attention_bias") else ""
    layers = _llama_like(
        config,
        defaults=_defaults(262208, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256),
        activation="gelu_pytorch_tanh",
        tied=True,
        heads={"bias": bias, "qk_norm": Norm.RMS},
        mlp={},
        placement=Placement.SANDWICH,
    )
    return capped(config, windowed(config, layers))


def _mixtral(config: Config) -> tuple[Layer, ...]:
    """Every block's MLP becomes a router and experts, of which a token runs a few."""
    defaults = _defaults(32000, 4096, 14336, 32, 32, num_key_value_heads=8)
    plain = _llama_like(config, defaults=defaults, heads={}, mlp={})
    embed, *blocks, head = windowed(config, plain)
    experts = Experts(
        num=whole(config, "num_local_experts", 8),
        num_chosen=whole(config, "num_experts_per_tok", 2),
        mlp=Mlp(
            width=whole(config, "intermediate_size", 14336),
            gated=True,
            activation=text(config, "hidden_act", "silu"),
            fused=True,
        ),
    )
    return (embed, *(with_experts(block, experts) for block in blocks), head)


def _llama4(config: Config) -> tuple[Layer, ...]:
    """Every block's MLP, or every n-th one's, is an expert for all tokens beside chosen ones.

    Work beyond an attention chunk is counted.
    """
    defaults = _defaults(202048, 5120, 8192, 48, 40, num_key_value_heads=8, head_dim=128)
    heads = {"bias": "qkvo" if config.get("attention_bias") else ""}
    dense = whole(config, "intermediate_size_mlp", 16384)
    plain = _llama_like({**config, "intermediate_size": dense}, defaults=defaults, heads=heads, mlp={})
    embed, *blocks, head = normed(config, plain)
    activation = text(config, "hidden_act", "silu")
    width = whole(config, "intermediate_size", 8192)
    experts = Experts(
        num=whole(config, "num_local_experts", 16),
        num_chosen=whole(config, "num_experts_per_tok", 1),
        mlp=Mlp(width=width, gated=True, activation=activation, fused=True),
        shared=Mlp(width=width, gated=True, activation=activation),
    )
    step = whole(config, "interleave_moe_layer_step", 1)
    mixed = config.get("moe_layers")
    places = range(step - 1, len(blocks), step) if mixed is None else mixed
    return (
        embed,
        *(with_experts(block, experts) if i in places else block for i, block in enumerate(blocks)),
        head,
    )


def _opt(config: Config) -> tuple[Layer, ...]:
    """With norms before attention and MLP: the 350M model, which has them behind, is not known."""
    width, vocab = whole(config, "hidden_size", 768), whole(config, "vocab_size", 50272)
    _refuse_other_opt(config, width)
    bias = bool(config.get("enable_bias", True))
    heads = heads_of(config, width=width, num=whole(config, "num_attention_heads", 12))
    activation = text(config, "activation_function", "relu")
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo" if bias else ""),
        mlp=Mlp(width=whole(config, "ffn_dim", 3072), gated=False, activation=activation, bias=bias),
        norm=Norm.LAYER,
    )
    tied = bool(config.get("tie_word_embeddings", True))
    rows = whole(config, "max_position_embeddings", 2048) + 2  # the first position is row 2
    return (
        token_embedding(vocab, width, more=learned_positions(rows, width), tied=tied),
        *block_layers(block, whole(config, "num_hidden_layers", 12)),
        lm_head(vocab, width, Norm.LAYER, tied=tied),
    )


def _refuse_other_opt(config: Config, width: int) -> None:
    wanted = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": width,
    }
    for key, value in wanted.items():
        given = config.get(key)
        if given is not None and given != value:
            raise ValueError(f"opt: {key} must be {value}, got {given!r}")


def _gpt2(config: Config) -> tuple[Layer, ...]:
    width, vocab = whole(config, "n_embd", 768), whole(config, "vocab_size", 50257)
    if config.get("add_cross_attention"):
        raise ValueError("gpt2: add_cross_attention must be false")
    heads = heads_of(config, width=width, num=whole(config, "n_head", 12))
    activation = text(config, "activation_function", "gelu_new")
    block = Block(
        width=width,
        heads=replace(heads, bias="qkvo", fused=True),
        mlp=Mlp(width=whole(config, "n_inner", 4 * width), gated=False, activation=activation, bias=True),
        norm=Norm.LAYER,
    )
    tied = bool(config.get("tie_word_embeddings", True))
    positions = learned_positions(whole(config, "n_positions", 1024), width)
    return (
        token_embedding(vocab, width, name="wte", more=positions, tied=tied),
        *block_layers(block, whole(config, "n_layer", 12)),
        lm_head(vocab, width, Norm.LAYER, tied=tied),
    )


LLMS: dict[str, Callable[[Config], tuple[Layer, ...]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "llama4_text": _llama4,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "opt": _opt,
    TEXT_MODEL: text_layers,
}
