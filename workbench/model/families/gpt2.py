"""GPT-2, and GPT-3 as it is printed."""

from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import EXAMPLE_WIDTH, Example, LanguageModel, Layers
from workbench.model.module_layers import block_layers, learned_positions, lm_head, token_embedding
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Mlp, Norm


def _gpt2(config: Config) -> Layers:
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
        *block_layers(block, count(config, "n_layer", 12)),
        lm_head(vocab, width, Norm.LAYER, tied=tied),
    )


def _shaped(shape: Shape) -> dict[str, Any]:
    """GPT-2 and GPT-3 (dense attention everywhere; GPT-3 alternates it with sparse).

    Differs: GPT-3 XL's printed 24 heads of 128 are not its width; it gets 16 of 128.
    """
    num_heads = (
        shape.heads if shape.heads * shape.head_dim == shape.hidden else shape.hidden // shape.head_dim
    )
    return {
        "model_type": "gpt2",
        "vocab_size": shape.vocab,
        "n_positions": shape.max_seq,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": num_heads,
        "n_inner": shape.ffn,
    }


GPT2 = LanguageModel(
    name="GPT-2",
    model_type="gpt2",
    examples={
        "gpt2": Example(
            config={
                "n_embd": EXAMPLE_WIDTH,
                "n_inner": 352,
                "n_layer": 4,
                "n_head": 4,
                "vocab_size": 512,
                "n_positions": 256,
            }
        )
    },
    make=_gpt2,
    shapes={"gpt": _shaped},
    longest_item=lambda config: whole(config, "n_positions", 1024),
)
