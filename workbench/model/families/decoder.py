"""The common structure of language models: embed, blocks, head; and windows and caps of attention scores."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from workbench.model.config_fields import Config, count, flag, heads_of, text, whole
from workbench.model.families.family import Layers
from workbench.model.layer import Attention, Layer, LayerKind, Operator, Pointwise
from workbench.model.module_layers import block_layers, lm_head, token_embedding
from workbench.model.shape import Shape
from workbench.model.transformer import ROTARY, Block, Mlp, Norm

WINDOW = 4096  # default sliding window
SLIDING = "sliding_attention"


def llama_like(
    config: Config,
    *,
    defaults: Mapping[str, Any],
    heads: Mapping[str, Any],
    mlp: Mapping[str, Any],
    block: Mapping[str, Any] = MappingProxyType({}),
    head_bias: bool = False,
    scales_embedding: bool = False,
) -> Layers:
    """Embed, blocks, head: rotary grouped-query attention, by default with RMS norms and a gated MLP.

    Args:
        defaults: transformers' defaults, by key.
        heads, mlp, block: fields of `Heads`, `Mlp` and `Block` that the family sets.
        head_bias: whether the head's matmul has a bias.
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
    outline = Block(
        width=width,
        heads=replace(attention, **{"rotary": True, **heads}),
        mlp=Mlp(width=ffn, **{"gated": True, "activation": activation, **mlp}),
        **{"norm": Norm.RMS, **block},
    )
    is_tied = flag(config, "tie_word_embeddings", default=defaults["tie_word_embeddings"])
    scale = (Pointwise(name="scale", width=width, num_passes=2),) if scales_embedding else ()
    return (
        token_embedding(vocab, width, more=scale, tied=is_tied),
        *block_layers(outline, count(config, "num_hidden_layers", defaults["num_hidden_layers"])),
        lm_head(vocab, width, outline.norm, tied=is_tied, bias=head_bias),
    )


def default_sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Defaults of a configuration: the sizes that all families have, and `more`."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return sizes | {"hidden_act": "silu", "tie_word_embeddings": False} | more


def common_config(shape: Shape) -> dict[str, Any]:
    """A row of the zoo under the keys that all decoder configurations share."""
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


def windowed(
    config: Config,
    layers: Layers,
    *,
    slides: Callable[[int], bool] = lambda _: True,
    default: int | None = WINDOW,
) -> Layers:
    """The layers with sliding windows set on their attentions.

    Args:
        slides: whether a block, by its index, has a window, where the configuration lists no layer types.
        default: the default window; None: no window.

    Raises:
        ValueError: a window below 1.
    """
    if config.get("sliding_window", default) is None:
        return layers
    window = whole(config, "sliding_window", WINDOW)
    listed = config.get("layer_types")
    blocks = [index for index, layer in enumerate(layers) if layer.kind is LayerKind.BLOCK]
    if listed is None:
        within = {index for position, index in enumerate(blocks) if slides(position)}
    else:
        within = {index for index, kind in zip(blocks, listed, strict=False) if kind == SLIDING}
    return tuple(
        with_attention(layer, window=window) if i in within else layer for i, layer in enumerate(layers)
    )


def capped(
    config: Config, layers: Layers, *, scores: float | None = None, logits: float | None = None
) -> Layers:
    """The layers with soft caps on scores and logits, where the configuration has them.

    Args:
        scores, logits: default caps; None: no cap.
    """
    if scores is not None and config.get("attn_logit_softcapping", scores) is not None:
        layers = tuple(with_attention(layer, is_capped=True) for layer in layers)
    if config.get("final_logit_softcapping", logits) is None:
        return layers
    *others, head = layers
    *operators, loss = head.operators
    assert isinstance(loss, Pointwise), "a head ends with its loss"
    return (*others, replace(head, operators=(*operators, replace(loss, is_capped=True))))


def unrotated(layer: Layer) -> Layer:
    """The layer without a rotation of its queries and keys."""
    return replace(layer, operators=tuple(each for each in layer.operators if each.name != ROTARY))


def before_attention(layer: Layer, make: Callable[[Attention], Pointwise]) -> Layer:
    """The layer with an operator in front of its attention, if it has one."""
    operators: list[Operator] = []
    for operator in layer.operators:
        if isinstance(operator, Attention):
            operators.append(make(operator))
        operators.append(operator)
    return replace(layer, operators=tuple(operators))


def scaled_logits(head: Layer) -> Layer:
    """The head with a factor of its logits, which multiplies what its product reads."""
    norm, *others = head.operators
    assert isinstance(norm, Pointwise), "a head begins with its norm"
    return replace(head, operators=(norm, replace(norm, name="scale", weights=()), *others))


def with_attention(layer: Layer, **changes: object) -> Layer:
    """The layer with some fields of its attention replaced."""
    operators = (
        replace(operator, **changes) if isinstance(operator, Attention) else operator  # type: ignore[arg-type]
        for operator in layer.operators
    )
    return replace(layer, operators=tuple(operators))
