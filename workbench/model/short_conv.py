"""A gated short convolution in place of a block's attention (LFM2)."""

from collections.abc import Iterable
from dataclasses import replace

from workbench.model.layer import Layer, Matmul, Operator, Pointwise, Shard

SHORT_CONV = "short_conv"
PARTS = 3  # of what the first matmul gives: two gates, and what the convolution reads times the first
_PASSES = 8  # a product of two tensors, the convolution, a product of two tensors


def with_short_conv(block: Layer, kernel: int, *, bias: bool) -> Layer:
    """The block with a short convolution between its first norm and its first residual sum.

    Each channel of a token is a sum over that channel of `kernel` tokens of its sample, itself the last. That
    is counted by bytes, as memory-bound operators are.

    Source: Liquid AI 2025, "LFM2 Technical Report", section 2; layers as in transformers' `Lfm2ShortConv`.
    """
    names, width = [operator.name for operator in block.operators], block.out_width
    first, last = names.index("attention_norm") + 1, names.index("attention_residual")
    entering = Matmul(
        name="in_proj", in_features=width, out_features=PARTS * width, bias=bias, shard=Shard.COLUMN
    )
    weights = (("conv", kernel * width), *((("conv_bias", width),) if bias else ()))
    rule = Pointwise(
        name=SHORT_CONV,
        width=width,
        num_passes=_PASSES,
        weights=weights,
        shard=Shard.COLUMN,
        cuts_weights=True,
    )
    leaving = Matmul(name="out_proj", in_features=width, out_features=width, bias=bias, shard=Shard.ROW)
    operators = (*block.operators[:first], entering, rule, leaving, *block.operators[last:])
    return replace(block, operators=operators)


def has_short_conv(operators: Iterable[Operator]) -> bool:
    """Whether one of them mixes neighbouring tokens of a sample, and so needs all of these on one rank."""
    return any(operator.name == SHORT_CONV for operator in operators)
