"""Bytes of memory-bound kernels, counted by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost_models import causal
from workbench.cost.roofline import Grid
from workbench.cost.traffic import (
    Dropout,
    LossKernel,
    is_cross_entropy,
    lookup_bytes,
    loss_bytes,
    pointwise_bytes,
)
from workbench.model.experts import JOIN
from workbench.model.layer import Lookup, Pointwise, Shard
from workbench.model.module_layers import lm_head
from workbench.model.transformer import Norm, residual

ONE = Grid(1, 1)
TENSOR = 10 * 8 * 2  # ten tokens of width 8, two bytes each


@pytest.mark.parametrize(
    ("name", "passes", "forward", "backward"),
    [
        pytest.param("attention_norm", 2, 2, 3, id="norm: x, y; x, dy, dx"),
        pytest.param("mlp.gelu", 2, 2, 3, id="gelu: x, y; x, dy, dx"),
        pytest.param("mlp.silu", 3, 3, 5, id="swiglu: gate, up, y; gate, up, dy, dgate, dup"),
        pytest.param("rotary", 2, 2, 2, id="rotation: x, y; dy, dx"),
        pytest.param("mlp_residual", 3, 3, 3, id="sum: x, y, z; two gradients, their sum"),
        pytest.param(JOIN, 3, 4 + 3, 4 + 3 + 2, id="two experts: rows there, results back, their weights"),
    ],
)
def test_tensors_of_a_kernel(name: str, passes: int, forward: int, backward: int):
    operator = Pointwise(name=name, width=8, num_passes=passes)
    assert pointwise_bytes(operator, causal(10), ONE, 2) == (forward * TENSOR, backward * TENSOR, 0)


def test_weights_of_a_norm_cost_no_pass_of_their_own():
    norm = Pointwise(name="norm", width=8, num_passes=2, weights=(("weight", 8),))
    assert pointwise_bytes(norm, causal(10), ONE, 2) == pointwise_bytes(
        replace(norm, weights=()), causal(10), ONE, 2
    )


def test_tensor_parallelism_cuts_the_width():
    gelu = Pointwise(name="mlp.gelu", width=8, num_passes=2, shard=Shard.COLUMN)
    assert pointwise_bytes(gelu, causal(10), Grid(4, 1), 2).forward == 2 * TENSOR / 4


def test_dropout_adds_its_mask_and_a_kernel_backward():
    """Forward a byte an element more; backward gradient and mask read, the branch's gradient written."""
    plain, masked = (
        pointwise_bytes(residual("mlp_residual", 8), causal(10), ONE, 2, dropout) for dropout in Dropout
    )
    assert masked.forward - plain.forward == 80
    assert masked.input_grad - plain.input_grad == 2 * TENSOR + 80


def test_tables_are_read_and_their_gradients_dense():
    table = Lookup(name="t", num_rows=100, width=8, shard=Shard.COLUMN)
    assert lookup_bytes(table, causal(10), ONE, 2) == (320, 320, 1600 + 320)
    assert lookup_bytes(table, causal(10), Grid(4, 1), 2).weight_grad == 400 + 320


@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [
        pytest.param(
            LossKernel.PARALLEL, (2 + 4) + 4 + 8 + 8 + 4 + 8, 8 + (4 + 2), id="cast max sub exp sum div"
        ),
        pytest.param(
            LossKernel.TORCH, (2 + 4) + 8 + 4, 4 + 4 + 8 + 4 + (4 + 2), id="cast log-softmax; zeros"
        ),
        pytest.param(LossKernel.FUSED, 2 + 2 + 2, 2 + 2, id="two reads, gradient in place"),
    ],
)
def test_bytes_of_a_loss_by_step(kernel: LossKernel, forward: int, backward: int):
    assert loss_bytes(7, 2, kernel) == (7 * forward, 7 * backward, 0)


@pytest.mark.parametrize("kernel", LossKernel)
def test_wide_logits_are_not_cast(kernel: LossKernel):
    wide, narrow = loss_bytes(1, 4, kernel), loss_bytes(1, 2, kernel)
    if kernel is LossKernel.FUSED:
        assert wide.forward == 2 * narrow.forward
    else:
        assert narrow.forward - wide.forward == narrow.input_grad - wide.input_grad == 2 + 4


@given(st.integers(1, 10**9))
def test_losses_in_order(elements: int):
    moved = [sum(loss_bytes(elements, 2, kernel)) for kernel in (LossKernel.FUSED, *list(LossKernel)[1::-1])]
    assert moved == sorted(moved)


def test_only_a_loss_over_a_vocabulary_is_a_cross_entropy():
    head = lm_head(100, 8, Norm.RMS)
    assert [is_cross_entropy(each) for each in head.operators if isinstance(each, Pointwise)] == [False, True]
    assert not is_cross_entropy(Pointwise(name="loss", width=8, num_passes=2))
