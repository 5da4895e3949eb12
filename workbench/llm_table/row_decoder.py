"""The decoder of an encoder-decoder: blocks over a second sequence that read the first.

Tokens of a row are the encoder's, so that operators of the decoder work on a multiple of them.
"""

from dataclasses import replace

from workbench.llm_table.llm_row import LlmRow, YesNo
from workbench.model.layer import Attention, Layer, Operator
from workbench.model.module_layers import over
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


def decoder_operators(row: LlmRow) -> tuple[Operator, ...]:
    """Causal self-attention, cross-attention to the encoder's tokens, gated or plain MLP.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1.
    """
    scale = row.decoder_sequence / row.sequence
    heads = Heads(num=row.heads, num_kv=row.heads, dim=row.head_dim, causal=True, fused=True)
    mlp = Mlp(width=row.ffn, gated=row.gated_mlp is YesNo.YES, activation=row.activation, fused=True)
    block = Block(width=row.hidden, heads=heads, mlp=mlp, norm=Norm.RMS)
    operators = [over(each, scale) for each in block_operators(block)]
    operators = [
        replace(each, num_keys=max(1, (row.decoder_sequence + 1) // 2))
        if isinstance(each, Attention)
        else each
        for each in operators
    ]
    crossed = (
        norm("cross_attention_norm", row.hidden, Norm.RMS),
        residual("cross_attention_residual", row.hidden),
    )
    before, after = (over(each, scale) for each in crossed)
    keys = Keys(width=row.hidden, num=row.sequence, per_token=1.0)
    cross_attention = cross_attention_operators(CROSS, row.hidden, heads, keys, tokens_scale=scale)
    index = next(index for index, each in enumerate(operators) if each.name == "attention_residual")
    return (*operators[: index + 1], before, *cross_attention, after, *operators[index + 1 :])


def decoder_head(head: Layer, tokens_scale: float) -> Layer:
    """The head over `tokens_scale` tokens per counted token."""
    return replace(head, operators=tuple(over(each, tokens_scale) for each in head.operators))
