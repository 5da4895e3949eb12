"""Heads that travel at a time: a divisor, as few as fill a GPU, the same for simulator and runtime."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench import gathered_heads as bench
from runtime.models import attention_mask
from runtime.parallel.context.gathered import gathered_attention
from runtime.parallel.context.token_shares import TokenShares
from tests.test_context_parallel_attention import INTERPRETED, Late
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.masks.builders import causal
from workbench.plan.gathered_heads import ENOUGH_PROGRAMS, QUERY_BLOCK, heads_per_gather


@given(st.integers(1, 16), st.integers(1, 24), st.integers(0, 40_000))
def test_it_is_the_least_divisor_that_fills_a_gpu(group: int, num_kv_heads: int, num_tokens: int) -> None:
    def fills(count: int) -> bool:
        return count * group * -(-num_tokens // QUERY_BLOCK) >= ENOUGH_PROGRAMS

    found = heads_per_gather(group * num_kv_heads, num_kv_heads, num_tokens)
    assert num_kv_heads % found == 0
    assert fills(found) or found == num_kv_heads
    assert not any(fills(fewer) for fewer in range(1, found) if num_kv_heads % fewer == 0)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize(("in_kernels", "num_gathers"), [(False, 2), (True, 1)], ids=["plain", "kernels"])
def test_a_short_sequence_is_gathered_at_once_in_kernels(monkeypatch, in_kernels, num_gathers):
    """Plain PyTorch writes scores out, so there it stays one head at a time."""
    monkeypatch.setattr(attention_mask, "uses_kernels", lambda device: in_kernels)
    shares, log = TokenShares(mask=causal(32), owned=(np.arange(32),)), []
    q, k, v = (torch.randn((heads, 32, 64), requires_grad=True) for heads in (4, 2, 2))
    y = gathered_attention(shares, Late(log, at_once=False), "cpu").attend(q, k, v, scale=0.1)
    assert log.count("gather") == num_gathers
    y.sum().backward()
    assert log.count("gather") == 2 * num_gathers
    assert log.count("scatter") == num_gathers


def test_one_head_of_a_short_sequence_leaves_a_gpu_idle():
    """An image of 577 tokens in 16 heads on two ranks of an A40."""
    shape = bench.Shape("A40", 2e10, (16, 16, 80), 1, 2, 577)
    found = bench.seconds(shape, CostModel(load_profile("A40")))
    assert found[1] > 3 * found[heads_per_gather(16, 16, 577 // 2)]
