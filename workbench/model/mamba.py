"""A Mamba-2 mixer: a state-space scan between two projections."""

from dataclasses import dataclass, replace

from workbench.model.layer import Layer, Matmul, Operator, Pointwise, Shard, StateScan

SCAN = "state_scan"
GROUPED_NORM = "grouped_norm"  # of each group of heads, of the output times an activated gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Sizes of a Mamba-2 mixer; heads and widths as of `StateScan`.

    Args:
        num, groups: heads, and groups of heads that share their keys and queries (B and C).
        state, dim: width of a head's keys, and of a head.
        bias, conv_bias: whether the projections have one, and the convolution.
    """

    num: int
    groups: int
    state: int
    dim: int
    kernel: int
    chunk: int
    bias: bool = False
    conv_bias: bool = True

    def __post_init__(self) -> None:
        if self.num % self.groups:
            raise ValueError(
                f"Mamba-2: want heads that divide over {self.groups} groups, got {self.num}; "
                f"nearest: {max(self.num // self.groups, 1) * self.groups}"
            )


def with_mamba(block: Layer, mamba: Mamba) -> Layer:
    """The block with a Mamba-2 mixer between its first norm and its first residual sum."""
    names = [operator.name for operator in block.operators]
    first, last = names.index("attention_norm") + 1, names.index("attention_residual")
    mixer = mamba_operators(block.out_width, mamba)
    return replace(block, operators=(*block.operators[:first], *mixer, *block.operators[last:]))


def mamba_operators(width: int, mamba: Mamba) -> tuple[Operator, ...]:
    """One matmul for gates, values, keys, queries and steps, the scan behind its convolution, norm, matmul.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7.1; layers as in transformers'
    `NemotronHMamba2Mixer`.
    """
    scan = StateScan(
        name=SCAN,
        num_heads=mamba.num,
        num_key_heads=mamba.groups,
        key_dim=mamba.state,
        value_dim=mamba.dim,
        kernel=mamba.kernel,
        chunk=mamba.chunk,
        bias=mamba.conv_bias,
    )
    values = scan.value_width
    return (
        Matmul(
            name="in_proj",
            in_features=width,
            out_features=values + scan.width + mamba.num,
            bias=mamba.bias,
            shard=Shard.COLUMN,
        ),
        scan,
        Pointwise(
            name=GROUPED_NORM,
            width=values,
            num_passes=3,
            weights=(("weight", values),),
            shard=Shard.COLUMN,
            cuts_weights=True,
        ),
        Matmul(name="out_proj", in_features=values, out_features=width, bias=mamba.bias, shard=Shard.ROW),
    )
