"""FLOP, bytes and messages of layers against closed forms."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost_models import GPT, LLAMA_8B, block, causal, layer
from workbench.cost.roofline import (
    Gemm,
    Grid,
    RowWork,
    Work,
    attention_flop,
    gemm_of,
    key_value_bytes,
    layer_flop,
    placed_messages,
)
from workbench.cost.signature import signature
from workbench.model.layer import Attention, Matmul, Shard, TokenCount
from workbench.model.module_layers import lm_head, token_embedding
from workbench.model.transformer import Norm

ONE = Grid(1, 1)


@given(st.integers(1, 4096), st.integers(1, 4))
def test_block_flop_is_two_per_parameter_and_token_plus_attention(tokens: int, rows: int):
    layer_ = block(LLAMA_8B)
    matmul_parameters = sum(
        parameter.num_elements
        for operator in layer_.operators
        if isinstance(operator, Matmul)
        for parameter in operator.parameters()
    )
    attention = 4 * 128 * 32 * tokens * (tokens + 1) / 2 * rows
    expected = 2 * matmul_parameters * tokens * rows + attention
    assert layer_flop(layer_, causal(tokens, rows), ONE) == pytest.approx(expected, rel=1e-12)


def test_gpt_block_flop_is_korthikanti_2022_appendix_a():
    """24 b s h^2 (1 + s / 6h) a layer, with all s^2 pairs."""
    s, b, h = 2048, 3, 1024
    work = Work((RowWork(s, s, s * s),) * b)
    assert layer_flop(block(GPT), work, ONE) == pytest.approx(24 * b * s * h**2 * (1 + s / (6 * h)))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 64))
def test_grid_divides_flop(tp: int, cp: int, chunks: int):
    work = causal(chunks * 8)
    whole = layer_flop(block(LLAMA_8B), work, ONE)
    assert layer_flop(block(LLAMA_8B), work, Grid(tp, cp)) == pytest.approx(whole / (tp * cp))


def test_gradients_of_a_matmul_are_one_more_matmul_each():
    gemm = Gemm(7, 5, 3)
    assert gemm.input_grad == Gemm(7, 3, 5)
    assert gemm.weight_grad == Gemm(5, 3, 7)
    assert gemm.flop == gemm.input_grad.flop == gemm.weight_grad.flop


@pytest.mark.parametrize(
    ("shard", "expected"),
    [(Shard.REPLICATED, (10, 32, 16)), (Shard.COLUMN, (10, 8, 16)), (Shard.ROW, (10, 32, 4))],
)
def test_tensor_parallelism_cuts_the_matmul(shard: Shard, expected: tuple[int, int, int]):
    matmul = Matmul(name="m", in_features=16, out_features=32, shard=shard)
    assert gemm_of(matmul, causal(10), Grid(4, 1)) == expected


def test_operators_count_the_tokens_they_work_on():
    work = Work((RowWork(100, 25, 10_000),))
    inner = Matmul(name="m", in_features=4, out_features=4, tokens_scale=2.0)
    assert gemm_of(inner, work, ONE).m == 200
    assert gemm_of(replace(inner, tokens=TokenCount.OUT, tokens_scale=1.0), work, ONE).m == 25
    assert gemm_of(inner, work, Grid(1, 4)).m == 50


def test_cross_attention_counts_its_fixed_keys():
    attention = Attention(name="a", num_heads=2, num_kv_heads=2, head_dim=8, causal=False, num_keys=77)
    work = Work((RowWork(64, 64, 64 * 64),))
    assert attention_flop(attention, work, ONE) == 4 * 8 * 2 * 64 * 77
    prompt = replace(attention, name="cross.attention")  # whose keys each row has
    assert key_value_bytes(prompt, work, Grid(1, 2), 2) == 2 * 77 * 2 * 8 * 2
    windowed = replace(attention, num_keys=16, tokens_scale=1.5)  # of queries that see some of all keys
    assert key_value_bytes(windowed, work, Grid(1, 2), 2) == 2 * 1.5 * 64 * 2 * 8 * 2
    elsewhere = replace(attention, num_keys=None, keys=TokenCount.CONTEXT)
    assert key_value_bytes(elsewhere, work, Grid(1, 2), 2) == 0
    own = replace(attention, num_keys=None)
    assert attention_flop(own, work, ONE) == 4 * 8 * 2 * 64 * 64
    assert key_value_bytes(own, work, Grid(1, 2), 2) == 2 * 64 * 2 * 8 * 2


def test_a_block_has_two_all_reduces_each_way():
    num_bytes = 10 * 4096 * 2
    messages = placed_messages(block(LLAMA_8B), causal(10), Grid(2, 1), 2)
    assert [size for _, size in messages.forward] == [num_bytes, num_bytes]
    assert [size for _, size in messages.backward] == [num_bytes, num_bytes]
    names = [block(LLAMA_8B).operators[index].name for index, _ in messages.backward]
    assert names == ["q_proj", "mlp.gate"]


def test_embedding_and_head_have_one_all_reduce_each():
    grid = Grid(2, 1)
    embed = placed_messages(token_embedding(1000, 16), causal(10), grid, 2)
    head = placed_messages(lm_head(1000, 16, Norm.RMS), causal(10), grid, 2)
    assert (embed.forward, embed.backward) == (((0, 320),), ())
    assert (head.forward, [size for _, size in head.backward]) == ((), [320])
    assert placed_messages(block(), causal(10), ONE, 2) == ((), ())


def test_signature_ignores_name_ties_and_trainability_only():
    layer_ = block()
    same = replace(layer_, name="other", trainable=False, tied=(("q_proj.weight", "shared"),))
    assert signature(same) == signature(layer_)
    assert signature(layer_).startswith("block-")
    changed = layer(*layer_.operators)
    assert signature(replace(changed, out_width=4096)) == signature(layer_)
    assert signature(changed) != signature(layer_)
    narrower = replace(layer_.operators[0], width=8)
    assert signature(replace(layer_, operators=(narrower, *layer_.operators[1:]))) != signature(layer_)


def test_signature_is_stable():
    """Files of measured rows name layers by it: a change of this value breaks them all."""
    assert signature(layer(Matmul(name="linear", in_features=4, out_features=8))) == "block-6cc084a1e5a5"


@pytest.mark.parametrize("row", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_bad_rows_are_refused(row: tuple[int, int, int]):
    with pytest.raises(ValueError, match="row: want >= 1 token"):
        RowWork(*row)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="at least one row"):
        Work(())
