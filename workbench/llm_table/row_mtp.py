"""Multi-token prediction: blocks behind the last one that each predict one token further.

Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2. A module norms the embedding of a token further on and
the hidden state in front of it, projects both to one, and has a block, a norm and a loss of its own; table
and head are the model's. All are on the last stage, in front of the model's own head, as in Megatron-Core,
`MultiTokenPredictionBlock`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workbench.model.layer import Layer, Lookup, Matmul, Operator, Shard
from workbench.model.module_layers import SHARED_EMBEDDING
from workbench.model.transformer import Norm, norm

LAYERS = 3  # of one module: the projection, its block, its head
PROJECTION = "mtp_proj"
SHARED_HEAD = "lm_head.weight"


def with_mtp(layers: Sequence[Layer], num: int) -> tuple[Layer, ...]:
    """Embedding, blocks and head with `num` modules between the last block, which theirs are like, and the
    head.

    Differs: the all-gather behind a projection that tensor-parallel ranks cut is free.
    """
    if not num:
        return tuple(layers)
    embed, *blocks, head = layers
    embed = replace(embed, tied=((f"{embed.operators[0].name}.weight", SHARED_EMBEDDING),))
    head = replace(head, tied=head.tied or ((SHARED_HEAD, SHARED_HEAD),))
    modules = (layer for index in range(num) for layer in _module(index, embed, blocks[-1], head))
    return (embed, *blocks, *modules, head)


def _module(index: int, embed: Layer, block: Layer, head: Layer) -> Iterator[Layer]:
    name, width = f"mtp.{index}", block.out_width
    table = embed.operators[0]
    assert isinstance(table, Lookup), "an embedding begins with its table"
    entering: tuple[Operator, ...] = (
        table,
        norm("mtp_embedding_norm", width, Norm.RMS),
        norm("mtp_hidden_norm", width, Norm.RMS),
        Matmul(name=PROJECTION, in_features=2 * width, out_features=width, shard=Shard.COLUMN),
    )
    yield replace(block, name=f"{name}.projection", operators=entering, tied=embed.tied)
    yield replace(block, name=f"{name}.block")
    yield replace(head, name=f"{name}.head", out_width=width)
