"""The model of a row as layers: embedding, blocks, head."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter

from workbench.llm_table.llm_row import PLAIN, SEES_ALL, Architecture, LlmRow, YesNo
from workbench.llm_table.row_decoder import decoder_head, decoder_operators
from workbench.llm_table.row_diffusion import mmdit_of, modulated
from workbench.llm_table.row_mtp import with_mtp
from workbench.llm_table.row_pattern import pattern_blocks
from workbench.model import mmdit
from workbench.model.delta_net import DeltaNet, with_delta_net
from workbench.model.experts import Experts, with_experts
from workbench.model.latent_attention import LatentHeads, with_latent_attention
from workbench.model.layer import Attention, Layer, LayerKind, Operator
from workbench.model.lora import Lora
from workbench.model.model_graph import TEXT, ModelGraph, Module
from workbench.model.module_layers import learned_positions, lm_head, patch_embedding, token_embedding
from workbench.model.trainable import adapted_layers
from workbench.model.transformer import Block, Heads, Mlp, Norm, block_operators

MODULE = "llm"
CHANNELS = 3  # of an image
SHAPE = (
    *(
        "architecture",
        "hidden",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "gated_mlp",
        "qk_norm",
        "activation",
    ),
    *("padded_vocab", "sequence", "tied", "window", "full_every", "patch", "lora_rank"),
    *("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim", "conv_kernel"),
    *("gated_attention", "rotary_dim", "shared_expert_gate"),
    *("pattern", "mamba_heads", "mamba_groups", "mamba_state", "mamba_head_dim", "mamba_chunk"),
    *("lora_modules", "tp"),
    *("single_layers", "text_sequence", "mtp_layers"),
    *("q_lora", "kv_lora", "nope_dim", "rope_dim", "v_dim", "decoder_layers", "decoder_sequence"),
    *("experts", "topk", "expert_ffn", "shared_expert_ffn", "first_dense_layers", "capacity"),
    "expert_load_cv",
)  # fields that a model depends on
_shape_of = attrgetter(*SHAPE)


def model_of(row: LlmRow) -> ModelGraph:
    """Embedding, blocks and head; rows of one shape share their layers."""
    modules = (Module(name=MODULE, modality=TEXT, layers=_layers(_Shape(row))),)
    return ModelGraph(name=MODULE, modules=modules)


def model_without_copies(row: LlmRow) -> ModelGraph:
    """The row's model with each of its key heads once, however many ranks hold it; padded vocabulary."""
    return model_of(replace(row, tp=1, vocab=row.padded_vocab, vocab_multiple=1))


class _Shape:
    """A row reduced to its model: rows of equal shape are equal."""

    def __init__(self, row: LlmRow) -> None:
        self.row, self._values = row, _shape_of(row)

    def __hash__(self) -> int:
        return hash(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and self._values == other._values


@lru_cache(maxsize=512)
def _layers(shape: _Shape) -> tuple[Layer, ...]:
    row = shape.row
    if row.architecture is Architecture.MMDIT:
        return mmdit.mmdit_layers(mmdit_of(row))
    if row.pattern:
        block = block_of(row)
        blocks = pattern_blocks(row, block, _experts(row, block) if row.experts else None)
        return (_embedding(row), *_block_layers(row, blocks), _head(row))
    blocks = []
    known: dict[tuple[bool, bool], tuple[Operator, ...]] = {}
    for index in range(row.layers):
        kind = _is_full(row, index), row.experts > 0 and index >= row.first_dense_layers
        if kind not in known:
            known[kind] = _operators(row, is_full=kind[0], has_experts=kind[1])
        blocks.append(known[kind])
    if row.decoder_layers:
        blocks += [decoder_operators(row)] * row.decoder_layers
    layers = _embedding(row), *_block_layers(row, blocks), _head(row)
    return with_mtp(_with_lora(layers, row), row.mtp_layers)


def _is_full(row: LlmRow, index: int) -> bool:
    """Whether a block has full attention: neither a window nor a delta rule in its place."""
    has_other = row.window > 0 or row.linear_key_heads > 0
    return not has_other or (row.full_every > 0 and (index + 1) % row.full_every == 0)


def _block_layers(row: LlmRow, blocks: list[tuple[Operator, ...]]) -> Iterator[Layer]:
    """One layer per block."""
    for index, operators in enumerate(blocks):
        yield Layer(name=f"block.{index}", kind=LayerKind.BLOCK, operators=operators, out_width=row.hidden)


def _with_lora(layers: tuple[Layer, ...], row: LlmRow) -> tuple[Layer, ...]:
    """The layers, with the row's adapters if it has some, which alone are trained then."""
    if not row.lora_rank:
        return layers
    lora = Lora(rank=row.lora_rank, alpha=row.lora_rank)  # of any scale, on which no cost depends
    return adapted_layers([replace(each, trainable=False) for each in layers], lora, row.lora_modules)


def _operators(row: LlmRow, *, is_full: bool, has_experts: bool) -> tuple[Operator, ...]:
    block = block_of(row)
    operators = block_operators(block)
    if row.window and not is_full:
        operators = tuple(_windowed(each, row) if isinstance(each, Attention) else each for each in operators)
    if row.is_mla:
        operators = with_latent_attention(operators, _latent_heads(row))
    if row.architecture is Architecture.DIT:
        operators = modulated(operators, row)
    layer = Layer(name="block", kind=LayerKind.BLOCK, operators=operators, out_width=row.hidden)
    if row.linear_key_heads and not is_full:
        layer = with_delta_net(layer, _delta_net(row))
    if not has_experts:
        return layer.operators
    return with_experts(layer, _experts(row, block)).operators


def _experts(row: LlmRow, block: Block) -> Experts:
    shared = row.shared_expert_ffn
    return Experts(
        num=row.experts,
        num_chosen=row.topk,
        capacity=row.capacity or 1.0,
        mlp=replace(block.mlp, width=row.expert_ffn),
        shared=replace(block.mlp, width=shared) if shared else None,
        gates_shared=row.shared_expert_gate is YesNo.YES,
        load_cv=row.expert_load_cv,
    )


def block_of(row: LlmRow) -> Block:
    """The block of the row's architecture. With more tensor-parallel ranks than key heads, each rank has
    one. Blocks of one mixer know no positions.
    """
    has_biases = row.architecture in PLAIN
    return Block(
        width=row.hidden,
        heads=Heads(
            num=row.heads,
            num_kv=max(row.kv_heads, row.tp),
            dim=row.head_dim,
            causal=row.architecture not in SEES_ALL,
            bias="qkvo" if has_biases else "",
            fused=True,
            qk_norm=Norm.RMS if row.qk_norm is YesNo.YES else None,
            rotary=row.architecture is Architecture.LLAMA and not row.pattern,
            rotary_dim=None if row.rotary_dim == row.head_dim else row.rotary_dim,
            gated=row.gated_attention is YesNo.YES,
        ),
        mlp=Mlp(
            width=row.ffn,
            gated=row.gated_mlp is YesNo.YES,
            activation=row.activation,
            bias=has_biases,
            fused=True,
        ),
        norm=Norm.LAYER if has_biases else Norm.RMS,
    )


def _windowed(attention: Attention, row: LlmRow) -> Attention:
    """Limit attention to the window; without a causal mask, each token sees as many as the window has."""
    if row.architecture in SEES_ALL:
        return replace(attention, num_keys=min(row.window, row.sequence))
    return replace(attention, window=row.window)


def _delta_net(row: LlmRow) -> DeltaNet:
    return DeltaNet(
        num=row.linear_value_heads,
        num_keys=row.linear_key_heads,
        key_dim=row.linear_key_dim,
        value_dim=row.linear_value_dim,
        kernel=row.conv_kernel,
        fused=True,
    )


def _latent_heads(row: LlmRow) -> LatentHeads:
    return LatentHeads(
        num=row.heads,
        q_rank=row.q_lora,
        kv_rank=row.kv_lora,
        nope_dim=row.nope_dim,
        rope_dim=row.rope_dim,
        value_dim=row.v_dim,
        enters_whole=False,
    )


def _embedding(row: LlmRow) -> Layer:
    if row.architecture is Architecture.DIT:
        return mmdit.embedding(mmdit_of(row))
    if row.architecture is Architecture.VIT:
        elements = CHANNELS * row.patch**2
        return patch_embedding(patch_elements=elements, width=row.hidden, bias=True, num_patches=row.sequence)
    positions: tuple[Operator, ...] = ()
    if row.architecture is Architecture.GPT:
        positions = learned_positions(row.sequence, row.hidden)
    is_tied = row.tied is YesNo.YES
    return token_embedding(row.padded_vocab, row.hidden, more=positions, tied=is_tied)


def _head(row: LlmRow) -> Layer:
    """The head; for a vit over one vector per image, for an encoder-decoder over the decoder's tokens."""
    if row.architecture is Architecture.DIT:
        return mmdit.head(mmdit_of(row))
    is_vit = row.architecture is Architecture.VIT
    kind = Norm.LAYER if row.architecture in PLAIN else Norm.RMS
    head = lm_head(row.padded_vocab, row.hidden, kind, tied=row.tied is YesNo.YES and not is_vit)
    if is_vit:
        return decoder_head(head, 1 / row.sequence)
    if row.decoder_layers:
        return decoder_head(head, row.decoder_sequence / row.sequence)
    return head
