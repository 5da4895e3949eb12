"""Bytes and kernels of memory-bound operators without a compiler, counted while transformers' modules run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.cost_models import causal
from tests.test_kernel_prices import machine, times
from workbench.cost.eager_traffic import EagerOperator, PointwiseKernels, eager_bytes, eager_operator
from workbench.cost.execution import Execution
from workbench.cost.operator_passes import OperatorPasses
from workbench.cost.roofline import Grid
from workbench.cost.traffic import WIDE_BYTES, pointwise_bytes
from workbench.model.layer import Pointwise, Shard
from workbench.model.transformer import Norm, norm, residual

ONE = Grid(1, 1)
TOKENS, WIDTH, HEADS, HEAD = 256, 512, 32, 64
VIEWS = ("view", "expand", "transpose", "slice", "unsqueeze", "t", "detach")
ROTATED = 2 * HEADS * HEAD  # of queries and keys
ROTARY = Pointwise(name="rotary", width=ROTATED, num_passes=2, shard=Shard.COLUMN)
SWIGLU = Pointwise(name="mlp.silu", width=WIDTH, num_passes=3, shard=Shard.COLUMN)
QUICK = Pointwise(name="mlp.quick_gelu", width=WIDTH, num_passes=2, shard=Shard.COLUMN)


class Counted(TorchDispatchMode):
    """Counts kernels, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.num_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            tensors = (each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor))
            self.num_bytes += sum(map(_size, tensors))
            self.num_kernels += 1
        return result


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor that are in memory: dimensions that are only repeated are read once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * tensor.element_size()


class Case(NamedTuple):
    """An operator, and how transformers computes it.

    Args:
        operator: as priced.
        inputs: shapes of what it reads.
        call: of the inputs.
        module: with the operator's weights.
    """

    operator: Pointwise
    inputs: tuple[tuple[int, ...], ...]
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    module: nn.Module | None = None


def cases(dtype: torch.dtype) -> Iterator[Case]:
    flat, heads = (1, TOKENS, WIDTH), (1, HEADS, TOKENS, HEAD)
    rms = LlamaRMSNorm(WIDTH).to(dtype)
    yield Case(norm("mlp_norm", WIDTH, Norm.RMS), (flat,), rms, rms)
    angles = torch.ones(1, TOKENS, HEAD, dtype=dtype)
    yield Case(ROTARY, (heads, heads), lambda q, k: apply_rotary_pos_emb(q, k, angles, angles))
    yield Case(SWIGLU, (flat, flat), lambda gate, up: silu(gate) * up)
    yield Case(QUICK, (flat,), ACT2FN["quick_gelu"])
    yield Case(replace(QUICK, name="mlp.gelu_new"), (flat,), ACT2FN["gelu_new"])
    yield Case(replace(QUICK, name="mlp.relu2"), (flat,), ACT2FN["relu2"])
    xielu = XIELUActivation(dtype=dtype)
    yield Case(replace(QUICK, name="mlp.xielu"), (flat,), xielu, xielu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "index", range(7), ids=["rms norm", "rotation", "swiglu", "quick gelu", "new gelu", "relu2", "xielu"]
)
def test_calls_are_those_of_transformers(index: int, dtype: torch.dtype):
    """Tensors that PyTorch reads and writes: equal but for single rows and the angles' tables."""
    case = list(cases(dtype))[index]
    calls, size = eager_operator(case.operator), dtype.itemsize
    assert calls is not None
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in case.inputs]
    weights = [] if case.module is None else list(case.module.parameters())
    forward, whole = passes_of(case, inputs, weights)
    for each in weights:
        each.requires_grad_(requires_grad=False)
    _, backward = passes_of(case, inputs, [])
    expected = eager_bytes(calls, case.operator, causal(TOKENS), ONE, size)
    assert expected.forward == pytest.approx(forward.num_bytes, rel=0.03)
    assert expected.input_grad == pytest.approx(backward.num_bytes, rel=0.03)
    assert expected.weight_grad == pytest.approx(whole.num_bytes - backward.num_bytes, rel=0.01)
    casts = size < WIDE_BYTES
    assert forward.num_kernels == calls.forward.kernels + casts * calls.forward.casts
    assert backward.num_kernels == calls.backward.kernels + casts * calls.backward.casts
    assert whole.num_kernels - backward.num_kernels == calls.weights.num_kernels


def passes_of(case: Case, inputs: list[Tensor], weights: list[nn.Parameter]) -> tuple[Counted, Counted]:
    """The counts of a forward, and of the gradients of inputs and weights."""
    with Counted() as forward:
        results = case.call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    gradients = [torch.ones_like(result) for result in results]
    with Counted() as backward:
        torch.autograd.grad(results, [*inputs, *weights], gradients)
    return forward, backward


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
def test_one_kernel_where_pytorch_has_one(name: str):
    operator = Pointwise(name=f"mlp.{name}", width=WIDTH, num_passes=2)
    assert eager_operator(operator) is None
    values = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with Counted() as forward:
        result = ACT2FN[name](values)
    gradient = torch.ones_like(result)
    with Counted() as backward:
        torch.autograd.grad(result, values, gradient)
    expected = pointwise_bytes(operator, causal(TOKENS), ONE, 2)
    assert (expected.forward, expected.input_grad) == (forward.num_bytes, backward.num_bytes)


def test_layer_norms_and_sums_are_fused_in_pytorch():
    assert eager_operator(norm("mlp_norm", WIDTH, Norm.LAYER)) is None
    assert eager_operator(residual("mlp_residual", WIDTH)) is None


def test_execution_decides_bytes_and_launches():
    """An RMS norm in PyTorch moves 9 times the bytes forward and 14 times backward, in 8 and 16 kernels."""
    rms, work = norm("mlp_norm", WIDTH, Norm.RMS), causal(TOKENS)
    eager, fused = (Execution(pointwise=each) for each in (PointwiseKernels.EAGER, PointwiseKernels.FUSED))
    moved = [
        OperatorPasses(times(machine(), run), ONE, "bfloat16").moved_bytes(rms, work)
        for run in (eager, fused)
    ]
    assert moved[0].forward == 9 * moved[1].forward
    assert moved[0].input_grad == 14 * moved[1].input_grad
    assert [run.num_kernels(rms) for run in (eager, fused)] == [8, 1]
    assert [run.num_backward_kernels(rms) for run in (eager, fused)] == [16, 2]


def test_tensor_parallel_ranks_move_their_share():
    calls = eager_operator(SWIGLU)
    assert isinstance(calls, EagerOperator)
    whole, half = (eager_bytes(calls, SWIGLU, causal(TOKENS), Grid(tp, 1), 2) for tp in (1, 2))
    assert whole.forward == 2 * half.forward
