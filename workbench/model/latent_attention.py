"""Multi-head latent attention in place of a block's attention."""

from dataclasses import dataclass, replace

from workbench.model.layer import Attention, Matmul, Operator, Pointwise, Shard
from workbench.model.transformer import Norm, norm

Q_DOWN, KV_DOWN, KV_UP = "q_down_proj", "kv_down_proj", "kv_up_proj"
LATENT_NORMS = ("q_latent_norm", "kv_latent_norm")
LATENT_ROTARY = "up_proj.rotary"  # of a part of every query, and of one key of all heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Sizes of attention whose queries, keys and values all come from narrow latent vectors.

    Args:
        num: heads of queries, keys and values.
        q_rank: width of the latent of queries; 0: they come from the hidden state.
        kv_rank: width of the latent of keys and values.
        nope_dim: numbers of a head's query and key that are not rotated.
        rope_dim: those that are rotated; all heads share these of the key.
        value_dim: width of a head's value.
        bias: whether the products with the hidden state have one, but for that of queries without a latent.
        enters_whole: whether tensor-parallel ranks enter partitioned computation with the hidden state, so
            that weights of latents have a part of the gradient on each (the runtime), instead of with the
            latents (Megatron).
    """

    num: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    enters_whole: bool = True

    @property
    def key_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim


def with_latent_attention(operators: tuple[Operator, ...], heads: LatentHeads) -> tuple[Operator, ...]:
    """A block's operators with latent attention between its first norm and its first residual sum.

    Tensor parallelism cuts heads; products that make latents are whole on every rank.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
    """
    names = [operator.name for operator in operators]
    first, last = names.index("attention_norm") + 1, names.index("attention_residual")
    attention = operators[names.index("attention")]
    leaving = operators[last - 1]
    assert isinstance(attention, Attention), "the operator of that name"
    assert isinstance(leaving, Matmul), "an attention ends with a matmul"
    return (
        *operators[:first],
        *_operators(leaving.out_features, heads, attention),
        *operators[last:],
    )


def _operators(width: int, heads: LatentHeads, attention: Attention) -> tuple[Operator, ...]:
    """Products down to latents, norms, products up to heads, rotation, attention, output projection."""
    values = heads.num * heads.value_dim
    rotated = (heads.num + 1) * heads.rope_dim
    return (
        *_queries(width, heads),
        Matmul(
            name=KV_DOWN,
            in_features=width,
            out_features=heads.kv_rank + heads.rope_dim,
            bias=heads.bias,
            enters=heads.enters_whole,
        ),
        norm(LATENT_NORMS[1], heads.kv_rank, Norm.RMS),
        Matmul(
            name=KV_UP,
            in_features=heads.kv_rank,
            out_features=heads.num * heads.nope_dim + values,
            shard=Shard.COLUMN,
        ),
        Pointwise(name=LATENT_ROTARY, width=rotated, num_passes=2, shard=Shard.COLUMN),
        replace(
            attention,
            num_heads=heads.num,
            num_kv_heads=heads.num,
            head_dim=heads.key_dim,
            value_dim=None if heads.value_dim == heads.key_dim else heads.value_dim,
        ),
        Matmul(name="o_proj", in_features=values, out_features=width, bias=heads.bias, shard=Shard.ROW),
    )


def _queries(width: int, heads: LatentHeads) -> tuple[Operator, ...]:
    queries = heads.num * heads.key_dim
    if not heads.q_rank:
        return (Matmul(name="q_proj", in_features=width, out_features=queries, shard=Shard.COLUMN),)
    return (
        Matmul(
            name=Q_DOWN,
            in_features=width,
            out_features=heads.q_rank,
            bias=heads.bias,
            enters=heads.enters_whole,
        ),
        norm(LATENT_NORMS[0], heads.q_rank, Norm.RMS),
        Matmul(name="q_up_proj", in_features=heads.q_rank, out_features=queries, shard=Shard.COLUMN),
    )
