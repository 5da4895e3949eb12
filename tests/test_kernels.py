"""Bitfield attention against the dense reference: forward, log-sums and gradients."""

import pytest
import torch
from torch import Tensor

from runtime.kernels.bitfield_attention import attention
from runtime.kernels.bitfield_attention.attention import (
    Backward,
    Options,
    attention_with_lse,
    bitfield_attention,
)
from runtime.kernels.bitfield_attention.head_tiles import sum_tiles
from runtime.kernels.bitfield_attention.mask import KernelMask, TokenFields, kernel_mask
from runtime.kernels.bitfield_attention.plan import make_plan
from runtime.kernels.bitfield_attention.reference import attends
from runtime.kernels.bitfield_attention.tasks import FixedSplit, Split
from runtime.kernels.bitfield_attention.tilings import Pass, Tiling
from tests.interpreter import (
    DEVICE,
    INTERPRETED,
    add_by_descriptor,
    poison_memory,
    round_like_hardware,
)
from tests.kernel_cases import (
    Tensors,
    assert_close_as_torch,
    plain_fields,
    random_fields,
    tensors,
)

FUSED, DETERMINISTIC = Options(), Options(backward=Backward.DETERMINISTIC)
ENGINE = Options(backward=Backward.ENGINE)
SPLIT = Options(backward=Backward.DETERMINISTIC, split=FixedSplit(1))
BLOCK = 32
TOKENS = 51


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN where nothing was written; bfloat16 and the copy engine's additions as they are on a GPU."""
    if INTERPRETED:
        round_like_hardware(monkeypatch)
        add_by_descriptor(monkeypatch)
    poison_memory(monkeypatch)


def on_device(fields: TokenFields) -> TokenFields:
    return TokenFields(*(getattr(fields, name).to(DEVICE) for name in TokenFields.__slots__))


def run(
    data: Tensors, queries: TokenFields, keys: TokenFields, options: Options, block: int = BLOCK
) -> dict[str, Tensor]:
    """Output, log-sums and gradients of the kernels."""
    mask = kernel_mask(on_device(queries), on_device(keys))
    plan = make_plan(mask, block_q=block, block_k=block)
    q, k, v = (x.detach().to(DEVICE).requires_grad_() for x in (data.q, data.k, data.v))
    out, lse = attention_with_lse(q, k, v, mask, plan, options=options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), data.do.to(DEVICE))
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(FUSED, id="fused"),
        pytest.param(Options(split=FixedSplit(1)), id="fused-split"),
        pytest.param(ENGINE, id="engine"),
        pytest.param(Options(backward=Backward.ENGINE, split=FixedSplit(1)), id="engine-split"),
        pytest.param(DETERMINISTIC, id="deterministic"),
        pytest.param(SPLIT, id="deterministic-split"),
    ],
)
def test_error_is_at_most_twice_that_of_torch(dtype: torch.dtype, options: Options):
    """Packed segments, runs, causal text, windows, sinks, padding and blind rows; an odd length; GQA."""
    fields = random_fields(TOKENS, seed=1)
    attends_QK = attends(fields, fields)
    assert (~attends_QK.any(1)).any(), "the case has empty rows"
    data = tensors(TOKENS, TOKENS, dtype=dtype)
    assert_close_as_torch(run(data, fields, fields, options), data, attends_QK)


@pytest.mark.parametrize("options", [FUSED, ENGINE], ids=["fused", "engine"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_wide_heads(head_dim: int, options: Options):
    fields = random_fields(TOKENS, seed=2)
    data = tensors(TOKENS, TOKENS, head_dim=head_dim, heads=1, dtype=torch.bfloat16)
    assert_close_as_torch(run(data, fields, fields, options), data, attends(fields, fields))


@pytest.mark.parametrize("options", [FUSED, ENGINE, SPLIT], ids=["fused", "engine", "deterministic-split"])
@pytest.mark.parametrize("head_dim", [32, 72, 80, 96, 192])
def test_heads_that_are_padded_in_registers(head_dim: int, options: Options):
    """SigLIP-so400m has 72, DeepSeek-V3 192. Another head's columns follow in memory, and stay."""
    fields = random_fields(TOKENS, seed=8)
    data = tensors(TOKENS, TOKENS, head_dim=head_dim, dtype=torch.bfloat16)
    assert_close_as_torch(run(data, fields, fields, options), data, attends(fields, fields))


@pytest.mark.parametrize("options", [FUSED, ENGINE, SPLIT], ids=["fused", "engine", "deterministic-split"])
@pytest.mark.parametrize("segments", [1, 4])
def test_lengths_of_whole_blocks(segments: int, options: Options):
    """No bound is tested where every block is whole."""
    fields = random_fields(2 * BLOCK, seed=9, segments=segments)
    data = tensors(2 * BLOCK, 2 * BLOCK, heads=1)
    assert_close_as_torch(run(data, fields, fields, options), data, attends(fields, fields))


@pytest.mark.parametrize("seed", range(4))
def test_random_masks(seed: int):
    """Other words (beyond 32 bits), several segments, lengths around a block."""
    num_tokens = (33, 32, 47, 5)[seed]
    fields = random_fields(num_tokens, seed=10 + seed, bits=(40, 2, 3, 1)[seed], segments=1 + seed % 3)
    data = tensors(num_tokens, num_tokens, heads=1, seed=seed)
    for options in ((FUSED, DETERMINISTIC)[seed % 2], ENGINE):
        assert_close_as_torch(run(data, fields, fields, options), data, attends(fields, fields))


@pytest.mark.parametrize("causal", [True, False])
def test_full_and_edge_tiles(causal: bool):
    """Plain masks: FULL tiles without a mask test, and the ragged edge of a full mask."""
    fields = plain_fields(70, causal=causal)
    data = tensors(70, 70, heads=1)
    assert_close_as_torch(run(data, fields, fields, FUSED), data, attends(fields, fields))


@pytest.mark.parametrize("backward", [Backward.FUSED, Backward.ENGINE])
def test_tiles_smaller_than_the_lists_blocks(backward: Backward):
    """Sub-tiles in both directions, rectangular, batch 2, a group of 3."""
    fields = random_fields(40, seed=4)
    overridden = tuple((which, Tiling(16, 16, 4, 1)) for which in Pass)
    data = tensors(40, 40, heads=3, batch=2)
    ours = run(data, fields, fields, Options(backward=backward, tilings=overridden))
    assert_close_as_torch(ours, data, attends(fields, fields))


def test_order_of_tokens_means_nothing():
    """A rank holds some tokens, in any order: rows and gradients are those of the whole, moved."""
    fields = random_fields(TOKENS, seed=5)
    data = tensors(TOKENS, TOKENS)
    mine, theirs = (torch.randperm(TOKENS, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    mine = mine[:20]
    part = Tensors(data.q[:, :, mine], data.k[:, :, theirs], data.v[:, :, theirs], data.do[:, :, mine])
    queries, keys = fields.take(mine), fields.take(theirs)
    attends_QK = attends(fields, fields)[mine][:, theirs]
    assert_close_as_torch(run(part, queries, keys, FUSED), part, attends_QK)


def test_deterministic_mode_repeats_its_bits():
    fields = random_fields(TOKENS, seed=6)
    data = tensors(TOKENS, TOKENS, dtype=torch.bfloat16)
    first, second = (run(data, fields, fields, SPLIT) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_no_keys_at_all():
    """Nobody attends to anything: zeros everywhere, and -inf log-sums."""
    fields = plain_fields(20, causal=True)
    blind = TokenFields(
        fields.allow * 0, *(getattr(fields, name) for name in TokenFields.__slots__ if name != "allow")
    )
    result = run(tensors(20, 20, heads=1), blind, blind, FUSED)
    assert torch.isneginf(result.pop("lse")).all()
    assert not any(value.any() for value in result.values())


def test_any_strides_but_that_of_the_width():
    """Inputs and an expanded gradient are read where they lie."""
    fields = plain_fields(20, causal=True)
    data = tensors(20, 20, heads=1)
    mask = kernel_mask(on_device(fields), on_device(fields))
    plan = make_plan(mask, block_q=BLOCK, block_k=BLOCK)
    q, k, v = (x.to(DEVICE) for x in (data.q, data.k, data.v))
    results = []
    for form in (lambda x: x.contiguous(), lambda x: x.mT.contiguous().mT):
        inputs = [form(x).detach().requires_grad_() for x in (q, k, v)]
        out = bitfield_attention(*inputs, mask, plan, options=DETERMINISTIC)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def small_mask(num_tokens: int = 20) -> KernelMask:
    fields = on_device(plain_fields(num_tokens, causal=True))
    return kernel_mask(fields, fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 48}, r"head dim: want one of \(32, 64, 72, 80, 96, 128, 192, 256\), got 48"),
        ({"dtype": torch.float64}, "dtype: want one of .*, got torch.float64"),
        ({"heads": 3, "kv_heads": 2}, "query heads: want a multiple of 2 key/value heads, got 3"),
        ({"num_queries": 19}, "mask: made for 20 queries and 20 keys, q and k have 19 and 20"),
    ],
)
def test_refusals_name_the_value(change: dict[str, object], message: str):
    mask = small_mask()
    data = tensors(**{"num_queries": 20, "num_keys": 20, **change})
    q, k, v = (x.to(DEVICE) for x in (data.q, data.k, data.v))
    with pytest.raises(ValueError, match=message):
        bitfield_attention(q, k, v, mask, make_plan(mask))


def test_a_gpu_without_the_engine_is_refused_what_adds_by_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "has_engine", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    q, k, v = (getattr(tensors(20, 20), name).to(DEVICE) for name in "qkv")
    mask = small_mask()
    with pytest.raises(ValueError, match=r"backward ENGINE: want a copy engine, .*, got 8.6; FUSED runs"):
        bitfield_attention(q, k, v, mask, make_plan(mask), options=ENGINE)


def test_what_the_engine_adds_to_ends_where_the_sums_do():
    """Tiles as wide as registers have them, of a tensor as wide as memory has it, where it lies."""
    sums = torch.zeros(1, 2, 32, 72)
    tiles = sum_tiles(sums, 16)
    assert tiles.base.data_ptr() == sums.data_ptr()
    assert (list(tiles.shape), list(tiles.strides), tiles.block_shape) == ([64, 72], [72, 1], [16, 128])


@pytest.mark.parametrize("block", [8, 48, 0])
def test_blocks_are_powers_of_two(block: int):
    with pytest.raises(ValueError, match=f"block_k: want a power of two of at least 16, got {block}"):
        make_plan(small_mask(), block_k=block)


def test_split_never_and_where_it_pays_agree_off_the_gpu():
    """One task at a time: splitting cannot pay, so nothing is split."""
    fields = plain_fields(70, causal=True)
    data = tensors(70, 70, heads=1)
    one, other = (run(data, fields, fields, Options(split=split))["out"] for split in Split)
    assert torch.equal(one, other)
