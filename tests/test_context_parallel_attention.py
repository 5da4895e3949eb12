"""Context-parallel attention: outputs and gradients of one process, for any owners and any mask."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from runtime.models import attention_mask
from runtime.models.dense_attention import attend, attend_backward
from runtime.parallel.context.all_to_all import all_to_all_attention
from runtime.parallel.context.block import merge
from runtime.parallel.context.gathered import gathered_attention
from runtime.parallel.context.group import ContextGroup
from runtime.parallel.context.ring import RingAttention
from runtime.parallel.context.token_shares import TokenShares
from runtime.world.failure import RankError
from runtime.world.pool import Place, Pool
from tests.interpreter import INTERPRETED
from tests.waiting import impatient_group
from workbench.masks.bitfield import Bitfield, concatenate, dense, padding
from workbench.masks.builders import (
    Mixture,
    Run,
    causal,
    encoder_embedded,
    encoder_prepended,
    full,
    gemma4_style,
    multimodal_packed,
    narrowed,
)

HEADS, KV_HEADS, WIDTH, LENGTH = 8, 4, 4, 50
SCALE = 0.3
SINKS = torch.linspace(-2.0, 2.0, HEADS, dtype=torch.float64)
SMALL = Mixture(shares=(0.3, 0.2), spans=(7, 4))
MASKS = {
    "causal": lambda: causal(LENGTH),
    "full": lambda: full(LENGTH),
    "ep": lambda: encoder_prepended(LENGTH, seed=1, mixture=SMALL),
    "ee": lambda: encoder_embedded(LENGTH, seed=2, mixture=SMALL),
    "mp": lambda: multimodal_packed(LENGTH, seed=3, documents=3, mixture=SMALL),
    "gemma4": lambda: gemma4_style([Run(0, 9), Run(1, 13), Run(0, 4), Run(1, 11), Run(0, 13)]),
    "padding": lambda: concatenate((causal(LENGTH - 6), padding(6))),
}
WINDOWS = {"gemma4": 8}  # of the layer; images see each other where there is one
METHODS = {
    "gathered": gathered_attention,
    "ring": lambda shares, group, device: RingAttention(shares, group, torch.device(device)),
    "all-to-all": all_to_all_attention,
}
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # output, then of queries, keys and values


def owners_of(name: str, ranks: int) -> np.ndarray:
    """[LENGTH] owners of single tokens."""
    token = np.arange(LENGTH)
    chunk = token // -(-LENGTH // (2 * ranks))
    return {
        "contiguous": token * ranks // LENGTH,
        "zigzag": np.minimum(chunk, 2 * ranks - 1 - chunk),
        "stripe": token // 3 % ranks,
        "random": np.random.default_rng(4).integers(0, ranks, LENGTH),
        "lopsided": np.where(token < 40, ranks - 1, 1),  # others have nothing
    }[name]


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (HEADS, LENGTH, WIDTH),
        (KV_HEADS, LENGTH, WIDTH),
        (KV_HEADS, LENGTH, WIDTH),
        (HEADS, LENGTH, WIDTH),
    )
    q, k, v, dy = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, dy


def one_process(mask: Bitfield, dtype: torch.dtype = torch.float64, window: int | None = None) -> Gradients:
    q, k, v, dy = tensors(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seen = torch.from_numpy(dense(narrowed(mask, window), mask))
    y = functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=seen, scale=SCALE, enable_gqa=True
    )[0]
    y.backward(dy)
    return (y.detach(), *(leaf.grad for leaf in leaves))


def on_ranks(place: Place, cases: list[tuple[str, str, str]], dtype: torch.dtype) -> list[Gradients]:
    group = ContextGroup(tuple(range(place.size)), place.process, dist.group.WORLD)
    return [run(group, *case, dtype) for case in cases]


def run(group: ContextGroup, method: str, owners: str, mask: str, dtype: torch.dtype) -> Gradients:
    """What this rank has of output and gradients."""
    owner_of = owners_of(owners, group.size)
    owned = tuple(np.flatnonzero(owner_of == member) for member in range(group.size))
    shares = TokenShares(mask=MASKS[mask](), owned=owned, member=group.member)
    q, k, v, dy = (shares.own_of(x.transpose(0, 1), 0.0).transpose(0, 1) for x in tensors(dtype))
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    y = METHODS[method](shares, group, "cpu").attend(*leaves, scale=SCALE, window=WINDOWS.get(mask))
    y.backward(dy)
    kept = len(owned[group.member])  # nothing of a padding token
    return tuple(x.detach()[:, :kept] for x in (y, *(leaf.grad for leaf in leaves)))


def assembled(parts: list[Gradients], owners: str) -> Gradients:
    owner_of = owners_of(owners, len(parts))
    order = np.argsort(np.concatenate([np.flatnonzero(owner_of == member) for member in range(len(parts))]))
    return tuple(torch.cat(pieces, 1)[:, order] for pieces in zip(*parts, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("owners", [("contiguous", "zigzag"), ("stripe", "random"), ("lopsided",)])
@pytest.mark.parametrize("method", METHODS)
def test_outputs_and_gradients_are_those_of_one_process(
    method: str, owners: tuple[str, ...], ranks: int, pool: Pool
) -> None:
    cases = [(method, who, mask) for who, mask in product(owners, MASKS)]
    results = pool.run(on_ranks, ranks, cases, torch.float64)
    expected = {mask: one_process(build(), window=WINDOWS.get(mask)) for mask, build in MASKS.items()}
    for index, (_, who, mask) in enumerate(cases):
        whole = assembled([result[index] for result in results], who)
        for name, ours, theirs in zip(("y", "dq", "dk", "dv"), whole, expected[mask], strict=True):
            error = (ours - theirs).norm() / theirs.norm()
            assert error <= 1e-13, f"{name} with {who} owners and mask {mask}"


def sunk_on_ranks(place: Place, method: str) -> list[Gradients]:
    """As `run`, with random owners, and the gradient of the sinks."""
    group = ContextGroup(tuple(range(place.size)), place.process, dist.group.WORLD)
    owner_of = owners_of("random", group.size)
    owned = tuple(np.flatnonzero(owner_of == member) for member in range(group.size))
    shares = TokenShares(mask=MASKS["ee"](), owned=owned, member=group.member)
    q, k, v, dy = (shares.own_of(x.transpose(0, 1), 0.0).transpose(0, 1) for x in tensors(torch.float64))
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    sinks = SINKS.clone().requires_grad_()
    y = METHODS[method](shares, group, "cpu").attend(*leaves, scale=SCALE, sinks=sinks)
    y.backward(dy)
    kept = len(owned[group.member])
    return [*(x.detach()[:, :kept] for x in (y, *(leaf.grad for leaf in leaves))), sinks.grad]


@pytest.mark.parametrize("method", METHODS)
def test_sinks_of_heads_on_several_ranks(method: str, pool: Pool) -> None:
    """Each rank has a part of the gradient of the sinks; together they are that of one process."""
    q, k, v, dy = tensors(torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, SINKS.clone())]
    seen = torch.from_numpy(dense(MASKS["ee"](), MASKS["ee"]()))
    scores = (q @ k.repeat_interleave(2, 0).mT * SCALE).masked_fill(~seen, -torch.inf)
    scores = torch.cat([scores, leaves[3][:, None, None].expand(HEADS, LENGTH, 1)], -1)
    y = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 0)
    *expected, of_sinks = (y, *torch.autograd.grad(y, leaves, dy))
    results = pool.run(sunk_on_ranks, 2, method)
    whole = assembled([tuple(result[:4]) for result in results], "random")
    for ours, theirs in zip(
        (*whole, sum(result[4] for result in results)), (*expected, of_sinks), strict=True
    ):
        assert (ours - theirs).norm() <= 1e-13 * theirs.norm()


def test_bfloat16_sums_in_float32(pool: Pool) -> None:
    """Error against float64 at most twice that of the same type in one process."""
    cases = [("gathered", "zigzag", "ee"), ("ring", "zigzag", "ee")]
    results = pool.run(on_ranks, 2, cases, torch.bfloat16)
    exact = one_process(MASKS["ee"]())
    same_type = one_process(MASKS["ee"](), torch.bfloat16)
    for index in range(len(cases)):
        whole = assembled([result[index] for result in results], "zigzag")
        for ours, theirs, truth in zip(whole, same_type, exact, strict=True):
            assert ours.dtype is torch.bfloat16
            assert (ours - truth).norm() <= 2 * (theirs - truth).norm()


def test_a_query_without_a_key_gives_zero_and_finite_gradients() -> None:
    q, k, v, dy = tensors(torch.float64)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[3, 5] = True
    y, lse = attend(q, k, v, mask, SCALE)
    dq, dk, dv = attend_backward(dy, (q, k, v, y, lse), mask, SCALE)
    assert y[:, 4].abs().max() == 0
    assert torch.equal(y[0, 3], v[0, 5])
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert dv[:, 6].abs().max() == 0


def test_merging_halves_of_the_keys_is_attending_to_all() -> None:
    q, k, v, _ = tensors(torch.float64)
    mask = torch.from_numpy(dense(MASKS["ee"](), MASKS["ee"]()))
    halves = [
        attend(q, k[:, part], v[:, part], mask[:, part], SCALE) for part in (slice(20), slice(20, None))
    ]
    y, lse = merge(*halves)
    whole_y, whole_lse = attend(q, k, v, mask, SCALE)
    assert torch.allclose(y, whole_y, rtol=1e-12)
    assert torch.allclose(lse, whole_lse, rtol=1e-12)


class Late:
    """Of a group of one: a collective that moves nothing until it is waited for, or all at once."""

    def __init__(self, log: list[str], *, at_once: bool) -> None:
        self.log, self.at_once = log, at_once
        self.size, self.member, self.ranks, self.rank = 1, 0, (0,), 0

    def gather(self, gathered: Tensor, own: Tensor) -> "Late.Move":
        return self._start("gather", gathered, own)

    def scatter(self, own: Tensor, parts: Tensor) -> "Late.Move":
        return self._start("scatter", own, parts)

    def _start(self, name: str, into: Tensor, source: Tensor) -> "Late.Move":
        self.log.append(name)
        into.fill_(float("nan"))
        move = Late.Move(self.log, name, into, source)
        if self.at_once:
            into.copy_(source)
        return move

    class Move:
        def __init__(self, log: list[str], name: str, into: Tensor, source: Tensor) -> None:
            self.log, self.name, self.into, self.source = log, name, into, source

        def wait(self) -> None:
            self.log.append(f"wait {self.name}")
            self.into.copy_(self.source)


def late(*, at_once: bool) -> tuple[Gradients, list[str]]:
    log: list[str] = []
    shares = TokenShares(mask=causal(LENGTH), owned=(np.arange(LENGTH),))
    q, k, v, dy = tensors(torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = gathered_attention(shares, Late(log, at_once=at_once), "cpu").attend(*leaves, scale=SCALE)
    y.backward(dy)
    return (y.detach(), *(leaf.grad for leaf in leaves)), log


@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_is_read_before_its_wait_nor_overwritten_before_it_is_sent(at_once: bool) -> None:
    """A message that is read when it is started, or only when it is waited for: the same result."""
    ours, _ = late(at_once=at_once)
    for mine, theirs in zip(ours, one_process(causal(LENGTH)), strict=True):
        assert (mine - theirs).norm() <= 1e-13 * theirs.norm()


def test_the_next_chunk_travels_while_this_one_is_computed() -> None:
    _, log = late(at_once=False)
    forward, backward = log[: 2 * KV_HEADS], log[2 * KV_HEADS :]
    assert forward == ["gather", *["gather", "wait gather"] * (KV_HEADS - 1), "wait gather"]
    gathers = [move for move in backward if "gather" in move]
    assert gathers == forward
    under_way = 0
    for move in backward:
        under_way += {"scatter": 1, "wait scatter": -1}.get(move, 0)
        assert under_way <= 2
    first = backward.index("scatter")
    assert backward[first:].index("wait scatter") > backward[first:].index("wait gather")


def absent_member(place: Place) -> str:
    process_group = impatient_group(0.3)
    if place.process == 1:
        return ""  # and it stays, in its pool, until the other has answered
    group = ContextGroup((4, 6), 4, process_group)
    try:
        group.gather(torch.zeros(2), torch.zeros(1)).wait()
    except RankError as error:
        return f"{error} {error.peers}"
    return "arrived"


def test_a_member_that_does_not_come_is_named(pool: Pool) -> None:
    message = pool.run(absent_member, 2)[0]
    assert message.startswith("rank 4 gathering keys and values with ranks [6]: ")
    assert message.endswith("(6,)")


def group_of(size: int, member: int = 0) -> ContextGroup:
    return ContextGroup(tuple(range(size)), member, None)


def test_bad_input_names_the_value() -> None:
    owned = (np.arange(3), np.arange(3, 5))
    with pytest.raises(ValueError, match=r"hold every one of the 6 tokens exactly once, got \[3, 2\] tokens"):
        TokenShares(mask=causal(6), owned=owned)
    with pytest.raises(ValueError, match=r"exactly once, got \[3, 3\] tokens, 4 different"):
        TokenShares(mask=causal(6), owned=(np.arange(3), np.arange(1, 4)))
    with pytest.raises(ValueError, match=r"member must be 0\.\.1, got 2"):
        TokenShares(mask=causal(5), owned=owned, member=2)
    shares = TokenShares(mask=causal(5), owned=owned)
    with pytest.raises(ValueError, match="member 0 of 2 do not fit a group where this is member 1 of 3"):
        gathered_attention(shares, group_of(3, 1), "cpu")
    with pytest.raises(ValueError, match="chunks must be of >= 1 head, got 0"):
        replace(gathered_attention(shares, group_of(2), "cpu"), chunk_heads=0)
    q, k, v, _ = tensors(torch.float64)
    with pytest.raises(ValueError, match="ranks must divide the 3 key/value heads, got 2 ranks"):
        all_to_all_attention(shares, group_of(2), "cpu").attend(q, k[:3], v[:3], scale=SCALE)


def test_a_window_counts_positions_up_to_the_querys_own() -> None:
    shares = TokenShares(mask=causal(6), owned=(np.array([1, 4]), np.array([0, 2, 3, 5])))
    seen = gathered_attention(shares, group_of(2), "cpu").mask.dense(2)
    # Keys by member, padded: 1 4 - - | 0 2 3 5.
    assert seen.int().tolist() == [[1, 0, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 1, 0]]


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off where there is a GPU")
def test_chunks_run_in_the_kernels_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of permuted tokens, chunk by chunk, under Triton's interpreter."""
    monkeypatch.setattr(attention_mask, "uses_kernels", lambda device: True)
    order = np.random.default_rng(0).permutation(LENGTH)
    mask = MASKS["ee"]()
    shares = TokenShares(mask=mask.take(order), owned=(np.arange(LENGTH),))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn((heads, LENGTH, 64), generator=generator) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = gathered_attention(shares, Late([], at_once=False), "cpu").attend(*leaves, scale=SCALE / 4)
    y.backward(dy)
    seen = torch.from_numpy(dense(mask, mask)[np.ix_(order, order)])
    plain_y, lse = attend(q.detach(), k.detach(), v.detach(), seen, SCALE / 4)
    saved = (q.detach(), k.detach(), v.detach(), plain_y, lse)
    expected = (plain_y, *attend_backward(dy, saved, seen, SCALE / 4))
    for ours, theirs in zip((y.detach(), *(leaf.grad for leaf in leaves)), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
