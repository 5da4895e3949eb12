"""Linear attention by a gated delta rule in place of a block's attention."""

from dataclasses import dataclass, replace

from workbench.model.layer import DeltaRule, Layer, Matmul, Operator, Pointwise, Shard

RULE = "delta_rule"
GATED_NORM = "gated_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a gated DeltaNet layer; heads and widths as of `DeltaRule`.

    Args:
        num, num_keys: heads of values, and of queries and keys.
        fused: queries, keys, values and gates come from one matmul, and both numbers of a head from another
            (Qwen3-Next); else the gates and either number from matmuls of their own (Qwen3.5).
    """

    num: int
    num_keys: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False

    def __post_init__(self) -> None:
        if self.num % self.num_keys:
            raise ValueError(
                f"linear attention: want heads of values that divide over {self.num_keys} heads of keys, "
                f"got {self.num}; nearest: {max(self.num // self.num_keys, 1) * self.num_keys}"
            )


def with_delta_net(block: Layer, net: DeltaNet) -> Layer:
    """The block with linear attention between its first norm and its first residual sum.

    Source: Yang et al. 2024, "Gated Delta Networks", section 3.4; layers as in transformers'
    `Qwen3_5GatedDeltaNet`.
    """
    names = [operator.name for operator in block.operators]
    first, last = names.index("attention_norm") + 1, names.index("attention_residual")
    operators = (
        *block.operators[:first],
        *_operators(block.out_width, net),
        *block.operators[last:],
    )
    return replace(block, operators=operators)


def _operators(width: int, net: DeltaNet) -> tuple[Operator, ...]:
    """Projections, the rule behind its convolution, a norm times an activated gate, a matmul."""
    rule = DeltaRule(
        name=RULE,
        num_heads=net.num,
        num_key_heads=net.num_keys,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        kernel=net.kernel,
    )
    values = rule.value_width
    if net.fused:
        products = {"in_proj_qkvz": rule.width + values, "in_proj_ba": 2 * net.num}
    else:
        products = {
            "in_proj_qkv": rule.width,
            "in_proj_z": values,
            "in_proj_b": net.num,
            "in_proj_a": net.num,
        }
    entering = tuple(
        Matmul(name=name, in_features=width, out_features=out, shard=Shard.COLUMN)
        for name, out in products.items()
    )
    norm = Pointwise(
        name=GATED_NORM,
        width=values,
        num_passes=3,
        weights=(("weight", net.value_dim),),
        shard=Shard.COLUMN,
    )
    leaving = Matmul(name="out_proj", in_features=values, out_features=width, shard=Shard.ROW)
    return (*entering, rule, norm, leaving)
