"""Masks, tensors and the error rule for tests of the attention kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.mask import TokenFields
from runtime.kernels.bitfield_attention.reference import attention

# Shape suffixes: T = tokens, Q = queries, K = keys.


def random_fields(num_tokens: int, seed: int, *, bits: int = 3, segments: int = 2) -> TokenFields:
    """Packed segments of random modality runs with causal text, windows, sinks, padding and blind rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    run = 1 + int(draw(3, 12, 1))
    kind = draw(0, bits, -(-num_tokens // run)).repeat_interleave(run)[:num_tokens]
    position = torch.arange(num_tokens, dtype=torch.int32)
    segment = (position * segments // num_tokens).to(torch.int32)
    segment[draw(0, 23, num_tokens) == 0] = -1
    own = torch.ones_like(kind) << (kind * 17 % 61)
    everything = 0
    for bit in range(bits):
        everything |= 1 << (bit * 17 % 61)
    allow = torch.where(kind == 0, everything, own)
    allow[draw(0, 19, num_tokens) == 0] = 0
    first = (position - 40).clamp(min=0) * (kind == 0)
    return TokenFields(
        allow=allow,
        own=own,
        causal=kind == 0,
        segment=segment,
        position=position,
        first=first.to(torch.int32),
        always=torch.where(draw(0, 2, num_tokens) == 0, own.roll(1), 0),
    )


def plain_fields(num_tokens: int, *, causal: bool) -> TokenFields:
    """One document of one group: the causal or the full mask."""
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return TokenFields(
        allow=zeros + 1,
        own=zeros + 1,
        causal=torch.full((num_tokens,), causal),
        segment=zeros.to(torch.int32),
        position=torch.arange(num_tokens, dtype=torch.int32),
        first=zeros.to(torch.int32),
        always=zeros,
    )


@dataclass(frozen=True, slots=True)
class Tensors:
    """q, k, v and the gradient that comes back."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def to(self, dtype: torch.dtype) -> "Tensors":
        return Tensors(*(x.to(dtype) for x in (self.q, self.k, self.v, self.do)))


def tensors(
    num_queries: int,
    num_keys: int,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    batch: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Tensors:
    """Normal random tensors [batch, heads, tokens, head_dim], stored token-major like a model's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tokens: int, count: int) -> Tensor:
        x = torch.randn(batch, tokens, count, head_dim, generator=generator, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2)

    return Tensors(
        normal(num_queries, heads),
        normal(num_keys, kv_heads),
        normal(num_keys, kv_heads),
        normal(num_queries, heads),
    )


def dense_results(data: Tensors, attends_QK: Tensor) -> dict[str, Tensor]:
    """Output, log-sums and gradients of the reference in the dtype of the data."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (data.q, data.k, data.v))
    out, lse = attention(q, k, v, attends_QK)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), data.do)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def distance(x: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of `exact`; equal infinities do not count."""
    x, exact = x.double().cpu(), exact.double().cpu()
    assert torch.equal(x.isinf(), exact.isinf())
    finite = exact.isfinite()
    assert x[finite].isfinite().all()
    return float((x - exact)[finite].norm() / exact[finite].norm().clamp(min=1e-30))


def assert_close_as_torch(ours: dict[str, Tensor], data: Tensors, attends_QK: Tensor) -> None:
    """Per tensor, our error against float64 is at most twice that of PyTorch in the data's dtype."""
    exact = dense_results(data.to(torch.float64), attends_QK)
    same = dense_results(data, attends_QK)
    for name, value in ours.items():
        allowed = 2 * distance(same[name], exact[name])
        assert distance(value, exact[name]) <= allowed, name
