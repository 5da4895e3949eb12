"""Networks of diffusion over videos, images and mel frames, as layers that a plan can have.

Source: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers" (adaLN); Yang et al. 2024,
"CogVideoX" (video and text in one sequence and the same weights); HaCohen et al. 2024, "LTX-Video", and
NVIDIA 2025, "Cosmos" (the text by cross-attention); Chen et al. 2024, "F5-TTS"; Kong et al. 2024,
"HunyuanVideo" (two streams, then one: `workbench.model.mmdit`). A token is a patch of the latent, or a frame.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.model.layer import Layer, LayerKind, Matmul, Operator, Pointwise
from workbench.model.mmdit import TIME_WIDTH, Mmdit, mmdit_layers
from workbench.model.transformer import (
    CROSS,
    Block,
    Heads,
    Keys,
    Mlp,
    Norm,
    block_operators,
    cross_attention_operators,
    norm,
    residual,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Sizes of a network of equal blocks.

    Args:
        width, heads, ffn, blocks: of the blocks.
        in_width, out_width: numbers of a patch that enter, and that are predicted.
        text: width of text vectors that enter the blocks' sequence; 0: none do.
        text_tokens: how many do.
        context, context_tokens: width and number of the vectors that cross-attention reads; 0: none.
        vectors: products from one vector an item in each block, each (in, out): shifts, scales and gates.
        of_all_blocks: products from that vector which all blocks share; the head has a table then.
        vector_width: of it.
        qk_norm: kind of the norms over each head's queries and keys; None: without.
        rotary: positions rotate queries and keys.
        adds_positions: each block adds positions to its input.
        bias: whether products have biases.
    """

    width: int
    heads: int
    ffn: int
    blocks: int
    in_width: int
    out_width: int
    text: int = 0
    text_tokens: int = 0
    context: int = 0
    context_tokens: int = 0
    vectors: tuple[tuple[int, int], ...] = ()
    of_all_blocks: tuple[tuple[int, int], ...] = ()
    vector_width: int
    qk_norm: Norm | None = None
    rotary: bool = False
    adds_positions: bool = False
    bias: bool = True


def network_of(sizes: Mapping[str, Any], tokens: int) -> tuple[Layer, ...]:
    """The layers of a network for items of `tokens` tokens; `mmdit: true`: of two streams."""
    own = {name: value for name, value in sizes.items() if name != "mmdit"}
    if sizes.get("mmdit"):
        layers = mmdit_layers(Mmdit(**own, patches=tokens))
    else:
        pairs = {name: tuple(map(tuple, own.get(name, ()))) for name in ("vectors", "of_all_blocks")}
        kind = Norm(own["qk_norm"]) if own.get("qk_norm") else None
        layers = _layers(Network(**(own | pairs | {"qk_norm": kind})), tokens)
    return tuple(replace(layer, operators=tuple(_as_modules(layer.operators))) for layer in layers)


def _layers(network: Network, tokens: int) -> tuple[Layer, ...]:
    operators = tuple(_block(network, tokens))
    blocks = (
        Layer(name=f"block.{i}", kind=LayerKind.BLOCK, operators=operators, out_width=network.width)
        for i in range(network.blocks)
    )
    return (_embedding(network, tokens), *blocks, _head(network, tokens))


def _as_modules(operators: Sequence[Operator]) -> Iterator[Operator]:
    """The operators as modules without a compiler run them: a scale, then a shift; both know what they keep.

    Names are those by which memory and prices know operators. Norms count weights that not all of them have,
    and scales one, as they keep what they multiply.
    """
    for each in operators:
        if not isinstance(each, Pointwise):
            yield each
        elif each.name.endswith("norm") and not each.weights:
            yield replace(each, weights=norm("", each.width, Norm.LAYER).weights)
        elif each.name.endswith(".modulated"):
            yield _scaling(each, "modulated")
            yield replace(each, name=each.name.replace("modulated", "shift_residual"))
        elif each.name.endswith(".gated"):
            yield _scaling(each, "gated")
        else:
            yield each


def _scaling(operator: Pointwise, suffix: str) -> Pointwise:
    name = f"{operator.name.removesuffix(suffix)}layer_scale"
    return replace(operator, name=name, weights=(("weight", 1),))


def _block(network: Network, tokens: int) -> Iterator[Operator]:
    """Operators of a block: a vector's products, then what it shifts, scales and gates."""
    for index, (enters, leaves) in enumerate(network.vectors):
        yield _of_item(f"modulation.{index}", enters, leaves, tokens)
    if network.adds_positions:
        yield residual("add_positions", network.width)
    for each in block_operators(_plain(network)):
        if each.name == "mlp_norm" and network.context:
            yield from _cross(network, tokens)
        if each.name in ("attention_norm", "mlp_norm"):
            yield each
            yield _elementwise(f"{each.name}.modulated", network.width)
        elif each.name.endswith("residual"):
            yield _elementwise(f"{each.name}.gated", network.width)
            yield each
        else:
            yield each


def _plain(network: Network) -> Block:
    """The block without modulation."""
    dim = network.width // network.heads
    heads = Heads(
        num=network.heads,
        num_kv=network.heads,
        dim=dim,
        causal=False,
        bias="qkvo" if network.bias else "",
        qk_norm=network.qk_norm,
        rotary=network.rotary,
    )
    mlp = Mlp(width=network.ffn, gated=False, activation="gelu_pytorch_tanh", bias=network.bias)
    return Block(width=network.width, heads=heads, mlp=mlp, norm=Norm.LAYER)


def _cross(network: Network, tokens: int) -> Iterator[Operator]:
    """Cross-attention to the text behind the self-attention."""
    bias = "qkvo" if network.bias else ""
    dim = network.width // network.heads
    heads = Heads(num=network.heads, num_kv=network.heads, dim=dim, causal=False, bias=bias)
    keys = Keys(width=network.context, num=network.context_tokens, per_token=network.context_tokens / tokens)
    yield norm("cross_norm", network.width, Norm.LAYER)
    yield from cross_attention_operators(CROSS, network.width, heads, keys)
    yield residual("cross_residual", network.width)


def _embedding(network: Network, tokens: int) -> Layer:
    """Patches, the text's vectors, the vector of the time and what all blocks derive from it."""
    width, share = network.width, network.text_tokens / tokens
    operators: list[Operator] = [_product("patches", network.in_width, width, 1.0 - share)]
    if network.text:
        operators.append(_product("text", network.text, width, share))
    operators.append(residual("add_positions", width))
    time = ((TIME_WIDTH, network.vector_width), (network.vector_width, network.vector_width))
    for index, (enters, leaves) in enumerate((*time, *network.of_all_blocks)):
        operators.append(_of_item(f"time.{index}", enters, leaves, tokens))
    return Layer(name="embed", kind=LayerKind.EMBED, operators=tuple(operators), out_width=width)


def _head(network: Network, tokens: int) -> Layer:
    """The final norm, the prediction for every patch, and its loss."""
    width = network.width
    of_head = _of_item("modulation", network.vector_width, 2 * width, tokens)
    operators = (
        *(() if network.of_all_blocks else (of_head,)),
        norm("final_norm", width, Norm.LAYER),
        _elementwise("final_norm.modulated", width),
        _product("out", width, network.out_width, 1.0),
        Pointwise(name="loss", width=network.out_width, num_passes=2),
    )
    return Layer(name="head", kind=LayerKind.HEAD, operators=operators, out_width=network.out_width)


def _of_item(name: str, enters: int, leaves: int, tokens: int) -> Matmul:
    return _product(name, enters, leaves, 1 / tokens)


def _product(name: str, enters: int, leaves: int, scale: float) -> Matmul:
    return Matmul(name=name, in_features=enters, out_features=leaves, bias=True, tokens_scale=scale)


def _elementwise(name: str, width: int) -> Pointwise:
    """Every element read and written once."""
    return Pointwise(name=name, width=width, num_passes=2)
