"""A planned mask on a device, and attention under it: by kernels on a GPU, dense on a CPU."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runtime.kernels.bitfield_attention.attention import (
    DEFAULT,
    Options,
    attention_backward,
    attention_forward,
    bitfield_attention,
    check_attention,
)
from runtime.kernels.bitfield_attention.mask import KernelMask, TokenFields, kernel_mask
from runtime.kernels.bitfield_attention.plan import BLOCK, KernelPlan, make_plan
from runtime.models.dense_attention import attend, attend_backward
from runtime.models.sinks import Forward, attend_with_sinks
from workbench.masks.bitfield import Bitfield, dense
from workbench.masks.builders import narrowed

# Shape suffixes: H = query heads, G = key/value heads, Q, T = queries, K, S = keys, D = head width.


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """The attention mask of one microbatch, for every layer of a stage.

    Like `Packing`, it is passed through transformers' layers as their `attention_mask`; see `Attends`. Data
    for the device are made on first use, once per window, and cached; `prepare` makes them ahead of time.

    Args:
        queries: fields of the query tokens.
        keys: fields of the key tokens; the same object for self-attention.
        device: of the attention.
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
        """Make the mask's data on the device now."""
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
        """Mask and plan of the kernels; exact tiles, without memory of Q x K."""
        window = self._effective(window)
        if window not in self._planned:
            queries = narrowed(self.queries, window)
            query_fields = token_fields(queries, "cpu")
            is_self = queries is self.keys
            mask = kernel_mask(query_fields, query_fields if is_self else token_fields(self.keys, "cpu")).to(
                self.device
            )
            self._planned[window] = mask, make_plan(mask, block_q=self.block, block_k=self.block)
        return self._planned[window]

    def _effective(self, window: int | None) -> int | None:
        """The window; None where it changes nothing, as no positions of a segment are further apart."""
        if window is None or not len(self.queries) or not len(self.keys):
            return None
        span = int(self.queries.position.max()) - int(self.keys.position.min())
        return None if window > span and not self.queries.opens_in_windows.any() else window

    def attend(
        self,
        q_HQD: Tensor,
        k_GKD: Tensor,
        v_GKD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[H, Q, D]; a query without a key gives 0.

        On a GPU the kernels run or refuse; there is no slower fallback.

        Raises:
            ValueError: tensors on another device, or a head width, dtype or grouping that the kernels do not
                support.
        """
        if q_HQD.device.type != self.device.type:
            raise ValueError(f"mask is on {self.device}, queries are on {q_HQD.device}")
        if sinks is not None:
            return attend_with_sinks(q_HQD, k_GKD, v_GKD, sinks, View(self, window, scale))
        q, k, v = q_HQD[None], k_GKD[None], v_GKD[None]
        if q.device.type == "cuda":
            return bitfield_attention(q, k, v, *self.planned(window), scale=scale, options=self.options)[0]
        visible_QK = self.dense(window)
        y_1HQD = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible_QK, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return torch.where(visible_QK.any(1)[:, None], y_1HQD, 0)[0]


class View(NamedTuple):
    """The mask of queries over keys, and the scale of scores."""

    mask: AttentionMask
    window: int | None
    scale: float

    def forward(self, q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [H, T, D] and log-sum-exp [H, T]; 0 and -inf for a query that sees no key.

        Raises:
            ValueError: the kernels do not support the head width or dtype; there is no fallback on a GPU.
        """
        if not uses_kernels(q_HTD.device):
            return attend(q_HTD, k_GSD, v_GSD, self.mask.dense(self.window), self.scale)
        mask, plan = self.mask.planned(self.window)
        q, k, v = q_HTD[None], k_GSD[None], v_GSD[None]
        check_attention(q, k, v, mask, plan)
        y, lse = attention_forward(q, k, v, mask, plan, self.scale, self.mask.options)
        return y[0], lse[0]

    def backward(self, dy_HTD: Tensor, forward: Forward) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; arguments as of `attend_backward`."""
        if not uses_kernels(dy_HTD.device):
            return attend_backward(dy_HTD, forward, self.mask.dense(self.window), self.scale)
        mask, plan = self.mask.planned(self.window)
        q, k, v, y, lse, dy = (x[None] for x in (*forward, dy_HTD))
        dq, dk, dv = attention_backward(q, k, v, y, lse, dy, mask, plan, self.scale, self.mask.options)
        return dq[0], dk[0], dv[0]


def uses_kernels(device: torch.device) -> bool:
    """Whether attention on that device runs in the kernels."""
    return device.type == "cuda"


def token_fields(tokens: Bitfield, device: torch.device | str) -> TokenFields:
    """The arrays as tensors; words are reinterpreted as int64, as torch cannot shift unsigned ones."""
    arrays = {
        name: array.view(np.int64) if array.dtype == np.uint64 else array
        for name, array in tokens.arrays()
        if name != "start"
    }
    return TokenFields(**{name: torch.tensor(array, device=device) for name, array in arrays.items()})
