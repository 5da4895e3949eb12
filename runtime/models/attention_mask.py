"""A planned mask on a device, as transformers' layers take it: kernels on a GPU, dense on the CPU."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.kernels.bitfield_attention.attention import DEFAULT, Options, bitfield_attention
from runtime.kernels.bitfield_attention.mask import KernelMask, kernel_mask
from runtime.kernels.bitfield_attention.plan import BLOCK, KernelPlan, make_plan
from runtime.models.token_fields import token_fields
from workbench.masks.bitfield import Bitfield, dense
from workbench.masks.builders import narrowed

# Shape suffixes: B = batch, H = query heads, G = key/value heads, Q = queries, K = keys, D = head width.


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """Who attends to whom in one microbatch, for every layer of a stage.

    Like `Packing`, it travels through transformers' layers as their `attention_mask`. What a device
    needs is made on first use, once per window, and kept; `prepare` makes it ahead of time.

    Args:
        queries: fields of the tokens that ask.
        keys: fields of the tokens that answer; the same object where a row attends to itself.
        device: where attention runs.
        block: queries and keys of one tile.
        options: of the kernels.
    """

    queries: Bitfield
    keys: Bitfield
    device: torch.device
    block: int = BLOCK
    options: Options = DEFAULT
    _dense: dict[int | None, Tensor] = field(default_factory=dict, repr=False)
    _planned: dict[int | None, tuple[KernelMask, KernelPlan]] = field(default_factory=dict, repr=False)

    def prepare(self, window: int | None = None) -> None:
        """Do all work on the mask now."""
        if self.device.type == "cuda":
            self.planned(window)
        else:
            self.dense(window)

    def dense(self, window: int | None = None) -> Tensor:
        """bool [Q, K], for the CPU; O(Q K) memory."""
        window = self._effective(window)
        if window not in self._dense:
            visible = dense(narrowed(self.queries, window), self.keys)
            self._dense[window] = torch.from_numpy(visible).to(self.device)
        return self._dense[window]

    def planned(self, window: int | None = None) -> tuple[KernelMask, KernelPlan]:
        """What the kernels take; exact tiles, never Q x K."""
        window = self._effective(window)
        if window not in self._planned:
            queries = narrowed(self.queries, window)
            ours = token_fields(queries, "cpu")
            same = queries is self.keys
            mask = kernel_mask(ours, ours if same else token_fields(self.keys, "cpu")).to(self.device)
            self._planned[window] = mask, make_plan(mask, block_q=self.block, block_k=self.block)
        return self._planned[window]

    def _effective(self, window: int | None) -> int | None:
        """None where a window hides nothing: positions of one segment are no further apart."""
        if window is None or not len(self.queries) or not len(self.keys):
            return None
        span = int(self.queries.position.max()) - int(self.keys.position.min())
        return None if window > span else window


def attend(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: AttentionMask,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention under the mask; the signature is that of transformers' attention functions.

    On a GPU the kernels run or refuse: there is no slower path to fall back to.

    Returns:
        [B, Q, H, D] and None (no attention weights). A query that sees nothing gets zeros.

    Raises:
        ValueError: dropout or a soft cap is asked for, the mask is of another device, or the
            kernels do not support the head width, dtype or grouping.
    """
    del module
    if dropout:
        raise ValueError(f"bitfield attention has no dropout, got {dropout}")
    if softcap is not None:
        raise ValueError(f"bitfield attention has no soft cap, got {softcap}")
    if query_BHQD.device.type != attention_mask.device.type:
        raise ValueError(f"mask is on {attention_mask.device}, queries are on {query_BHQD.device}")
    if query_BHQD.device.type == "cuda":
        mask, plan = attention_mask.planned(sliding_window)
        out = bitfield_attention(
            query_BHQD, key_BGKD, value_BGKD, mask, plan, scale=scaling, options=attention_mask.options
        )
        return out.transpose(1, 2), None
    visible_QK = attention_mask.dense(sliding_window)
    out = functional.scaled_dot_product_attention(
        query_BHQD,
        key_BGKD,
        value_BGKD,
        attn_mask=visible_QK,
        scale=scaling,
        enable_gqa=query_BHQD.shape[1] != key_BGKD.shape[1],
    )
    out = torch.where(visible_QK.any(1)[:, None], out, 0)
    return out.transpose(1, 2), None
