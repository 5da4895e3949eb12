"""Cross-attention of a language model's tokens to images: its masks, and the attention itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.models.adapter import Context
from runtime.models.attention import additive, positions
from runtime.models.context_images import ContextImage, Tiles

# Shape suffixes: T = packed tokens, R = those whose item has an image, E = tokens of images, H = heads,
# Q = queries and K = keys of one item, D = width.


@dataclass(frozen=True, slots=True)
class Read:
    """Keys and mask of the queries of one item.

    Args:
        num_queries: number of its rows in R.
        keys: positions of its keys in E.
        mask: [Q, K] 0 where a query sees a key, else -inf; None: it sees all.
    """

    num_queries: int
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class CrossContext(Context):
    """Context that the cross-attention layers of a stage share.

    Args:
        rows: positions in T of tokens whose item has an image; None: all of them.
        reads: one per item with an image and tokens on this rank.
        blind: True for tokens before their item's first image. As in the model, they attend to all tokens
            of their images, including padding tiles, and their MLP adds nothing.
    """

    rows: Tensor | None = None
    reads: tuple[Read, ...] = ()
    blind: Tensor | None = None


class ContextAttention(nn.Module):
    """Attention with queries from the text, keys and values from images, by transformers' own matmuls."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.head_dim: int = attention.head_dim

    def forward(self, both: Tensor, num_queries: int, reads: Sequence[Read]) -> Tensor:
        """[R, D]. `both`: [R + E, D] of text and images, one tensor so that tensor-parallel ranks
        enter their region once."""
        x_RD, context_ED = both[:num_queries], both[num_queries:]
        q_RHD = self.q_norm(self.q_proj(x_RD).unflatten(-1, (-1, self.head_dim)))
        k_EHD = self.k_norm(self.k_proj(context_ED).unflatten(-1, (-1, self.head_dim)))
        v_EHD = self.v_proj(context_ED).unflatten(-1, (-1, self.head_dim))
        outputs = []
        for read, q_QHD in zip(reads, q_RHD.split([read.num_queries for read in reads]), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in (q_QHD, k_EHD[read.keys], v_EHD[read.keys]))
            y_1HQD = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=read.mask, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(y_1HQD[0].transpose(0, 1).flatten(1))
        y_RD: Tensor = self.o_proj(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
        return y_RD


def cross_context(plain: Context, device: torch.device, dtype: torch.dtype) -> Context:
    """The context with the reads of every item, if the microbatch has images."""
    data = plain.data
    if not data.context_images:
        return plain
    assert data.item_ids is not None, "present wherever images are read"
    places_T = positions(data.tokens_in, device) if data.position_ids is None else data.position_ids
    images = [image for of_edge in data.context_images.values() for image in of_edge]
    starts = [0, *accumulate(image.tiles.total for image in images)]
    reads, rows_of_items, blind = [], [], []
    for item in sorted({image.item for image in images}):
        rows_Q = torch.nonzero(data.item_ids == item).flatten()
        if len(rows_Q):
            visible = [
                (start, each) for start, each in zip(starts, images, strict=False) if each.item == item
            ]
            sees_QK = _sees(places_T[rows_Q], [each for _, each in visible], data.tokens_in[item])
            blind_Q1 = ~sees_QK.any(dim=1, keepdim=True)
            mask = sees_QK | blind_Q1
            keys = torch.cat([start + _tokens(each.tiles, device) for start, each in visible])
            reads.append(Read(len(rows_Q), keys, None if bool(mask.all()) else additive(mask, dtype)))
            rows_of_items.append(rows_Q)
            blind.append(blind_Q1)
    shared: dict[str, Any] = {"data": data, "packing": plain.packing, "rotary": plain.rotary}
    if not reads:
        return CrossContext(**shared)
    rows, is_blind = torch.cat(rows_of_items), torch.cat(blind)
    return CrossContext(
        **shared,
        rows=None if len(rows) == len(data.item_ids) else rows,
        reads=tuple(reads),
        blind=is_blind if bool(is_blind.any()) else None,
    )


def _tokens(tiles: Tiles, device: torch.device) -> Tensor:
    """Positions of an image's tokens, without each tile's padding."""
    index = torch.arange(tiles.total, device=device)
    return index[index % tiles.tokens < tiles.seen]


def _sees(places_Q: Tensor, images: Sequence[ContextImage], length: int) -> Tensor:
    """[Q, K] whether a token is at a position that sees an image, and the image fills the tile."""
    visibility = []
    for image, end in zip(images, visible_until([other.position for other in images], length), strict=True):
        tiles = image.tiles
        is_inside_Q = (places_Q >= image.position) & (places_Q < end)
        is_filled_K = torch.arange(tiles.num * tiles.seen, device=places_Q.device) < tiles.filled * tiles.seen
        visibility.append(is_inside_Q[:, None] & is_filled_K)
    return torch.cat(visibility, dim=1)


def visible_until(places: Sequence[int], length: int) -> list[int]:
    """[images] end of the positions that see each image of an item; adjacent images share the last one's.

    Source: transformers' `get_cross_attention_token_mask`.
    """
    ends = [*places[1:], length]
    last = length
    for index in reversed(range(len(places))):
        if ends[index] == places[index] + 1:
            ends[index] = last
        last = ends[index]
    return ends
