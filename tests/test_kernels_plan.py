"""Plans of masks: exact, made on the device in a few launches, and nothing waits for the host."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from runtime.kernels.bitfield_attention import attention
from runtime.kernels.bitfield_attention.attention import (
    Backward,
    Options,
    attention_with_lse,
    bitfield_attention,
    forward_tile,
)
from runtime.kernels.bitfield_attention.mask import KernelMask, TokenFields, kernel_mask
from runtime.kernels.bitfield_attention.plan import KernelPlan, Lists, make_plan
from runtime.kernels.bitfield_attention.reference import attends
from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split
from runtime.models.attention_mask import token_fields
from tests.interpreter import DEVICE, INTERPRETED, add_by_descriptor, poison_memory
from tests.kernel_cases import assert_close_as_torch, plain_fields, random_fields, tensors
from tests.mask_strategies import CASES, bitfields, packed_case
from workbench.masks.bitfield import Bitfield
from workbench.masks.builders import encoder_embedded, encoder_prepended, multimodal_packed
from workbench.masks.tiles import FULL, PARTIAL, classify

VIEWS = {"transpose", "detach", "slice", "view"}
BLOCKS = st.sampled_from([16, 32])


def planned(queries: Bitfield, keys: Bitfield, block_q: int, block_k: int) -> KernelPlan:
    mask = kernel_mask(token_fields(queries, DEVICE), token_fields(keys, DEVICE))
    return make_plan(mask, block_q=block_q, block_k=block_k)


def exact(queries: Bitfield, keys: Bitfield, block_q: int, block_k: int) -> np.ndarray:
    """[R, C] kinds by the planner's own classification; a tile past the last token is PARTIAL."""
    tiles = classify(queries, keys, block_q, block_k)
    kinds = np.zeros((tiles.num_row_blocks, tiles.num_col_blocks), np.int64)
    rows = np.repeat(np.arange(tiles.num_row_blocks), np.diff(tiles.row_offsets))
    kinds[rows, tiles.columns] = tiles.kinds
    if len(queries) % block_q:
        kinds[-1] = np.minimum(kinds[-1], PARTIAL)
    if len(keys) % block_k:
        kinds[:, -1] = np.minimum(kinds[:, -1], PARTIAL)
    return kinds


def assert_lists(lists: Lists, kinds: np.ndarray) -> None:
    """The lists hold those tiles: FULL ones first, ascending, nothing between two lists."""
    num_blocks = len(kinds)
    want = [np.flatnonzero(row == kind) for row in kinds for kind in (FULL, PARTIAL)]
    sizes = [len(part) for part in want]
    ends = np.cumsum([0, *sizes, 0, 0])
    assert len(lists) == num_blocks
    if not num_blocks:
        return
    assert lists.num_full.tolist() == sizes[0::2]
    assert lists.num_partial.tolist() == sizes[1::2]
    assert lists.offsets.tolist() == [*ends[0 : 2 * num_blocks + 1 : 2], ends[-1]]
    assert lists.partial_start.tolist() == [*ends[1 : 2 * num_blocks + 1 : 2], ends[-1]]
    assert lists.others[: ends[-1]].tolist() == np.concatenate(want).tolist()
    assert not lists.others[ends[-1] :].any()


def assert_exact(queries: Bitfield, keys: Bitfield, block_q: int, block_k: int) -> None:
    plan = planned(queries, keys, block_q, block_k)
    kinds = exact(queries, keys, block_q, block_k)
    assert_lists(plan.rows, kinds)
    assert_lists(plan.columns, kinds.T)


@settings(max_examples=25)
@given(bitfields(max_length=70), bitfields(max_length=70), BLOCKS, BLOCKS)
def test_plan_of_any_two_fields_is_the_planners(
    queries: Bitfield, keys: Bitfield, block_q: int, block_k: int
):
    assert_exact(queries, keys, block_q, block_k)


@pytest.mark.parametrize("name", [*CASES, "packed"])
def test_plan_of_every_builder_is_the_planners(name: str):
    """Two draws of each, one of them with a rank's tokens, in any order, as queries."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        field = (CASES[name][0](rng) if name in CASES else packed_case(rng)).field
        queries = field.take(rng.permutation(len(field))[: len(field) // 2]) if seed else field
        assert_exact(queries, field, 16, 16)


@pytest.mark.parametrize("build", [encoder_prepended, encoder_embedded, multimodal_packed])
def test_plan_of_the_benchmarks_masks_at_an_odd_length(build: Callable[..., Bitfield]):
    """Nine key blocks and more, so a row is classified by two programs."""
    field = build(16 * 9 + 5, seed=1)
    assert_exact(field, field, 16, 16)


class Watched(TorchDispatchMode):
    """Every operation, and a refusal of those that wait for the host or copy from it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select"), name
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in args if isinstance(x, Tensor)]
        if isinstance(out, Tensor) and inputs and name in ("_to_copy", "copy_"):
            assert {x.device for x in inputs} == {out.device}, f"{name} between devices"
        self.names.append(name)
        return out


@contextmanager
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watched, list[str]]]:
    """A device whose values nobody can read: kernels are noted instead of run, on tensors of `meta`."""
    launched: list[str] = []
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *args, **kwargs: launched.append(self.fn.__name__)
    )
    monkeypatch.setattr(attention, "resident_tasks", lambda device, num_warps: 132)
    with Watched() as watched:
        yield watched, launched


def unreadable(num_tokens: int) -> KernelMask:
    fields = random_fields(num_tokens, seed=3)
    return kernel_mask(fields, fields).to("meta")


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the next test captures the real thing")
def test_a_plan_takes_few_launches_and_never_waits(monkeypatch: pytest.MonkeyPatch):
    """The same for a small and for a large mask."""
    masks = [unreadable(num_tokens) for num_tokens in (40, 5000)]
    for mask in masks:
        with no_memory(monkeypatch) as (watched, launched):
            make_plan(mask)
        assert launched == ["classify_kernel", *["count_kernel", "list_kernel"] * 2]
        assert watched.names.count("zeros") == 2
        assert set(watched.names) <= {"empty", "zeros", "permute", "select"}, watched.names


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the next test captures the real thing")
@pytest.mark.parametrize("backward", Backward)
def test_attention_of_a_planned_mask_launches_kernels_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, backward: Backward
):
    """No value of the device is read, nothing is copied to it; the second layer finds its task tables."""
    mask = unreadable(1000)
    shapes = tensors(1000, 1000, heads=4, kv_heads=2, dtype=torch.bfloat16)
    q, k, v, do = (x.to("meta") for x in (shapes.q, shapes.k, shapes.v, shapes.do))
    options = Options(backward=backward, split=Split.WHERE_IT_PAYS)
    with no_memory(monkeypatch) as (watched, launched):
        plan = make_plan(mask)
        counts = []
        for _ in range(3):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            before = len(watched.names), len(launched)
            torch.autograd.grad(bitfield_attention(*inputs, mask, plan, options=options), inputs, do)
            counts.append((len(watched.names) - before[0], len(launched) - before[1]))
    (_, first), (ops, second), third = counts
    assert (ops, second) == third
    assert first - second == 2 * 3, "three launches for each of two tables: by rows and by columns"
    assert set(watched.names[-ops:]) <= VIEWS | {"empty", "empty_like", "zeros", "_to_copy", "mul"}
    assert launched[-second:].count("forward_kernel") == 1
    assert launched[-second:].count("keys_kernel") == 1


@pytest.mark.skipif(not INTERPRETED, reason="it is the check of the two tests above")
def test_a_wait_for_the_host_is_seen(monkeypatch: pytest.MonkeyPatch):
    """A fixed split asks how many pieces there are, and says so in its docstring."""
    mask = unreadable(100)
    q = torch.empty(1, 1, 100, 64, dtype=torch.bfloat16, device="meta")
    with no_memory(monkeypatch), pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        bitfield_attention(q, q, q, mask, make_plan(mask), options=Options(split=FixedSplit(1)))


@pytest.mark.parametrize(("slots", "num_tokens"), [(2, 70), (12, 70), (12, 96)])
def test_room_of_a_table_computes_nothing(monkeypatch: pytest.MonkeyPatch, slots: int, num_tokens: int):
    """Tasks and split blocks past the last block read no list and write nothing: poisoned memory shows it."""
    poison_memory(monkeypatch)
    add_by_descriptor(monkeypatch)
    monkeypatch.setattr(attention, "resident_tasks", lambda device, num_warps: slots)
    fields = plain_fields(num_tokens, causal=True)
    mask = kernel_mask(fields, fields).to(DEVICE)
    plan = make_plan(mask, block_q=16, block_k=16)
    data = tensors(num_tokens, num_tokens, heads=1)
    q, k, v, do = (x.to(DEVICE) for x in (data.q, data.k, data.v, data.do))
    for backward in Backward:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attention_with_lse(*inputs, mask, plan, options=Options(backward=backward))
        dq, dk, dv = torch.autograd.grad(out, inputs, do)
        ours = {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        assert_close_as_torch(ours, data, attends(fields, fields))
    num_blocks = -(-num_tokens // 16)
    tables = list(plan.launches.values())
    assert all((table.table[0] == num_blocks).any() for table in tables), "there is room to spare"
    assert any((table.split_block < num_blocks).any() for table in tables) == (slots > 2)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: capture of the same calls")
def test_a_step_with_its_plan_is_captured_and_follows_the_mask():
    """A replayed graph plans the mask that lies in its buffers then, not the one it was captured with."""
    one, other = (kernel_mask(*[random_fields(300, seed=seed, segments=2)] * 2).to(DEVICE) for seed in (3, 4))
    facts = {
        "has_window": one.has_window or other.has_window,
        "has_segments": one.has_segments or other.has_segments,
    }
    one, other = replace(one, **facts), replace(other, **facts)
    data = tensors(300, 300, dtype=torch.bfloat16)
    q, k, v, do = (x.to(DEVICE) for x in (data.q, data.k, data.v, data.do))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    options = Options(backward=Backward.DETERMINISTIC)

    def step(mask: KernelMask) -> tuple[Tensor, ...]:
        out = bitfield_attention(*inputs, mask, make_plan(mask), options=options)
        return out, *torch.autograd.grad(out, inputs, do)

    want = step(other)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(one)
    for name in ("query_words", "query_limits", "key_words", "key_places"):
        getattr(one, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("num_groups", "stages"), [(32, 3), (33, 2)])
def test_a_mask_of_more_groups_than_32_leaves_room_for_fewer_buffers(num_groups: int, stages: int):
    """Words of 64 bits: with three buffers the forward would not fit into a block's shared memory."""
    index = torch.arange(256)
    fields = TokenFields(
        allow=torch.full((256,), -1),
        own=torch.ones(256, dtype=torch.int64) << index % num_groups,
        causal=torch.zeros(256, dtype=torch.bool),
        segment=torch.zeros(256, dtype=torch.int32),
        position=index.to(torch.int32),
        first=torch.zeros(256, dtype=torch.int32),
        always=torch.zeros(256, dtype=torch.int64),
    )
    mask = kernel_mask(fields, fields)
    q = torch.zeros(1, 1, 256, 128, dtype=torch.bfloat16)
    plan: Any = SimpleNamespace(block_q=128, block_k=128)
    assert forward_tile(q, mask, plan, Options()).num_stages == stages


def test_a_plan_on_a_cpu_without_the_interpreter_is_refused():
    """In a process of its own, as Triton decides when it is imported; its own error names no device."""
    script = (
        "from runtime.kernels.bitfield_attention.mask import kernel_mask\n"
        "from runtime.kernels.bitfield_attention.plan import make_plan\n"
        "from runtime.models.attention_mask import token_fields\n"
        "from workbench.masks.builders import causal\n"
        "fields = token_fields(causal(32), 'cpu')\n"
        "make_plan(kernel_mask(fields, fields))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: device: Triton kernels want cuda, or TRITON_INTERPRET=1 set before")
