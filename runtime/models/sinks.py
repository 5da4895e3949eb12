"""Attention sinks: a learned number for each head that only the denominator of the softmax contains.

A sink s is a further score of every query, whose value is zero. Over keys with log-sum-exp l, the
denominator's logarithm becomes l' = log(exp(l) + exp(s)), and the output shrinks by exp(l - l'), the sigmoid
of l - s. With both in place the gradients of queries, keys and values follow as from any output and
log-sum-exp, so whatever computes attention by these two takes sinks, over several ranks too.

Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shape suffixes: H = query heads, G = key/value heads, T = queries, S = keys, D = head width;
# before them, there may be items of one length.

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # queries, keys, values, output, log-sum-exp


class Kernel(Protocol):
    """Attention by passes of its own."""

    def forward(self, q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [H, T, D] and log-sum-exp [H, T]."""
        ...

    def backward(self, dy_HTD: Tensor, forward: Forward) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        ...


def with_sinks(y_HTD: Tensor, lse_HT: Tensor, sink_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output, in the wide type, and log-sum-exp with sinks in the denominator; unchanged without."""
    if sink_H is None:
        return y_HTD, lse_HT
    total_HT = torch.logaddexp(lse_HT, sink_H.to(lse_HT.dtype)[:, None])
    return y_HTD * (lse_HT - total_HT).exp()[..., None], total_HT


def sink_gradient(dy_HTD: Tensor, y_HTD: Tensor, lse_HT: Tensor, sink_H: Tensor | None) -> Tensor | None:
    """[H] from the gradient of the output, and the output and log-sum-exp with sinks; None without."""
    if sink_H is None:
        return None
    dtype = lse_HT.dtype
    share_HT = (sink_H.to(dtype)[:, None] - lse_HT).exp()
    of_HT = share_HT * (dy_HTD.to(dtype) * y_HTD.to(dtype)).sum(-1)
    return -of_HT.sum(-1).reshape(-1, len(sink_H)).sum(0).to(sink_H.dtype)


def attend_with_sinks(q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor, sink_H: Tensor, kernel: Kernel) -> Tensor:
    """[H, T, D] in the type of the queries, laid out as [T, H, D]; differentiable in all four tensors."""
    y_HTD: Tensor = _WithSinks.apply(q_HTD, k_GSD, v_GSD, sink_H, kernel)
    return y_HTD


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_HTD: Tensor, k_GSD: Tensor, v_GSD: Tensor, sink_H: Tensor, kernel: Kernel
    ) -> Tensor:
        wide_HTD, lse_HT = with_sinks(*kernel.forward(q_HTD, k_GSD, v_GSD), sink_H)
        y_THD = q_HTD.new_empty(wide_HTD.transpose(-3, -2).shape)
        y_HTD = y_THD.transpose(-3, -2).copy_(wide_HTD)
        ctx.save_for_backward(q_HTD, k_GSD, v_GSD, y_HTD, lse_HT, sink_H)
        ctx.kernel = kernel
        return y_HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_HTD: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sink_H = ctx.saved_tensors
        q_HTD, k_GSD, v_GSD, y_HTD, lse_HT = saved
        gradients = ctx.kernel.backward(dy_HTD, (q_HTD, k_GSD, v_GSD, y_HTD, lse_HT))
        narrow = (x.to(q_HTD.dtype) for x in gradients)
        return *narrow, sink_gradient(dy_HTD, y_HTD, lse_HT, sink_H), None
