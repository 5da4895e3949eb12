"""Language models with a mixture of experts in place of an MLP."""

from collections.abc import Callable, Mapping
from typing import Any

from workbench.model.config_fields import Config, attention_bias, count, flag, layer_indices, text, whole
from workbench.model.experts import Experts, with_experts
from workbench.model.families.decoder import default_sizes, llama_like, windowed
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.positions import check_fixed_positions
from workbench.model.transformer import Mlp, Norm


def _mixtral(config: Config) -> Layers:
    defaults = default_sizes(32000, 4096, 14336, 32, 32, num_key_value_heads=8)
    plain = windowed(config, llama_like(config, defaults=defaults, heads={}, mlp={}), default=None)
    width = whole(config, "intermediate_size", 14336)
    return sparse(plain, _experts(config, count(config, "num_local_experts", 8), 2, width))


_QWEN = default_sizes(151936, 2048, 6144, 24, 32, num_key_value_heads=4)
_QWEN_VL = default_sizes(151936, 2048, 5632, 24, 16, num_key_value_heads=16, tie_word_embeddings=True)
_QWEN_OMNI = default_sizes(3584, 2048, 18944, 28, 28, num_key_value_heads=4)


def _qwen3_moe(
    config: Config, sizes: Mapping[str, Any] = _QWEN, *, num: int = 128, chosen: int = 8, width: int = 768
) -> Layers:
    """Qwen3's structure with experts; listed blocks, and all but every n-th, keep their MLP.

    Args:
        sizes: defaults of the configuration.
        num, chosen, width: default numbers of experts in a layer and per token, and their MLPs' width.
    """
    heads = {"bias": attention_bias(config), "qk_norm": Norm.RMS}
    plain = llama_like(config, defaults=sizes, heads=heads, mlp={})
    slides = flag(config, "use_sliding_window")
    step, dense = whole(config, "decoder_sparse_step", 1), layer_indices(config, "mlp_only_layers", ())
    return sparse(
        windowed(config, plain, slides=lambda _: slides),
        _experts(
            config, count(config, "num_experts", num), chosen, whole(config, "moe_intermediate_size", width)
        ),
        lambda block: block not in dense and (block + 1) % step == 0,
    )


def _qwen3_omni(config: Config) -> Layers:
    """Its attention has no window; heads are as wide as the width has room for where nothing says it."""
    width = whole(config, "hidden_size", _QWEN_OMNI["hidden_size"])
    room = width // whole(config, "num_attention_heads", _QWEN_OMNI["num_attention_heads"])
    return _qwen3_moe({"head_dim": room, **config, "use_sliding_window": False}, _QWEN_OMNI)


def _experts(config: Config, num: int, chosen: int, width: int) -> Experts:
    mlp = Mlp(width=width, gated=True, activation=text(config, "hidden_act", "silu"), fused=True)
    return Experts(num=num, num_chosen=whole(config, "num_experts_per_tok", chosen), mlp=mlp)


def sparse(layers: Layers, experts: Experts, has_them: Callable[[int], bool] = lambda _: True) -> Layers:
    """The layers with experts in the blocks that have them, by their index."""
    embed, *blocks, head = layers
    sparse = (
        with_experts(block, experts) if has_them(index) else block for index, block in enumerate(blocks)
    )
    return (embed, *sparse, head)


_OLMOE = default_sizes(50304, 2048, 2048, 16, 16, num_key_value_heads=16)


def _olmoe(config: Config) -> Layers:
    """Norms of the queries, and of the keys, of all heads at once."""
    bias = attention_bias(config)
    heads = {"bias": bias, "qk_norm": Norm.RMS, "norms_all_heads": True}
    width = whole(config, "intermediate_size", _OLMOE["intermediate_size"])
    plain = llama_like(config, defaults=_OLMOE, heads=heads, mlp={})
    return sparse(plain, _experts(config, count(config, "num_experts", 64), 8, width))


def _check_olmoe(config: Config) -> None:
    if config.get("clip_qkv") is not None:
        raise ValueError(f"olmoe: clip_qkv must be null, got {config['clip_qkv']!r:.60}; nearest: null")
    check_fixed_positions(config)


MIXTRAL = LanguageModel(
    name="Mixtral",
    model_type="mixtral",
    examples={"mixtral": Example(config=EXAMPLE_LLM | {"num_local_experts": 4, "num_experts_per_tok": 2})},
    make=_mixtral,
)
_EXAMPLE = EXAMPLE_LLM | {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
OLMOE = LanguageModel(
    name="OLMoE",
    model_type="olmoe",
    check_config=_check_olmoe,
    examples={
        "olmoe": Example(
            config=EXAMPLE_LLM
            | {"intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
        )
    },
    make=_olmoe,
)
QWEN3_MOE = LanguageModel(
    name="Qwen3 with experts",
    model_type="qwen3_moe",
    examples={"qwen3 with experts": Example(config=_EXAMPLE)},
    make=_qwen3_moe,
)
QWEN3_VL_MOE_TEXT = LanguageModel(
    name="Qwen3-VL text with experts",
    model_type="qwen3_vl_moe_text",
    examples={"qwen3-vl text with experts": Example(config=_EXAMPLE)},
    make=lambda config: _qwen3_moe(config, _QWEN_VL, num=60, chosen=4, width=1408),
)
QWEN3_OMNI_TEXT = LanguageModel(
    name="Qwen3-Omni text",
    model_type="qwen3_omni_moe_text",
    examples={"qwen3-omni text": Example(config=_EXAMPLE)},
    make=_qwen3_omni,
)
