"""Gemma 1, 2 and 3."""

from collections.abc import Mapping
from typing import Any

from workbench.model.config_fields import Config, whole
from workbench.model.families.decoder import absent, llama_like, shaped
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.windows import capped, windowed
from workbench.model.shape import Shape
from workbench.model.transformer import Norm, Placement


def _gemma(config: Config) -> Layers:
    defaults = absent(256000, 3072, 24576, 28, 16, num_key_value_heads=16, head_dim=256)
    return _outline(config, defaults)


def _gemma2(config: Config) -> Layers:
    """Norms around attention and MLP. Work beyond the sliding window of every other layer is counted."""
    defaults = absent(256000, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256)
    layers = _outline(config, defaults, placement=Placement.SANDWICH)
    layers = windowed(config, layers, slides=lambda block: block % 2 == 0)
    return capped(config, layers, scores=50.0, logits=30.0)


def _gemma3(config: Config) -> Layers:
    """Gemma 2's outline, with norms of heads in place of soft caps."""
    defaults = absent(262208, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256)
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
        heads={"bias": "qkvo" if config.get("attention_bias") else "", "qk_norm": qk_norm},
        mlp={},
        placement=placement,
        scales_embedding=True,
    )


def _shaped(shape: Shape) -> dict[str, Any]:
    return shaped(shape) | {
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
    shapes={"gemma": _shaped},
    width_holds_heads=True,
)
GEMMA3 = LanguageModel(
    name="Gemma 3",
    model_type="gemma3_text",
    examples={"gemma3": Example(config=_SLIDING | {"sliding_window_pattern": 2})},
    make=_gemma3,
    width_holds_heads=True,
)
