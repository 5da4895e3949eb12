"""Attention function for transformers' layers: over packed items, or under a mask object of our own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.models.attention_mask import AttentionMask, uses_kernels
from runtime.models.dense_attention import DenseKernel
from runtime.models.sinks import attend_with_sinks
from workbench.masks.builders import causal_document

# Shape suffixes: T = packed tokens, H = heads, D = head width, N = items of one length L.

PACKED_SDPA = "packed_sdpa"


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """`count` items of `length` tokens; `index` [T]: their positions in the packed tensor (None: all)."""

    length: int
    count: int
    index: Tensor | None


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of items in a packed tensor, with a block-diagonal mask: items do not see each other.

    It is passed through transformers' layers as their `attention_mask`, which they forward unchanged to the
    attention function. `restore` [T] puts the groups' tokens back in packed order. `choices` are those of
    indexers, by the index of their block, for later blocks that read the same keys.
    """

    lengths: tuple[int, ...]
    groups: tuple[LengthGroup, ...]
    restore: Tensor | None
    choices: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, compare=False)

    def __getitem__(self, index: object) -> "Packing":
        """Itself: transformers takes a mask of three dimensions out of its own for an indexer."""
        return self


class Attends(Protocol):
    """Attention with a mask of its own, and possibly keys on several ranks."""

    def attend(
        self,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[H, T, D] for G heads of keys and values.

        Args:
            window: number of visible tokens; None: no limit.
            sinks: [H], see `runtime.models.sinks`; None: there are none.
        """
        ...


def pack(lengths: Sequence[int], device: torch.device | str) -> Packing:
    """Group items by length. Groups are in order of first appearance, so the result is deterministic.

    Complexity: O(tokens).
    """
    starts: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        starts.setdefault(length, []).append(start)
        start += length
    if len(starts) == 1:
        (length,) = starts
        return Packing(tuple(lengths), (LengthGroup(length, len(lengths), None),), None)
    groups = []
    for length, first in starts.items():
        index_NL = torch.tensor(first)[:, None] + torch.arange(length)
        groups.append(LengthGroup(length, len(first), index_NL.flatten().to(device)))
    order = torch.cat([group.index for group in groups if group.index is not None])
    return Packing(tuple(lengths), tuple(groups), torch.argsort(order))


def positions(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """[T] positions that restart at 0 with every item."""
    return torch.cat([torch.arange(length) for length in lengths]).to(device)


def packed_sdpa(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Packing | Attends,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Sequence[Tensor] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention within each item, with the signature of transformers' attention functions.

    The mask decides: attention under a `Packing` is computed here, other masks compute it themselves. `s_aux`
    are sinks: with them, our kernels run on a GPU, as torch's return no log-sum-exp. Values narrower than
    keys (latent attention) are padded, as torch's fused kernel on CPUs, and kernels under masks, want one
    width. `indices` are what an indexer chose: for each group, [N, L, L] whether a query attends to a key.
    Dropout is off: a forward pass draws no random numbers.

    Returns:
        [1, T, H, D] and None (no attention weights).
    """
    width, missing = value_1HTD.shape[-1], query_1HTD.shape[-1] - value_1HTD.shape[-1]
    if missing > 0:
        padded_1HTD = functional.pad(value_1HTD, (0, missing))
        y_1THD, nothing = packed_sdpa(
            module,
            query_1HTD,
            key_1HTD,
            padded_1HTD,
            attention_mask,
            scaling=scaling,
            is_causal=is_causal,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
            indices=indices,
        )
        return y_1THD[..., :width], nothing
    attends = attention_mask
    if isinstance(attends, Packing) and s_aux is not None and uses_kernels(query_1HTD.device):
        attends = _causal_items(attends.lengths, query_1HTD.device)
    if not isinstance(attends, Packing):
        if softcap is not None:
            raise ValueError(f"attention under a mask or over several ranks has no soft cap, got {softcap}")
        scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
        y_HTD = attends.attend(
            query_1HTD[0], key_1HTD[0], value_1HTD[0], scale=scale, window=sliding_window, sinks=s_aux
        )
        return y_HTD.transpose(0, 1)[None], None
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    rule = _Rule(scaling, causal, sliding_window, softcap, s_aux)
    outputs = []
    for index, group in enumerate(attends.groups):
        q_NHLD, k_NHLD, v_NHLD = (_items(x, group) for x in (query_1HTD, key_1HTD, value_1HTD))
        own = rule if indices is None else rule._replace(chosen=indices[index])
        outputs.append(own.kernel(q_NHLD, k_NHLD, v_NHLD, own).transpose(1, 2).flatten(0, 1))
    if attends.restore is None:
        return outputs[0][None], None
    return torch.cat(outputs).index_select(0, attends.restore)[None], None


@lru_cache(maxsize=8)
def _causal_items(lengths: tuple[int, ...], device: torch.device) -> AttentionMask:
    """The mask of a `Packing` for the kernels; all layers of a microbatch have the same."""
    field = causal_document(lengths)
    return AttentionMask(field, field, device)


class _Rule(NamedTuple):
    """Visibility among the tokens of one item; a window implies causal, and so does what is chosen."""

    scale: float | None
    causal: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    chosen: Tensor | None = None

    @property
    def kernel(self) -> "Callable[[Tensor, Tensor, Tensor, _Rule], Tensor]":
        """The function that computes it."""
        if self.sinks is not None:
            return _sunk
        return _fused if self.softcap is None else _capped

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        """[L, L] or [N, 1, L, L] True where a query sees a key; None where the rule is causal or full."""
        if self.chosen is not None:
            return self.chosen[:, None]
        if self.window is None or length <= self.window:
            return None
        return _window(length, self.window, device)


def _fused(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, rule: _Rule) -> Tensor:
    """[N, H, L, D] by torch's fused kernel."""
    mask_LL = rule.mask(q_NHLD.shape[2], q_NHLD.device)
    return functional.scaled_dot_product_attention(
        q_NHLD,
        k_NHLD,
        v_NHLD,
        attn_mask=mask_LL,
        scale=rule.scale,
        is_causal=rule.causal and mask_LL is None,
        enable_gqa=q_NHLD.shape[1] != k_NHLD.shape[1],
    )


def _capped(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, rule: _Rule) -> Tensor:
    """[N, H, L, D] with scores capped to softcap * tanh(score / softcap), as in Gemma 2.

    torch's kernel has no such cap, so all scores of an item are in memory: O(H L^2) bytes.
    """
    assert rule.softcap is not None
    length, repeats = q_NHLD.shape[2], q_NHLD.shape[1] // k_NHLD.shape[1]
    k_NHLD, v_NHLD = (x.repeat_interleave(repeats, dim=1) for x in (k_NHLD, v_NHLD))
    scale = q_NHLD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    score_NHLL = torch.tanh(q_NHLD @ k_NHLD.transpose(2, 3) * (scale / rule.softcap)) * rule.softcap
    mask_LL = rule.mask(length, q_NHLD.device)
    if mask_LL is None and rule.causal:
        mask_LL = _window(length, length, q_NHLD.device)
    if mask_LL is not None:
        score_NHLL = score_NHLL.masked_fill(~mask_LL, float("-inf"))
    wide = torch.promote_types(score_NHLL.dtype, torch.float32)
    return score_NHLL.softmax(dim=-1, dtype=wide).to(v_NHLD.dtype) @ v_NHLD


def _sunk(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, rule: _Rule) -> Tensor:
    """[N, H, L, D] with a sink for every head, as in gpt-oss.

    All scores of the items are in memory while a pass computes: O(N H L^2) bytes. They are not kept for the
    backward, which computes them again.
    """
    assert rule.sinks is not None
    assert rule.causal, "language models alone have sinks"
    length, width = q_NHLD.shape[2:]
    mask = partial(_window, length, length if rule.window is None else rule.window, q_NHLD.device)
    scale = width**-0.5 if rule.scale is None else rule.scale
    return attend_with_sinks(q_NHLD, k_NHLD, v_NHLD, rule.sinks, DenseKernel(mask, scale))


def _items(x_1HTD: Tensor, group: LengthGroup) -> Tensor:
    """[N, H, L, D] the items of one length; a view where the group is everything."""
    x_HTD = x_1HTD[0]
    if group.index is not None:
        x_HTD = x_HTD.index_select(1, group.index)
    return x_HTD.unflatten(1, (group.count, group.length)).transpose(0, 1)


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of scores: 0 where a query sees a key, else -inf."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, float("-inf"))


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] True where a query sees a key: not later, and fewer than `window` tokens back."""
    return torch.ones((length, length), dtype=torch.bool, device=device).tril_().triu_(1 - window)


def register_packed_sdpa() -> None:
    """Register `PACKED_SDPA` with transformers; idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(PACKED_SDPA, packed_sdpa)
