"""Builders of the layers of modules: embeddings, blocks and heads."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.model.layer import Layer, LayerKind, Lookup, Matmul, Operator, Pointwise, Shard
from workbench.model.transformer import Block, Norm, block_operators, norm, residual

MOST_BLOCKS = 10_000
SHARED_EMBEDDING = "embed_tokens.weight"


def block_layers(block: Block, num: int) -> tuple[Layer, ...]:
    """`num` equal blocks, named block.0, block.1, ...; ValueError for more than any model has."""
    if num > MOST_BLOCKS:
        raise ValueError(f"a module has at most {MOST_BLOCKS:,} blocks, got {num}")
    return unequal_block_layers((block,) * num)


def unequal_block_layers(blocks: Sequence[Block]) -> tuple[Layer, ...]:
    """One layer per block, named block.0, block.1, ...; layers of equal blocks share their operators."""
    operators = {block: block_operators(block) for block in dict.fromkeys(blocks)}
    return tuple(
        Layer(
            name=f"block.{index}",
            kind=LayerKind.BLOCK,
            operators=operators[block],
            out_width=block.width,
        )
        for index, block in enumerate(blocks)
    )


def over(operator: Operator, share: float) -> Operator:
    """The operator over this share of the counted tokens; a table's rows stay as they are."""
    return operator if isinstance(operator, Lookup) else replace(operator, tokens_scale=share)


def token_embedding(
    vocab: int,
    width: int,
    *,
    name: str = "embed_tokens",
    more: tuple[Operator, ...] = (),
    tied: bool = False,
) -> Layer:
    """The token table, then `more` (positions, scale). Tied: the LM head has the same table.

    `name` is the table's name in a checkpoint, without its prefix.
    """
    table = Lookup(name=name, num_rows=vocab, width=width, shard=Shard.COLUMN)
    return Layer(
        name="embed",
        kind=LayerKind.EMBED,
        operators=(table, *more),
        out_width=width,
        tied=((f"{name}.weight", SHARED_EMBEDDING),) if tied else (),
    )


def learned_positions(num: int, width: int) -> tuple[Operator, ...]:
    """A table of positions, added to the tokens."""
    return (
        Lookup(name="position_embedding", num_rows=num, width=width),
        residual("add_positions", width),
    )


def patch_embedding(
    *,
    patch_elements: int,
    width: int,
    bias: bool,
    num_patches: int | None = None,
    has_class_token: bool = False,
    pre_norm: Norm | None = None,
) -> Layer:
    """Patches to vectors: the strided convolution is a matmul over [patches, patch_elements].

    Args:
        patch_elements: channels x patch height x patch width (x frames of a temporal patch).
        width: width of the encoder.
        bias: whether the convolution has one.
        num_patches: patches of an image of fixed size, whose positions are a table; None: any size, with
            rotary positions.
        has_class_token: whether a learned token precedes the patches and counts as a token.
        pre_norm: norm after the positions (CLIP).
    """
    patch_share = 1.0
    positions: tuple[Operator, ...] = ()
    if num_patches is not None:
        if num_patches < 1:
            raise ValueError("an image must be as large as a patch, or larger")
        num_tokens = num_patches + has_class_token
        patch_share = num_patches / num_tokens
        positions = learned_positions(num_tokens, width)
    class_token: tuple[Operator, ...] = ()
    if has_class_token:
        weights = (("embedding", width),)
        class_token = (Pointwise(name="class_token", width=width, num_passes=2, weights=weights),)
    matmul = Matmul(
        name="patch_embedding",
        in_features=patch_elements,
        out_features=width,
        bias=bias,
        tokens_scale=patch_share,
    )
    norms = () if pre_norm is None else (norm("pre_norm", width, pre_norm),)
    operators = (matmul, *class_token, *positions, *norms)
    return Layer(name="embed", kind=LayerKind.EMBED, operators=operators, out_width=width)


def whisper_stem(*, mel_bins: int, width: int, num_positions: int | None) -> Layer:
    """Two convolutions of kernel 3 over mel frames; the second has stride 2 and halves them.

    A token is one frame after the stride, so the first convolution runs at two rows a token.
    The position table is a parameter of the real model, although it is never trained; None: it has none.
    """
    return Layer(
        name="embed",
        kind=LayerKind.EMBED,
        operators=(
            Matmul(name="conv1", in_features=3 * mel_bins, out_features=width, bias=True, tokens_scale=2.0),
            Pointwise(name="conv1.gelu", width=2 * width, num_passes=2),
            Matmul(name="conv2", in_features=3 * width, out_features=width, bias=True),
            Pointwise(name="conv2.gelu", width=width, num_passes=2),
            *(() if num_positions is None else learned_positions(num_positions, width)),
        ),
        out_width=width,
    )


def lm_head(vocab: int, width: int, kind: Norm | None, *, tied: bool = False, bias: bool = False) -> Layer:
    """Final norm, vocabulary matmul, and the loss's read and write of the logits."""
    norms = () if kind is None else (norm("final_norm", width, kind),)
    return Layer(
        name="head",
        kind=LayerKind.HEAD,
        operators=(
            *norms,
            Matmul(name="lm_head", in_features=width, out_features=vocab, bias=bias, shard=Shard.COLUMN),
            Pointwise(name="loss", width=vocab, num_passes=2, shard=Shard.COLUMN),
        ),
        out_width=vocab,
        tied=(("lm_head.weight", SHARED_EMBEDDING),) if tied else (),
    )


def bert_embedding(vocab: int, width: int, *, num_positions: int) -> Layer:
    """Tokens, positions and two sentence kinds, then a norm; the token table is tied to the head."""
    kinds = Lookup(name="token_type_embedding", num_rows=2, width=width)
    more = (kinds, *learned_positions(num_positions, width), norm("embed_norm", width, Norm.LAYER))
    return token_embedding(vocab, width, more=more, tied=True)


def bert_head(vocab: int, width: int) -> Layer:
    """Masked-token head: a square matmul, GELU and norm before the tied vocabulary matmul."""
    head = lm_head(vocab, width, None, tied=True, bias=True)
    transform = (
        Matmul(name="transform", in_features=width, out_features=width, bias=True),
        Pointwise(name="transform.gelu", width=width, num_passes=2),
        norm("transform_norm", width, Norm.LAYER),
    )
    return replace(head, operators=(*transform, *head.operators))
