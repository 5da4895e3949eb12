"""Cells of the kernel benchmark: a mask, its tensors on a device, and the implementations that compute it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, create_block_mask, flex_attention

from runtime.kernels.bitfield_attention.attention import Backward, Options, bitfield_attention
from runtime.kernels.bitfield_attention.head_tiles import has_engine
from runtime.kernels.bitfield_attention.mask import KernelMask
from runtime.kernels.bitfield_attention.plan import KernelPlan
from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split
from runtime.kernels.bitfield_attention.tiles import FULL, PARTIAL
from runtime.kernels.bitfield_attention.tiles import classify as device_tiles
from runtime.kernels.bitfield_attention.tilings import Pass, Tiling
from runtime.models.attention_mask import AttentionMask
from workbench.balance.tokens.policies import longest_first
from workbench.masks.bitfield import Bitfield
from workbench.masks.builders import DRAWN, causal
from workbench.masks.tiles import area, classify, row_work

BLOCK = 128
MOST_CODES = 1000  # that FlexAttention may compile in one process
PUBLISHED_SPLIT_TILES = 4096 // BLOCK  # keys of one subblock in the released code

MASKS: dict[str, Callable[..., Bitfield]] = {"causal": lambda length, seed: causal(length), **DRAWN}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Contender(Enum):
    """An implementation that computes a cell."""

    OURS = "ours"
    WHOLE = "ours, longest first, no split"
    FIXED = "ours, fixed split"
    PUBLISHED = "ours as published: 128 x 32 tiles, one stage, fixed split"
    DETERMINISTIC = "ours, deterministic"
    ENGINE = "ours, dQ added by the copy engine"
    FLEX = "FlexAttention"
    FLEX_TUNED = "FlexAttention, max-autotune"
    FLEX_FLASH = "FlexAttention, FLASH backend"
    FLASH = "SDPA flash, causal"
    CUDNN = "SDPA cuDNN, causal"


OPTIONS = {
    Contender.OURS: Options(),
    Contender.WHOLE: Options(split=Split.NEVER),
    Contender.FIXED: Options(split=FixedSplit(PUBLISHED_SPLIT_TILES)),
    Contender.PUBLISHED: Options(
        split=FixedSplit(PUBLISHED_SPLIT_TILES),
        tilings=tuple((which, Tiling(128, 32, 4, 1)) for which in Pass),
    ),
    Contender.DETERMINISTIC: Options(backward=Backward.DETERMINISTIC),
    Contender.ENGINE: Options(backward=Backward.ENGINE),
}
FLEX = (Contender.FLEX, Contender.FLEX_TUNED, Contender.FLEX_FLASH)
BACKENDS = {Contender.FLASH: SDPBackend.FLASH_ATTENTION, Contender.CUDNN: SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True, slots=True)
class Cell:
    """One launch shape: all queries of a mask, or those of rank 0 of `ranks` placed longest first."""

    mask: str
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ranks: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        shape = f"{self.heads}:{self.kv_heads}x{self.head_dim}"
        local = f"/cp{self.ranks}" if self.ranks > 1 else ""
        return f"{self.mask}-{self.length // 1024}k-{shape}{local}#{self.seed}"


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The tensors of a cell on a device, shared by all contenders.

    `forward_flop` counts attended pairs exactly, 4 D per pair and head; a backward is 2.5 times that.
    """

    cell: Cell
    mask: KernelMask
    plan: KernelPlan
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    forward_flop: float


def set_up(cell: Cell, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Stage:
    """Build mask, tiles (as the runtime plans them) and random tensors of a cell."""
    keys = MASKS[cell.mask](cell.length, seed=cell.seed)
    queries = keys.take(_rank_tokens(keys, cell.ranks)) if cell.ranks > 1 else keys
    mask, plan = AttentionMask(queries, keys, device).planned()
    generator = torch.Generator(device).manual_seed(cell.seed)

    def normal(tokens: int, heads: int) -> Tensor:
        x = torch.randn(1, tokens, heads, cell.head_dim, generator=generator, device=device)
        return x.to(dtype).transpose(1, 2)

    return Stage(
        cell=cell,
        mask=mask,
        plan=plan,
        q=normal(len(queries), cell.heads),
        k=normal(len(keys), cell.kv_heads),
        v=normal(len(keys), cell.kv_heads),
        do=normal(len(queries), cell.heads),
        forward_flop=4.0 * area(queries, keys) * cell.heads * cell.head_dim,
    )


def _rank_tokens(tokens: Bitfield, ranks: int) -> np.ndarray:
    """Tokens of rank 0 after longest-first placement of the blocks."""
    owner = longest_first(row_work(classify(tokens, tokens, BLOCK, BLOCK)), ranks)
    return np.flatnonzero(np.repeat(owner, BLOCK)[: len(tokens)] == 0)


def attention_of(contender: Contender, stage: Stage) -> Attention:
    """Return the contender's attention function for a stage, with its mask precomputed.

    Raises:
        ValueError: SDPA on a mask that is not causal over all its tokens.
    """
    if contender in OPTIONS:
        options = OPTIONS[contender]
        return lambda q, k, v: bitfield_attention(q, k, v, stage.mask, stage.plan, options=options)
    if contender in BACKENDS:
        if stage.cell.mask != "causal" or stage.cell.ranks > 1:
            raise ValueError(f"{contender.value}: {stage.cell.name} is not the causal mask")
        return lambda q, k, v: _causal(q, k, v, BACKENDS[contender])
    return _flex(contender, stage)


def _causal(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _flex(contender: Contender, stage: Stage) -> Attention:
    block_mask = flex_mask(stage.mask)
    grouped = stage.cell.heads != stage.cell.kv_heads
    backend = {"kernel_options": {"BACKEND": "FLASH"}} if contender is Contender.FLEX_FLASH else {}
    mode = "max-autotune-no-cudagraphs" if contender is Contender.FLEX_TUNED else None
    call: Any = compiled_flex(mode) if stage.q.is_cuda else flex_attention
    return lambda q, k, v: call(q, k, v, block_mask=block_mask, enable_gqa=grouped, **backend)


@cache
def compiled_flex(mode: str | None) -> Any:
    """Compile FlexAttention once for all cells; masks of one length and predicate share the code.

    Sizes are compile-time constants, as FlexAttention needs for full speed: each length compiles once for
    masks with windows or segments and once for those without.
    """
    dynamo.cache_size_limit = MOST_CODES
    functorch.donated_buffer = False  # a backward runs many times over one graph
    return torch.compile(flex_attention, dynamic=False, mode=mode)


def runs_on(contender: Contender, device: torch.device) -> bool:
    """Whether the device supports a contender.

    GPUs older than Hopper have no copy engine, and that of Triton's interpreter does not add.
    """
    return contender is not Contender.ENGINE or (device.type == "cuda" and has_engine(device))


def has_backward(contender: Contender, device: torch.device) -> bool:
    """Whether the contender has a backward; FlexAttention has none on a CPU."""
    return device.type == "cuda" or contender not in FLEX


def has_flash_backend() -> bool:
    """Whether this torch has FlexAttention's FLASH backend and the package it compiles with is installed."""
    has_option = "BACKEND" in getattr(FlexKernelOptions, "__annotations__", {})
    return has_option and find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def flex_mask(mask: KernelMask) -> BlockMask:
    """Return FlexAttention's block mask of the same predicate and tiles, as `built_flex_mask` does.

    That function compares all pairs at once: tens of GB at 64k tokens, too much for benches that share a GPU.
    """
    kinds = device_tiles(mask, BLOCK, BLOCK)
    (partial, partial_at), (full, full_at) = (_ordered(kinds == kind) for kind in (PARTIAL, FULL))
    lengths = (mask.num_queries, mask.num_keys)
    return BlockMask.from_kv_blocks(
        partial, partial_at, full, full_at, BLOCK_SIZE=BLOCK, mask_mod=_predicate(mask), seq_lengths=lengths
    )


def _ordered(is_kind: Tensor) -> tuple[Tensor, Tensor]:
    """Number of columns of a kind in every row, and all columns, those first: [1, 1, R], [1, 1, R, C]."""
    columns = torch.argsort(is_kind.to(torch.uint8), dim=1, descending=True, stable=True)
    return is_kind.sum(1).to(torch.int32)[None, None], columns.to(torch.int32)[None, None]


def built_flex_mask(mask: KernelMask) -> BlockMask:
    """Make FlexAttention's own block mask of the predicate from the same folded words.

    Not compiled: the compiler of torch 2.11 takes minutes for the sort in it (seen on an H100's machine).
    """
    return create_block_mask(
        _predicate(mask),
        B=None,
        H=None,
        Q_LEN=mask.num_queries,
        KV_LEN=mask.num_keys,
        device=mask.device,
        BLOCK_SIZE=BLOCK,
    )


def _predicate(mask: KernelMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    allow, always = mask.query_words
    last, query_segment, first = mask.query_limits
    own, (position, key_segment) = mask.key_words, mask.key_places

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = ((allow[q] & own[k]) != 0) & (position[k] <= last[q])
        if mask.has_segments:
            seen = seen & (query_segment[q] == key_segment[k])
        if mask.has_window:
            seen = seen & ((position[k] >= first[q]) | ((always[q] & own[k]) != 0))
        return seen

    return sees
