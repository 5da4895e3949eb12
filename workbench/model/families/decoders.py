"""Decoder-only language models with rotary positions: how each family differs from the common structure."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from workbench.model.config_fields import Config, attention_bias, flag, whole
from workbench.model.families.decoder import (
    capped,
    common_config,
    default_sizes,
    llama_like,
    unrotated,
    windowed,
)
from workbench.model.families.family import (
    EXAMPLE_LLM,
    Example,
    LanguageModel,
    Layers,
)
from workbench.model.families.positions import check_fixed_positions
from workbench.model.shape import Shape
from workbench.model.transformer import Norm, Placement

_TIED = ("llama-3.2-1b", "llama-3.2-3b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")


def _llama(config: Config) -> Layers:
    return llama_like(
        config,
        defaults=default_sizes(32000, 4096, 11008, 32, 32),
        heads={"bias": attention_bias(config)},
        mlp={"bias": flag(config, "mlp_bias")},
    )


def _shaped_llama(shape: Shape) -> dict[str, Any]:
    return common_config(shape) | {
        "model_type": "llama",
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0 if "llama-3" in shape.name else 10000.0,
        "tie_word_embeddings": shape.name in _TIED,
    }


LLAMA = LanguageModel(
    name="Llama 2, Llama 3",
    model_type="llama",
    examples={"llama": Example(config=EXAMPLE_LLM)},
    make=_llama,
    shapes={"llama": _shaped_llama},
    width_holds_heads=True,
)


def _mistral(config: Config) -> Layers:
    """Llama's structure with a sliding window; pairs beyond it are priced, as rows are rarely longer."""
    defaults = default_sizes(32000, 4096, 14336, 32, 32, num_key_value_heads=8)
    return windowed(config, llama_like(config, defaults=defaults, heads={}, mlp={}))


def _shaped_mistral(shape: Shape) -> dict[str, Any]:
    return common_config(shape) | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 4096}


MISTRAL = LanguageModel(
    name="Mistral",
    model_type="mistral",
    examples={"mistral": Example(config=EXAMPLE_LLM | {"sliding_window": 64})},
    make=_mistral,
    shapes={"mistral": _shaped_mistral},
)


def _gemma(config: Config) -> Layers:
    defaults = default_sizes(256000, 3072, 24576, 28, 16, num_key_value_heads=16, head_dim=256)
    return _outline(config, defaults)


def _gemma2(config: Config) -> Layers:
    """Norms around attention and MLP, and a sliding window in every other layer."""
    defaults = default_sizes(256000, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256)
    layers = _outline(config, defaults, placement=Placement.SANDWICH)
    layers = windowed(config, layers, slides=lambda block: block % 2 == 0)
    return capped(config, layers, scores=50.0, logits=30.0)


def _gemma3(config: Config) -> Layers:
    """Gemma 2's structure, with norms of heads in place of soft caps."""
    defaults = default_sizes(262208, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256)
    layers = _outline(config, defaults, placement=Placement.SANDWICH, qk_norm=Norm.RMS)
    pattern = whole(config, "sliding_window_pattern", 6)
    return capped(config, windowed(config, layers, slides=lambda block: (block + 1) % pattern != 0))


def _outline(
    config: Config,
    defaults: Mapping[str, Any],
    *,
    placement: Placement = Placement.PRE,
    qk_norm: Norm | None = None,
) -> Layers:
    return llama_like(
        config,
        defaults={**defaults, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        heads={"bias": attention_bias(config), "qk_norm": qk_norm},
        mlp={},
        block={"placement": placement},
        scales_embedding=True,
    )


def _shaped_gemma(shape: Shape) -> dict[str, Any]:
    return common_config(shape) | {
        "model_type": "gemma2",
        "head_dim": shape.head_dim,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }


_SLIDING = EXAMPLE_LLM | {
    "head_dim": 32,
    "sliding_window": 64,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 32,
}
GEMMA = LanguageModel(
    name="Gemma 1",
    model_type="gemma",
    examples={"gemma": Example(config=EXAMPLE_LLM | {"head_dim": 32, "pad_token_id": 0})},
    make=_gemma,
)
GEMMA2 = LanguageModel(
    name="Gemma 2",
    model_type="gemma2",
    examples={"gemma2": Example(config=_SLIDING | {"attn_logit_softcapping": 50.0})},
    make=_gemma2,
    shapes={"gemma": _shaped_gemma},
    width_holds_heads=True,
)
GEMMA3 = LanguageModel(
    name="Gemma 3",
    model_type="gemma3_text",
    examples={"gemma3": Example(config=_SLIDING | {"sliding_window_pattern": 2})},
    make=_gemma3,
    width_holds_heads=True,
)


QWEN3_HEAD = 128  # default width of a head
_QWEN = default_sizes(151936, 4096, 22016, 32, 32, num_key_value_heads=32)
# Differs: positions of three axes are counted as one rotation, as work they are.
_QWEN_VL = default_sizes(152064, 8192, 29568, 80, 64, num_key_value_heads=8)


def _qwen2(config: Config, defaults: Mapping[str, Any] = _QWEN) -> Layers:
    return _windowed(config, llama_like(config, defaults=defaults, heads={"bias": "qkv"}, mlp={}))


def _qwen3(config: Config) -> Layers:
    heads = {"bias": attention_bias(config), "qk_norm": Norm.RMS}
    layers = llama_like(config, defaults={**_QWEN, "head_dim": QWEN3_HEAD}, heads=heads, mlp={})
    return _windowed(config, layers)


def _windowed(config: Config, layers: Layers) -> Layers:
    """Sliding windows, if used, from block `max_window_layers` on."""
    if not flag(config, "use_sliding_window"):
        return windowed(config, layers, slides=lambda _: False)
    first = int(config.get("max_window_layers", 28))
    return windowed(config, layers, slides=lambda block: block >= first)


def _shaped_qwen(shape: Shape) -> dict[str, Any]:
    is_tied = shape.name in _TIED
    return common_config(shape) | {
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "tie_word_embeddings": is_tied,
    }


QWEN2 = LanguageModel(
    name="Qwen2, Qwen2.5",
    model_type="qwen2",
    examples={"qwen2": Example(config=EXAMPLE_LLM | {"tie_word_embeddings": True})},
    make=_qwen2,
    shapes={"qwen2.5": _shaped_qwen},
)
QWEN3 = LanguageModel(
    name="Qwen3",
    model_type="qwen3",
    examples={"qwen3": Example(config=EXAMPLE_LLM | {"head_dim": 32})},
    make=_qwen3,
)
QWEN2_VL_TEXT = LanguageModel(
    name="Qwen2-VL text, Qwen2.5-VL text",
    model_type="qwen2_vl_text",
    aliases=("qwen2_5_vl_text",),
    examples={
        "qwen2-vl text": Example(
            config=EXAMPLE_LLM | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
        )
    },
    make=lambda config: _qwen2(config, _QWEN_VL),
)
QWEN3_VL_TEXT = LanguageModel(
    name="Qwen3-VL text",
    model_type="qwen3_vl_text",
    check_config=partial(check_fixed_positions, head_dim=QWEN3_HEAD),
    examples={
        "qwen3-vl text": Example(
            config=EXAMPLE_LLM
            | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
        )
    },
    make=_qwen3,
)


_SEED = default_sizes(155136, 4096, 27648, 64, 80, num_key_value_heads=8, head_dim=128)
_SMOL = default_sizes(128256, 2048, 11008, 36, 16, num_key_value_heads=4, tie_word_embeddings=True)


def _seed_oss(config: Config) -> Layers:
    bias = attention_bias(config, "qkv", default=True)
    heads = {"bias": bias + ("o" if flag(config, "attention_out_bias") else "")}
    return llama_like(config, defaults=_SEED, heads=heads, mlp={"bias": flag(config, "mlp_bias")})


def _smollm3(config: Config) -> Layers:
    """Every n-th block knows no positions; windows, if used, are those blocks' own."""
    layers = llama_like(
        config,
        defaults=_SMOL,
        heads={"bias": attention_bias(config)},
        mlp={"bias": flag(config, "mlp_bias")},
    )
    every, listed = whole(config, "no_rope_layer_interval", 4), config.get("no_rope_layers")

    def rotates(block: int) -> bool:
        return bool((block + 1) % every if listed is None else listed[block])

    if flag(config, "use_sliding_window"):
        layers = windowed(config, layers, slides=lambda block: not rotates(block), default=None)
    embed, *blocks, head = layers
    return (embed, *(b if rotates(i) else unrotated(b) for i, b in enumerate(blocks)), head)


SEED_OSS = LanguageModel(
    name="Seed-OSS",
    model_type="seed_oss",
    check_config=partial(check_fixed_positions, head_dim=_SEED["head_dim"]),
    examples={"seed-oss": Example(config=EXAMPLE_LLM | {"head_dim": 32, "pad_token_id": 0})},
    make=_seed_oss,
)
SMOLLM3 = LanguageModel(
    name="SmolLM3",
    model_type="smollm3",
    examples={
        "smollm3": Example(
            config=EXAMPLE_LLM
            | {
                "pad_token_id": 0,
                "no_rope_layer_interval": 2,
                "use_sliding_window": True,
                "sliding_window": 64,
            }
        )
    },
    make=_smollm3,
)


def _phi(config: Config) -> Layers:
    return llama_like(
        config,
        defaults=default_sizes(51200, 2048, 8192, 24, 32, hidden_act="gelu_new"),
        heads={"bias": "qkvo", "qk_norm": Norm.LAYER if flag(config, "qk_layernorm") else None},
        mlp={"bias": True, "gated": False},
        block={"norm": Norm.LAYER, "placement": Placement.PARALLEL},
        head_bias=True,
    )


def _phi3(config: Config) -> Layers:
    defaults = default_sizes(32064, 3072, 8192, 32, 32)
    layers = llama_like(config, defaults=defaults, heads={"fused": True}, mlp={"fused": True})
    return windowed(config, layers, default=None)


def _shaped_phi(shape: Shape) -> dict[str, Any]:
    """Phi-4 and Phi-4-mini."""
    config = common_config(shape) | {"model_type": "phi3", "pad_token_id": None, "rms_norm_eps": 1e-5}
    if shape.name == "phi-4-mini":
        return config | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}
    return config | {"rope_theta": 250000.0}


PHI = LanguageModel(
    name="Phi",
    model_type="phi",
    examples={"phi": Example(config=EXAMPLE_LLM | {"num_key_value_heads": 4})},
    make=_phi,
)
PHI3 = LanguageModel(
    name="Phi-3, Phi-4",
    model_type="phi3",
    examples={"phi3": Example(config=EXAMPLE_LLM | {"pad_token_id": 0})},
    make=_phi3,
    shapes={"phi-4": _shaped_phi},
)
