"""Llama 2 and 3."""

from typing import Any

from workbench.model.config_fields import Config
from workbench.model.families.decoder import absent, llama_like, shaped
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.shape import Shape

_TIED = ("llama-3.2-1b", "llama-3.2-3b")


def _llama(config: Config) -> Layers:
    return llama_like(
        config,
        defaults=absent(32000, 4096, 11008, 32, 32),
        heads={"bias": "qkvo" if config.get("attention_bias") else ""},
        mlp={"bias": bool(config.get("mlp_bias"))},
    )


def _shaped(shape: Shape) -> dict[str, Any]:
    return shaped(shape) | {
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
    shapes={"llama": _shaped},
    width_holds_heads=True,
)
