"""Llama 3.2's language model: decoder blocks, some of which look at an image instead of the text."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.configuration_utils import PretrainedConfig
from transformers.models.mllama import modeling_mllama as mllama

from runtime.models.adapter import Brought, Context, MicrobatchData, StageLayer, Tiles
from runtime.models.attention import additive, positions
from runtime.models.decoder import DecoderAdapter, EmbedTokens
from runtime.models.decoder_families import DECODERS
from runtime.models.initialise import Fill, constant
from runtime.models.norm import widen_norms
from workbench.model.mllama import EXTRA_TOKENS, TEXT_MODEL

# Shape suffixes: T = packed tokens, R = those whose item has an image, E = tokens of images, H = heads,
# Q = queries and K = keys of one item, D = width.


@dataclass(frozen=True, slots=True)
class Read:
    """What the queries of one item see.

    Args:
        num_queries: of R, one item after the other.
        keys: places of its keys in E.
        mask: [Q, K] 0 where a query sees a key and else -inf; None: it sees every one.
    """

    num_queries: int
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class CrossContext(Context):
    """What cross-attention layers of a stage share.

    Args:
        rows: places in T of tokens whose item has an image; None: all of them.
        reads: by item that has an image and tokens here.
        blind: True for tokens in front of their item's first image. As in the model, they look at
            all that their images have, padding tiles included, and their MLP adds nothing.
    """

    rows: Tensor | None = None
    reads: tuple[Read, ...] = ()
    blind: Tensor | None = None


class EmbedWithImageToken(EmbedTokens):
    """Layer 0. A place that no other module fills is an image's: the row behind the vocabulary."""

    def __init__(self, config: PretrainedConfig) -> None:
        larger = copy.copy(config)
        larger.vocab_size = config.vocab_size + EXTRA_TOKENS
        super().__init__(larger, DECODERS[TEXT_MODEL])
        self.image_token = config.vocab_size

    def _merged(self, features: Mapping[str, Tensor], context: Context) -> Tensor:
        ids_T = context.data.input_ids
        assert ids_T is not None, "the first stage of the LLM is given its tokens"
        merged_TD: Tensor = self.embed_tokens(ids_T.masked_fill(ids_T < 0, self.image_token))
        for edge, features_ED in features.items():
            merged_TD = merged_TD.index_copy(0, context.data.placed[edge], features_ED)
        return merged_TD


class ContextAttention(nn.Module):
    """Queries from the text, keys and values from images, out of transformers' own matmuls."""

    def __init__(self, attention: mllama.MllamaTextCrossAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.head_dim: int = attention.head_dim

    def forward(self, both: Tensor, num_queries: int, reads: Sequence[Read]) -> Tensor:
        """[R, D]. `both`: [R + E, D] of the text and of the images, one tensor so that ranks that
        share the weights enter once."""
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


class CrossBlock(StageLayer):
    """A block that looks at images. Items without one pass it by."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__({"block": f"{DECODERS[TEXT_MODEL].layers}.{index}"}, config.initializer_range)
        self.block = mllama.MllamaCrossAttentionDecoderLayer(config, index)
        self.block.cross_attn = ContextAttention(self.block.cross_attn)
        widen_norms(self, mllama.MllamaTextRMSNorm)

    def fill(self, name: str) -> Fill:
        return constant(0.0) if name.endswith("gate") else super().fill(name)

    def forward(self, hidden_TD: Tensor | None, features: Mapping[str, Tensor], context: Context) -> Tensor:
        assert hidden_TD is not None, "a block is given its input"
        if not features:
            return hidden_TD
        assert isinstance(context, CrossContext), "made by the adapter of a cross-attention model"
        context_ED = torch.cat([features[edge] for edge in context.data.brought])
        if not context.reads:  # this rank's tokens look at nothing, but somebody waits for a gradient
            return hidden_TD + context_ED[:0].sum()
        rows = context.rows
        x_RD = hidden_TD if rows is None else hidden_TD.index_select(0, rows)
        y_RD = self._run(x_RD, context_ED, context)
        return y_RD if rows is None else hidden_TD.index_copy(0, rows, y_RD)

    def _run(self, x_RD: Tensor, context_ED: Tensor, context: CrossContext) -> Tensor:
        block = self.block
        both = torch.cat([block.input_layernorm(x_RD), context_ED])
        x_RD = x_RD + block.cross_attn_attn_gate.tanh() * block.cross_attn(both, len(x_RD), context.reads)
        y_RD: Tensor = block.mlp(block.post_attention_layernorm(x_RD))
        if context.blind is not None:
            y_RD = y_RD.masked_fill(context.blind, 0)
        return x_RD + block.cross_attn_mlp_gate.tanh() * y_RD


class CrossDecoderAdapter(DecoderAdapter):
    """Llama 3.2's language model, with or without images in front of it.

    Differs: every item is computed as transformers computes it alone. There, text without an image
    beside a sample with one looks at padding, so that results depend on the batch.
    """

    @property
    def prefixes(self) -> tuple[str, ...]:
        return ("", "language_model.")

    def _layer(self, index: int) -> StageLayer:
        if index == 0:
            return EmbedWithImageToken(self.config)
        if index - 1 in self.config.cross_attention_layers:
            return CrossBlock(self.config, index - 1)
        return super()._layer(index)

    def context(self, data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> Context:
        plain = super().context(data, device, dtype)
        if not data.brought:
            return plain
        held = {"data": data, "packing": plain.packing, "rotary": plain.rotary}
        return CrossContext(**held, **_reads(data, device, dtype))


def _reads(data: MicrobatchData, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """Fields of the context: which tokens look at which."""
    assert data.item_ids is not None, "given wherever images are read"
    places_T = positions(data.tokens_in, device) if data.position_ids is None else data.position_ids
    images = [image for of_edge in data.brought.values() for image in of_edge]
    starts = [0, *accumulate(image.tiles.total for image in images)]
    reads, own, blind = [], [], []
    for item in sorted({image.item for image in images}):
        rows_Q = torch.nonzero(data.item_ids == item).flatten()
        if len(rows_Q):
            seen = [(start, each) for start, each in zip(starts, images, strict=False) if each.item == item]
            sees_QK = _sees(places_T[rows_Q], [each for _, each in seen], data.tokens_in[item])
            blind_Q1 = ~sees_QK.any(dim=1, keepdim=True)
            mask = sees_QK | blind_Q1
            keys = torch.cat([start + _tokens(each.tiles, device) for start, each in seen])
            reads.append(Read(len(rows_Q), keys, None if bool(mask.all()) else additive(mask, dtype)))
            own.append(rows_Q)
            blind.append(blind_Q1)
    if not reads:
        return {}
    rows, is_blind = torch.cat(own), torch.cat(blind)
    return {
        "rows": None if len(rows) == len(data.item_ids) else rows,
        "reads": tuple(reads),
        "blind": is_blind if bool(is_blind.any()) else None,
    }


def _tokens(tiles: Tiles, device: torch.device) -> Tensor:
    """Places of an image's tokens, without each tile's padding."""
    place = torch.arange(tiles.total, device=device)
    return place[place % tiles.tokens < tiles.seen]


def _sees(places_Q: Tensor, images: Sequence[Brought], length: int) -> Tensor:
    """[Q, K] whether a token stands where it sees an image, and the image fills the tile."""
    found = []
    for image, end in zip(images, visible_until([each.place for each in images], length), strict=True):
        tiles = image.tiles
        is_inside_Q = (places_Q >= image.place) & (places_Q < end)
        is_filled_K = torch.arange(tiles.num * tiles.seen, device=places_Q.device) < tiles.filled * tiles.seen
        found.append(is_inside_Q[:, None] & is_filled_K)
    return torch.cat(found, dim=1)


def visible_until(places: Sequence[int], length: int) -> list[int]:
    """Up to where each image of an item is seen: the next image, or its end where they stand in a row.

    Source: transformers' `get_cross_attention_token_mask`.
    """
    ends = [*places[1:], length]
    last = length
    for index in reversed(range(len(places))):
        if ends[index] == places[index] + 1:
            ends[index] = last
        last = ends[index]
    return ends
