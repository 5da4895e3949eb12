"""Phi, and Phi-3 with Phi-4."""

from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.decoder import absent, llama_like, shaped
from workbench.model.families.family import EXAMPLE_LLM, Example, LanguageModel, Layers
from workbench.model.families.windows import windowed
from workbench.model.module_layers import block_layers, lm_head, token_embedding
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Mlp, Norm, Placement


def _phi(config: Config) -> Layers:
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
        *block_layers(block, count(config, "num_hidden_layers", 24)),
        lm_head(vocab, width, Norm.LAYER, tied=tied, bias=True),
    )


def _phi3(config: Config) -> Layers:
    defaults = absent(32064, 3072, 8192, 32, 32)
    layers = llama_like(config, defaults=defaults, heads={"fused": True}, mlp={"fused": True})
    return windowed(config, layers, default=None)


def _shaped(shape: Shape) -> dict[str, Any]:
    """Phi-4 and Phi-4-mini."""
    config = shaped(shape) | {"model_type": "phi3", "pad_token_id": None, "rms_norm_eps": 1e-5}
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
    shapes={"phi-4": _shaped},
)
