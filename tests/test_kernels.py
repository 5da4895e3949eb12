"""Bitfield attention against the dense reference: forward, log-sums and gradients."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from runtime.kernels.bitfield_attention.attention import (
    Backward,
    Options,
    attention_with_lse,
)
from runtime.kernels.bitfield_attention.mask import TokenFields, kernel_mask
from runtime.kernels.bitfield_attention.plan import make_plan
from runtime.kernels.bitfield_attention.reference import attends
from runtime.kernels.bitfield_attention.tasks import FixedSplit
from tests.interpreter import DEVICE, INTERPRETED, poison_memory, round_like_hardware
from tests.kernel_cases import (
    Tensors,
    assert_close_as_torch,
    random_fields,
    tensors,
)

FUSED, DETERMINISTIC = Options(), Options(backward=Backward.DETERMINISTIC)
BLOCK = 32


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NaN where nothing was written, and one thread."""
    if INTERPRETED:
        round_like_hardware(monkeypatch)
    poison_memory(monkeypatch)
    return


def run(
    data: Tensors, queries: TokenFields, keys: TokenFields, options: Options, block_k: int = BLOCK
) -> dict[str, Tensor]:
    """Output, log-sums and gradients of the kernels."""
    queries, keys = (
        TokenFields(*(getattr(f, name).to(DEVICE) for name in TokenFields.__slots__)) for f in (queries, keys)
    )
    mask = kernel_mask(queries, keys)
    plan = make_plan(mask, block_q=BLOCK, block_k=block_k)
    q, k, v = (x.detach().to(DEVICE).requires_grad_() for x in (data.q, data.k, data.v))
    out, lse = attention_with_lse(q, k, v, mask, plan, options=options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), data.do.to(DEVICE))
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(FUSED, id="fused"),
        pytest.param(DETERMINISTIC, id="deterministic"),
        pytest.param(Options(split=FixedSplit(1)), id="fused-split"),
        pytest.param(Options(backward=Backward.DETERMINISTIC, split=FixedSplit(1)), id="deterministic-split"),
    ],
)
def test_error_is_at_most_twice_that_of_torch(dtype: torch.dtype, options: Options):
    """Packed segments, runs, causal text, windows, sinks, padding and blind rows; an odd length; GQA."""
    fields = random_fields(75, seed=1)
    attends_QK = attends(fields, fields)
    assert (~attends_QK.any(1)).any(), "the case has empty rows"
    data = tensors(75, 75, heads=4, kv_heads=2, dtype=dtype)
    assert_close_as_torch(run(data, fields, fields, options), data, attends_QK)
