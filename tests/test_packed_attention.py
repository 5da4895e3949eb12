"""Packed attention against the definition: softmax over a block-diagonal mask, one row for all items."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from runtime.models.attention import pack, packed_sdpa, positions
from runtime.models.norm import WideRMSNorm
from tests.examples import examples


def masked_softmax(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], *, causal: bool, window: int
) -> Tensor:
    """[1, T, H, D] by the whole T x T score matrix: slow, obviously right."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(len(owner))[:, None] - torch.arange(len(owner))
    seen = owner[:, None] == owner
    if causal:
        seen = seen & (back >= 0) & (back < window)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(1, 2)


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    causal=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([1, 3, 100]),
    seed=st.integers(0, 1000),
)
def test_equals_the_definition(
    lengths: list[int], causal: bool, kv_heads: int, window: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = {"q": (1, 4, sum(lengths), 8), "k": (1, kv_heads, sum(lengths), 8)}
    q, k, v = (
        torch.randn(shape[n], dtype=torch.float64, generator=generator, requires_grad=True) for n in "qkk"
    )
    module = nn.Module()
    module.is_causal = causal
    sliding = window if causal and window < 100 else None
    ours, _ = packed_sdpa(module, q, k, v, pack(lengths, "cpu"), sliding_window=sliding)
    theirs = masked_softmax(q, k, v, lengths, causal=causal, window=window)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weight = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    mine = torch.autograd.grad((ours * weight).sum(), (q, k, v))
    wanted = torch.autograd.grad((theirs * weight).sum(), (q, k, v))
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_items_of_one_length_share_a_call() -> None:
    packing = pack([3, 5, 3, 3, 5], "cpu")
    assert [(group.length, group.count) for group in packing.groups] == [(3, 3), (5, 2)]
    assert packing.groups[1].index is not None
    assert packing.groups[1].index.tolist() == [3, 4, 5, 6, 7, 14, 15, 16, 17, 18]
    assert pack([4, 4], "cpu").groups[0].index is None


def test_positions_restart_with_every_item() -> None:
    assert positions([2, 3, 1], "cpu").tolist() == [0, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["llama", "gemma"])
def test_the_norm_keeps_float64(offset: float) -> None:
    norm = WideRMSNorm(16, 1e-6, offset).double()
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=1e-14)
