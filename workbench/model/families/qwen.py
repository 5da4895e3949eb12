"""Qwen2 and Qwen3."""

from typing import Any

from workbench.model.config_fields import Config
from workbench.model.families.decoder import absent, llama_like, shaped
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.windows import windowed
from workbench.model.shape import Shape
from workbench.model.transformer import Norm

_TIED = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")


def _qwen2(config: Config) -> Layers:
    defaults = absent(151936, 4096, 22016, 32, 32, num_key_value_heads=32)
    return _windowed(config, llama_like(config, defaults=defaults, heads={"bias": "qkv"}, mlp={}))


def _qwen3(config: Config) -> Layers:
    defaults = absent(151936, 4096, 22016, 32, 32, num_key_value_heads=32, head_dim=128)
    bias = "qkvo" if config.get("attention_bias") else ""
    layers = llama_like(config, defaults=defaults, heads={"bias": bias, "qk_norm": Norm.RMS}, mlp={})
    return _windowed(config, layers)


def _qwen_vl_text(config: Config) -> Layers:
    """Qwen2's outline. Differs: positions of three axes are counted as one rotation, as work they are."""
    defaults = absent(152064, 8192, 29568, 80, 64, num_key_value_heads=8)
    return _windowed(config, llama_like(config, defaults=defaults, heads={"bias": "qkv"}, mlp={}))


def _windowed(config: Config, layers: Layers) -> Layers:
    """Where windows are used, blocks slide from `max_window_layers` on."""
    if not config.get("use_sliding_window"):
        return windowed(config, layers, slides=lambda _: False)
    first = int(config.get("max_window_layers", 28))
    return windowed(config, layers, slides=lambda block: block >= first)


def _shaped(shape: Shape) -> dict[str, Any]:
    is_tied = shape.name in _TIED
    return shaped(shape) | {"model_type": "qwen2", "rope_theta": 1000000.0, "tie_word_embeddings": is_tied}


QWEN2 = LanguageModel(
    name="Qwen2, Qwen2.5",
    model_type="qwen2",
    examples={"qwen2": Example(config=EXAMPLE_LLM | {"tie_word_embeddings": True})},
    make=_qwen2,
    shapes={"qwen2.5": _shaped},
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
    make=_qwen_vl_text,
)
QWEN3_VL_TEXT = LanguageModel(
    name="Qwen3-VL text",
    model_type="qwen3_vl_text",
    examples={"qwen3-vl text": Example(config=EXAMPLE_LLM | {"head_dim": 32})},
    reason="its first blocks add states of the vision tower (DeepStack); the runtime has one edge",
    make=_qwen3,
)
