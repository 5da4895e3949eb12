"""Transformer layers as operators: every matmul, norm and table."""

from dataclasses import dataclass
from enum import StrEnum

from workbench.model.layer import Attention, Matmul, Operator, Pointwise, Shard, TokenCount

GATE = "attention_gate"
_UNSHIFTED = "centred_weight"  # name of the scale of a norm that takes off the mean and has no shift
V_NORM = "v_norm"  # of each head's value, without weights
UNSCALED_NORM = "projector.unscaled_norm"
XIELU = "xielu"  # activation with two weights
QUERY_SCALE = "query_scale"  # of queries, by their positions
ROTARY = "rotary"  # rotation of queries and keys
CROSS = "cross"  # prefix of operators that attend to a prompt, or to an encoder's tokens in a table's row
RELATIVE, RELATIVE_BIAS = "relative_attention", "relative_bias"  # scores of distances, and of queries
PARTIAL_ROTARY = "partial_rotary"  # rotation of a part of every head, which is joined to the rest


class Norm(StrEnum):
    """RMS has a scale; LAYER has a scale and a shift.

    UNSCALED is RMS without the scale; UNSHIFTED is LAYER without the shift.
    """

    RMS = "rms"
    UNSCALED = "unscaled"
    LAYER = "layer"
    UNSHIFTED = "unshifted"


class Placement(StrEnum):
    """The position of a block's norms.

    PRE: before attention and before the MLP. POST: after each residual sum (BERT).
    SANDWICH: before and after both (Gemma 2). AFTER: after both, before each residual sum (OLMo 2).
    PARALLEL: one norm feeds attention and MLP, whose results are summed (Phi).
    """

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"
    AFTER = "after"
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention of a block.

    Args:
        num: query heads; num_kv: key and value heads (fewer: grouped-query attention).
        dim: width of one head.
        bias: which projections have a bias, out of "q", "k", "v" and "o".
        fused: query, key and value come from one matmul.
        qk_norm: norm over each head's queries and keys.
        norms_all_heads: it is one over the queries of all heads, and one over their keys.
        rotary: positions enter by rotating queries and keys.
        rotary_dim: numbers of a head that are rotated, where the others are joined to them; None: all.
        num_keys: keys of every query where a window fixes them; None: the whole row.
        gated: the sigmoid of a gate, which the query's matmul gives too, multiplies the output.
    """

    num: int
    num_kv: int
    dim: int
    causal: bool
    bias: str = ""
    fused: bool = False
    qk_norm: Norm | None = None
    norms_all_heads: bool = False
    rotary: bool = False
    rotary_dim: int | None = None
    num_keys: int | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        if self.num < 1 or self.num_kv < 1 or self.dim < 1 or self.num % self.num_kv:
            raise ValueError(
                f"attention: want heads >= 1 that kv_heads divides and head_dim >= 1, "
                f"got {self.num} heads, {self.num_kv} kv_heads, head_dim {self.dim}"
            )

    @property
    def q_width(self) -> int:
        return self.num * self.dim

    @property
    def kv_width(self) -> int:
        return self.num_kv * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """`down(act(up(x)))`, or `down(act(gate(x)) * up(x))` when gated."""

    width: int
    gated: bool
    activation: str
    bias: bool = False
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One transformer block over [T, width]."""

    width: int
    heads: Heads
    mlp: Mlp
    norm: Norm
    placement: Placement = Placement.PRE


def vit_block(*, width: int, num_heads: int, ffn: int, activation: str, bias: str = "qkvo") -> Block:
    """The pre-norm block of a vision transformer: full attention, plain MLP, biases."""
    return Block(
        width=width,
        heads=Heads(num=num_heads, num_kv=num_heads, dim=width // num_heads, causal=False, bias=bias),
        mlp=Mlp(width=ffn, gated=False, activation=activation, bias=True),
        norm=Norm.LAYER,
    )


def norm(name: str, width: int, kind: Norm, *, tokens: TokenCount = TokenCount.IN) -> Pointwise:
    """A norm over [T, width]: reads it once and writes it once."""
    return Pointwise(name=name, width=width, num_passes=2, weights=norm_weights(kind, width), tokens=tokens)


def value_norm(num_heads: int, head_dim: int) -> Pointwise:
    """A norm of each head's value without weights."""
    return Pointwise(name=V_NORM, width=num_heads * head_dim, num_passes=2, shard=Shard.COLUMN)


def norm_weights(kind: Norm, width: int) -> tuple[tuple[str, int], ...]:
    """Names and sizes of a norm's parameters."""
    own: dict[Norm, tuple[str, ...]] = {
        Norm.RMS: ("weight",),
        Norm.UNSCALED: (),
        Norm.UNSHIFTED: (_UNSHIFTED,),
    }
    return tuple((name, width) for name in own.get(kind, ("weight", "bias")))


def is_rms(norm: Pointwise) -> bool:
    """Whether a norm divides by the root of the mean square alone, without taking off the mean."""
    return [name for name, _ in norm.weights] == ["weight"]


def residual(name: str, width: int) -> Pointwise:
    """`x + y`: two tensors read, one written."""
    return Pointwise(name=name, width=width, num_passes=3)


def mixer_operators(name: str, width: int, mixer: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Operators of a block of one mixer, with an RMS norm before it and a sum behind it."""
    return (norm(f"{name}_norm", width, Norm.RMS), *mixer, residual(f"{name}_residual", width))


def block_operators(block: Block) -> tuple[Operator, ...]:
    """Operators of one block, in execution order.

    Tensor parallelism cuts heads and the MLP's inner width: COLUMN into the pair's first
    matmul, ROW out of its second, so that one all-reduce follows each of the two.
    """
    w = block.width
    attention = attention_operators(w, block.heads)
    mlp = mlp_operators("mlp", w, block.mlp)
    first, second = (norm(name, w, block.norm) for name in ("attention_norm", "mlp_norm"))
    post_attention, post_mlp = (
        norm(name, w, block.norm) for name in ("post_attention_norm", "post_mlp_norm")
    )
    add_attention, add_mlp = residual("attention_residual", w), residual("mlp_residual", w)
    match block.placement:
        case Placement.PRE:
            return (first, *attention, add_attention, second, *mlp, add_mlp)
        case Placement.POST:
            return (*attention, add_attention, first, *mlp, add_mlp, second)
        case Placement.SANDWICH:
            head = (first, *attention, post_attention, add_attention)
            return (*head, second, *mlp, post_mlp, add_mlp)
        case Placement.AFTER:
            return (*attention, post_attention, add_attention, *mlp, post_mlp, add_mlp)
        case Placement.PARALLEL:
            return (first, *attention, *mlp, add_attention, add_mlp)


def attention_operators(width: int, heads: Heads) -> tuple[Operator, ...]:
    """Projections, norms of heads, rotation, attention, output projection."""
    operators: list[Operator] = [*_projections(width, heads), *_head_norms(heads)]
    if heads.rotary:
        name, dim = (ROTARY, heads.dim) if heads.rotary_dim is None else (PARTIAL_ROTARY, heads.rotary_dim)
        rotated = (heads.num + heads.num_kv) * dim
        operators.append(Pointwise(name=name, width=rotated, num_passes=2, shard=Shard.COLUMN))
    operators.append(
        Attention(
            name="attention",
            num_heads=heads.num,
            num_kv_heads=heads.num_kv,
            head_dim=heads.dim,
            causal=heads.causal,
            num_keys=heads.num_keys,
        )
    )
    if heads.gated:
        operators.append(Pointwise(name=GATE, width=heads.q_width, num_passes=3, shard=Shard.COLUMN))
    operators.append(
        Matmul(
            name="o_proj",
            in_features=heads.q_width,
            out_features=width,
            bias="o" in heads.bias,
            shard=Shard.ROW,
        )
    )
    return tuple(operators)


def _projections(width: int, heads: Heads) -> list[Operator]:
    """Products into queries, with their gates where there are some, keys and values: one each, or fused."""
    queries = (1 + heads.gated) * heads.q_width
    if heads.fused:
        products = [("qkv", queries + 2 * heads.kv_width, "q" in heads.bias)]
    else:
        widths = {"q": queries, "k": heads.kv_width, "v": heads.kv_width}
        products = [(letter, out, letter in heads.bias) for letter, out in widths.items()]
    return [
        Matmul(name=f"{name}_proj", in_features=width, out_features=out, bias=bias, shard=Shard.COLUMN)
        for name, out, bias in products
    ]


def _head_norms(heads: Heads) -> list[Operator]:
    """Norms of queries and of keys; those over all heads are cut with them."""
    if heads.qk_norm is None:
        return []
    return [
        Pointwise(
            name=name,
            width=width,
            num_passes=2,
            weights=norm_weights(heads.qk_norm, width if heads.norms_all_heads else heads.dim),
            shard=Shard.COLUMN,
            cuts_weights=heads.norms_all_heads,
        )
        for name, width in (("q_norm", heads.q_width), ("k_norm", heads.kv_width))
    ]


def norms_all_heads(operator: Operator) -> bool:
    """Whether it is a norm over the queries, or the keys, of all heads, which tensor parallelism cuts."""
    is_norm = isinstance(operator, Pointwise) and operator.name in ("q_norm", "k_norm")
    return is_norm and operator.cuts_weights  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The context of cross-attention: another sequence of fixed length.

    Args:
        width: width of its vectors.
        num: number of its vectors.
        per_token: rows of the key and value matmuls per token counted; they run once for all
            queries of an item.
    """

    width: int
    num: int
    per_token: float


def is_cross_attention(attention: Attention) -> bool:
    """Whether its keys, a fixed number for each query, are of other tokens than its queries."""
    return attention.name == f"{CROSS}.attention"


def cross_attention_operators(
    name: str, width: int, heads: Heads, keys: Keys, *, tokens_scale: float = 1.0
) -> tuple[Operator, ...]:
    """Queries from [T, width], keys and values from another sequence, output projection.

    `tokens_scale` is queries per token counted. Names are `name`.q, .k, .v, .attention, .o.
    """

    def matmul(letter: str, enter: int, leave: int, rows: float, shard: Shard) -> Matmul:
        return Matmul(
            name=f"{name}.{letter}",
            in_features=enter,
            out_features=leave,
            bias=letter in heads.bias,
            shard=shard,
            tokens_scale=rows,
        )

    return (
        matmul("q", width, heads.q_width, tokens_scale, Shard.COLUMN),
        matmul("k", keys.width, heads.kv_width, keys.per_token, Shard.COLUMN),
        matmul("v", keys.width, heads.kv_width, keys.per_token, Shard.COLUMN),
        Attention(
            name=f"{name}.attention",
            num_heads=heads.num,
            num_kv_heads=heads.num_kv,
            head_dim=heads.dim,
            causal=False,
            tokens_scale=tokens_scale,
            num_keys=keys.num,
        ),
        matmul("o", heads.q_width, width, tokens_scale, Shard.ROW),
    )


def mlp_operators(name: str, width: int, mlp: Mlp) -> tuple[Operator, ...]:
    """Up (and gate), activation, down. The gated activation reads both halves and writes one."""
    ups: tuple[tuple[str, int], ...] = ((f"{name}.up", mlp.width),)
    if mlp.gated:
        ups = ((f"{name}.gate", mlp.width), (f"{name}.up", mlp.width))
        if mlp.fused:
            ups = ((f"{name}.gate_up", 2 * mlp.width),)
    matmuls = tuple(
        Matmul(name=up, in_features=width, out_features=out, bias=mlp.bias, shard=Shard.COLUMN)
        for up, out in ups
    )
    activation = Pointwise(
        name=f"{name}.{mlp.activation}",
        width=mlp.width,
        num_passes=3 if mlp.gated else 2,
        weights=(("alpha_p", 1), ("alpha_n", 1)) if mlp.activation == XIELU else (),
        shard=Shard.COLUMN,
    )
    return (
        *matmuls,
        activation,
        Matmul(
            name=f"{name}.down", in_features=mlp.width, out_features=width, bias=mlp.bias, shard=Shard.ROW
        ),
    )
