"""The outline that most language models share with Llama, and what absent keys of a configuration mean."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.model.config_fields import Config, count, heads_of, text, whole
from workbench.model.families.family import Layers
from workbench.model.layer import Pointwise
from workbench.model.module_layers import block_layers, lm_head, token_embedding
from workbench.model.shape import Shape
from workbench.model.transformer import Block, Mlp, Norm, Placement


def llama_like(
    config: Config,
    *,
    defaults: Mapping[str, Any],
    heads: Mapping[str, Any],
    mlp: Mapping[str, Any],
    placement: Placement = Placement.PRE,
    scales_embedding: bool = False,
) -> Layers:
    """RMS norms, rotary grouped-query attention, gated MLP: embed, blocks, head.

    Args:
        defaults: by key, what an absent one means to transformers.
        heads, mlp: fields of `Heads` and `Mlp` that the family sets.
        placement: of the norms.
        scales_embedding: whether token embeddings are multiplied by a number.
    """
    width = whole(config, "hidden_size", defaults["hidden_size"])
    vocab = whole(config, "vocab_size", defaults["vocab_size"])
    num = whole(config, "num_attention_heads", defaults["num_attention_heads"])
    num_kv = whole(config, "num_key_value_heads", defaults.get("num_key_value_heads", num))
    full = {"head_dim": defaults["head_dim"], **config} if "head_dim" in defaults else config
    if full.get("head_dim", 1) is None:
        full = {key: value for key, value in full.items() if key != "head_dim"}
    attention = heads_of(full, width=width, num=num, num_kv=num_kv)
    ffn = whole(config, "intermediate_size", defaults["intermediate_size"])
    activation = text(config, "hidden_activation", text(config, "hidden_act", defaults["hidden_act"]))
    block = Block(
        width=width,
        heads=replace(attention, rotary=True, **heads),
        mlp=Mlp(width=ffn, gated=True, activation=activation, **mlp),
        norm=Norm.RMS,
        placement=placement,
    )
    is_tied = bool(config.get("tie_word_embeddings", defaults["tie_word_embeddings"]))
    scale = (Pointwise(name="scale", width=width, num_passes=2),) if scales_embedding else ()
    return (
        token_embedding(vocab, width, more=scale, tied=is_tied),
        *block_layers(block, count(config, "num_hidden_layers", defaults["num_hidden_layers"])),
        lm_head(vocab, width, Norm.RMS, tied=is_tied),
    )


def absent(vocab: int, hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """What keys that a configuration leaves out mean; `more` beside the sizes that all have."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return sizes | {"hidden_act": "silu", "tie_word_embeddings": False} | more


def shaped(shape: Shape) -> dict[str, Any]:
    """A row of the zoo under the keys that all these configurations have."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_seq,
        "tie_word_embeddings": False,
    }
