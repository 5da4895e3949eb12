"""Working sets of fused kernels: gates, experts, joins, keys of other ranks."""

from dataclasses import replace

import pytest

from tests.cost_models import LLAMA_8B, SMALL, block, causal
from workbench.cost.expert_load import busiest_share
from workbench.cost.expert_parallel import on_rank
from workbench.cost.roofline import Grid
from workbench.memory.fused_working import FusedWorking, fused_working
from workbench.memory.setting import Setting
from workbench.model.experts import Experts, with_experts
from workbench.model.layer import Attention, Layer
from workbench.model.module_layers import lm_head
from workbench.model.transformer import Mlp
from workbench.plan.plan import KeyExchange

ONE = Grid()


def in_work(layer: Layer, tokens: int, grid: Grid = ONE, **more: KeyExchange) -> FusedWorking:
    return fused_working(layer, Setting(causal(tokens), grid, 2, is_gathered=False, **more))


def test_working_set_is_the_largest_operators_inputs_and_output():
    assert in_work(lm_head(1000, 16, None), 10).forward == 10 * 2 * 1000 * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_gated_activation_has_gate_up_and_their_product_in_work(tp: int):
    """Backward their gradients. Without a gate there are two such tensors, or a product's 4,096 and one."""
    tokens = 8192
    assert in_work(block(LLAMA_8B), tokens, Grid(tp)) == (tokens * 3 * 14336 // tp * 2,) * 2
    plain = replace(LLAMA_8B, mlp=replace(LLAMA_8B.mlp, gated=False))
    widest = max(2 * 14336 / tp, 4096 + 14336 / tp)
    assert in_work(block(plain), tokens, Grid(tp)) == (tokens * widest * 2,) * 2


def test_sums_of_as_many_tensors_are_no_gates():
    """A sum passes the gradient of its output on to both."""
    whole = block(LLAMA_8B)
    sums = replace(whole, operators=tuple(op for op in whole.operators if op.name.endswith("residual")))
    assert in_work(sums, 8) == (8 * 2 * 4096 * 2,) * 2


@pytest.mark.parametrize("inner", [32, 512])
def test_all_experts_of_a_rank_are_in_work_at_once(inner: int):
    """One kernel for all, on three rows a token."""
    experts = Experts(num=6, num_chosen=3, mlp=Mlp(width=inner, gated=True, activation="silu"))
    layer, tokens = with_experts(block(SMALL), experts), 1000
    assert in_work(layer, tokens).backward == 2 * tokens * max(3 * (64 + inner), 3 * 3 * inner)
    distributed = on_rank(layer, causal(tokens), Grid(ep=2))
    rows = 3 * tokens * busiest_share(2 * 3 * tokens, 2)
    expected = 2 * rows * max(64 + inner, 3 * inner, 2 * 64)  # products; activation; what leaves and arrives
    assert in_work(distributed, tokens, Grid(ep=2)).backward == pytest.approx(expected, abs=1)


def test_a_join_has_all_rows_of_a_token_and_their_sum_in_work():
    """Narrow experts: of products 7 (64 + 1) a token are less than eight tensors of 64."""
    experts = Experts(num=8, num_chosen=7, mlp=Mlp(width=1, gated=True, activation="silu"))
    assert in_work(with_experts(block(SMALL), experts), 1000).backward == 2 * 1000 * 8 * 64


@pytest.mark.parametrize("cp", [2, 8])
@pytest.mark.parametrize(
    ("exchange", "blocks"),
    [(KeyExchange.ALL_GATHER, 8), (KeyExchange.RING, 1), (KeyExchange.ALL_TO_ALL, None)],
)
def test_keys_of_other_ranks_are_in_work(exchange: KeyExchange, blocks: int | None, cp: int):
    """8 key heads of 128 for 32 query heads. Gathered one at a time, as 8,192 own tokens are 256 programs:
    this one's and the next one's, of all ranks. In a ring all heads of this rank and of the next one.
    Backward, gradients of one and float32 sums of two. All to all: queries, keys, values, output again."""
    own = 8192
    attention = 2 * own * 2 * (32 + 8) * 128
    found = in_work(only_attention(), cp * own, Grid(cp=cp), key_exchange=exchange)
    if blocks is None:
        assert found == (2 * attention, 2 * attention)
        return
    block = 2 * own * 8 * 128 * (cp / blocks if blocks > 1 else 1)
    assert found == (attention + 2 * 2 * block, attention + (2 * 2 + 2 + 2 * 4) * block)
    assert in_work(only_attention(), own) == (attention, attention)


def test_more_ranks_than_key_heads_have_something_in_work():
    """No plan has them, but an estimate may ask before a rule refuses."""
    assert in_work(only_attention(), 4096, Grid(16, 2)).backward > 0


def only_attention() -> Layer:
    whole = block(LLAMA_8B)
    return replace(whole, operators=tuple(op for op in whole.operators if isinstance(op, Attention)))
