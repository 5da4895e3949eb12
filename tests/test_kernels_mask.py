"""What the kernels leave out of the mask test, and how they read keys: every shortcut keeps the predicate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.kernels.bitfield_attention import backward_queries, forward, mask
from runtime.kernels.bitfield_attention.attention import Backward, Options, bitfield_attention
from runtime.kernels.bitfield_attention.head_tiles import aligned, head_tiles
from runtime.kernels.bitfield_attention.mask import KernelMask, TokenFields, kernel_mask
from runtime.kernels.bitfield_attention.plan import make_plan
from runtime.kernels.bitfield_attention.reference import attends, attention
from tests.interpreter import DEVICE, INTERPRETED
from tests.kernel_cases import plain_fields, random_fields, tensors
from tests.test_docs import FENCE

TOKENS, BLOCK = 60, 32


def seen_by_kernels(folded: KernelMask) -> Tensor:
    """bool [Q, K]: the predicate as `tokens.attends` evaluates it."""
    allow, always = (x[:, None] for x in folded.query_words)
    last, _, first = (x[:, None] for x in folded.query_limits)
    index, own = folded.key_places[0], folded.key_words
    seen = ((allow & own) != 0) & (index <= last)
    if folded.has_segments:
        seen &= index >= folded.query_lowest[:, None]
    if folded.has_window:
        seen &= (index >= first) | ((always & own) != 0)
    return seen


def shuffled(fields: TokenFields, seed: int) -> TokenFields:
    order = torch.randperm(len(fields), generator=torch.Generator().manual_seed(seed))
    return fields.take(order[: 2 * len(fields) // 3])


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("seed", range(12))
def test_places_tell_segments_apart(seed: int, far: bool):
    """Positions begin anew in every segment, tokens lie in any order; far: too far apart for 32 bits."""
    fields = random_fields(TOKENS, seed=seed, segments=1 + seed % 4)
    fields = replace(fields, position=fields.position % 17, first=fields.first % 17)
    if far:
        last = torch.where(fields.segment >= 0, fields.segment + 2**30, -1).to(torch.int32)
        fields = replace(fields, segment=last)
    queries, keys = shuffled(fields, seed), shuffled(fields, seed + 1)
    assert torch.equal(seen_by_kernels(kernel_mask(queries, keys)), attends(queries, keys))


def packed(num_tokens: int, length: int, window: int | None) -> TokenFields:
    """Causal documents of `length` tokens one after the other."""
    fields = plain_fields(num_tokens, causal=True)
    begin = fields.position // length * length
    first = begin if window is None else torch.maximum(begin, fields.position - window)
    return replace(fields, segment=fields.position // length, first=first)


@pytest.mark.parametrize(("window", "hides"), [(None, False), (10, False), (8, True)])
def test_a_window_that_ends_at_its_own_segment_hides_nothing(window: int | None, hides: bool):
    """`first` at the begin of a document lies above keys of earlier ones, which segments hide already."""
    fields = packed(TOKENS, 10, window)
    folded = kernel_mask(fields, fields)
    assert folded.has_segments
    assert folded.has_window is hides
    assert torch.equal(seen_by_kernels(folded), attends(fields, fields))


def results(k: Tensor, v: Tensor, backward: Backward) -> list[Tensor]:
    """Output and gradients on a causal mask that ends within a block; keys and values as they are given."""
    fields = plain_fields(TOKENS, causal=True)
    folded = kernel_mask(fields, fields).to(DEVICE)
    data = tensors(TOKENS, TOKENS, head_dim=72)
    leaves = [x.detach().requires_grad_() for x in (data.q.to(DEVICE), k, v)]
    out = bitfield_attention(
        *leaves, folded, make_plan(folded, block_q=BLOCK, block_k=BLOCK), options=Options(backward=backward)
    )
    return [out, *torch.autograd.grad(out, leaves, data.do.to(DEVICE))]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has the engine or has it not")
def test_keys_read_by_ordinary_loads_are_the_same(monkeypatch: pytest.MonkeyPatch):
    """GPUs older than Hopper have no copy engine."""
    data = tensors(TOKENS, TOKENS, head_dim=72)
    ours = results(data.k, data.v, Backward.DETERMINISTIC)
    for module in (forward, backward_queries):
        monkeypatch.setattr(module, "has_engine", lambda _: False)
    for one, other in zip(ours, results(data.k, data.v, Backward.DETERMINISTIC), strict=True):
        assert torch.equal(one, other)


def test_keys_that_the_engine_cannot_read_are_copied():
    """A base off 16 bytes, a stride off 16 bytes, an expanded tensor; one of a dim's strides is free."""
    data = tensors(TOKENS, TOKENS, head_dim=72)
    k, v = data.k.to(DEVICE), data.v.to(DEVICE)
    wanted = results(k, v, Backward.FUSED)
    flat = torch.empty(k.numel() + 1, device=DEVICE)
    off_base = flat[1:].view(k.shape).copy_(k)
    off_stride = torch.empty(*k.shape[:3], 73, device=DEVICE)[..., :72].copy_(k)
    for moved in (off_base, off_stride):
        assert aligned(moved) is not moved
        for one, other in zip(wanted, results(moved, v, Backward.FUSED), strict=True):
            assert torch.equal(one, other)
    expanded = k[:, :, :1].expand(-1, -1, TOKENS, -1)
    for one, other in zip(
        results(expanded, v, Backward.FUSED), results(expanded.contiguous(), v, Backward.FUSED), strict=True
    ):
        assert torch.equal(one, other)
    assert head_tiles(k.as_strided(k.shape, (1, 1, *k.stride()[2:])), BLOCK).strides[0] == 72


@pytest.mark.parametrize("backward", Backward)
def test_no_tokens_on_one_side(backward: Backward):
    """A rank may hold no keys, or no queries: zeros, and nothing is launched on an empty tensor."""
    some, none = plain_fields(20, causal=False), plain_fields(0, causal=False)
    for queries, keys in ((some, none), (none, some)):
        folded = kernel_mask(queries, keys).to(DEVICE)
        data = tensors(len(queries), len(keys))
        leaves = [x.to(DEVICE).requires_grad_() for x in (data.q, data.k, data.v)]
        out = bitfield_attention(*leaves, folded, make_plan(folded), options=Options(backward=backward))
        gradients = torch.autograd.grad(out, leaves, data.do.to(DEVICE))
        assert not any(bool(x.any()) for x in (out, *gradients))


def test_ranks_stand_in_for_places_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    """The same attention from ranks as from places, by the kernels."""
    fields = random_fields(TOKENS, seed=3, segments=3)
    data = tensors(TOKENS, TOKENS, heads=1)
    want, _ = attention(data.q, data.k, data.v, attends(fields, fields))
    masks = [kernel_mask(fields, fields)]
    monkeypatch.setattr(mask, "EVERYTHING", 100)  # the three segments take 186 places
    masks.append(kernel_mask(fields, fields))
    assert not torch.equal(masks[0].key_places, masks[1].key_places)
    for folded in (x.to(DEVICE) for x in masks):
        plan = make_plan(folded, block_q=BLOCK, block_k=BLOCK)
        out = bitfield_attention(*(x.to(DEVICE) for x in (data.q, data.k, data.v)), folded, plan)
        torch.testing.assert_close(out.cpu(), want)


@pytest.mark.skipif(not INTERPRETED, reason="the guide's tensors are on the CPU")
def test_the_guides_mask_of_ones_own_runs():
    """It asserts what the mask shows, and that kernel and reference agree."""
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "masks.md").read_text()
    [block] = [b["text"] for b in FENCE.finditer(guide) if "bitfield_attention(" in b["text"]]
    held: dict[str, Any] = {}
    exec(compile(block, "masks.md", "exec"), held)
    assert sorted(held["owners"]) == [0] * 4 + [1] * 4
