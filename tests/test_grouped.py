"""Grouped products and sorted rows: autograd's results of a loop, and the contract of PyTorch's kernel."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from runtime.models import grouped as module
from runtime.models.grouped import GroupedLinear, Groups, Orientation, grouped
from runtime.models.sorted_rows import order_by

F64 = torch.float64
WIDTHS = {Orientation.OUT_IN: (16, 8), Orientation.IN_OUT: (8, 16)}  # of a weight's last two dims
COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def groups_of(counts: list[int]) -> Groups:
    return Groups(torch.tensor(counts).cumsum(0, dtype=torch.int32))


def weight_of(orientation: Orientation, num_groups: int, dtype: torch.dtype = F64) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_groups, *WIDTHS[orientation], dtype=dtype))


def by_loop(x: Tensor, weight: Tensor, orientation: Orientation, counts: list[int]) -> Tensor:
    matrices = weight if orientation is Orientation.IN_OUT else weight.transpose(1, 2)
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(counts), matrices, strict=True)])


@given(COUNTS, st.sampled_from(Orientation), st.integers(0, 5))
def test_products_and_gradients_are_those_of_a_loop(
    counts: list[int], orientation: Orientation, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = weight_of(orientation, len(counts))
    x = torch.randn(sum(counts), 8, dtype=F64, requires_grad=True)
    towards = torch.randn(sum(counts), 16, dtype=F64)
    linear = GroupedLinear(weight, orientation, groups_of(counts))
    expected = by_loop(x, weight, orientation, counts)
    wanted = torch.autograd.grad((expected * towards).sum(), (x, weight))
    ours = grouped(x, linear)
    found = torch.autograd.grad((ours * towards).sum(), (x, weight))
    for own, theirs in zip((ours, *found), (expected, *wanted), strict=True):
        assert torch.allclose(own, theirs, rtol=1e-13, atol=1e-14)
    assert found[1].stride() == weight.stride()  # so that autograd keeps it instead of a copy
    total = torch.ones_like(weight)
    linear.add_weight_gradient(total, towards, x.detach())
    assert torch.allclose(total, 1 + wanted[1], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("trains", ["rows", "weight"])
def test_only_wanted_gradients_are_computed(trains: str) -> None:
    weight = weight_of(Orientation.OUT_IN, 2).requires_grad_(trains == "weight")
    x = torch.randn(5, 8, dtype=F64, requires_grad=trains == "rows")
    grouped(x, GroupedLinear(weight, Orientation.OUT_IN, groups_of([2, 3]))).sum().backward()
    assert (x.grad is None, weight.grad is None) == (trains == "weight", trains == "rows")


@pytest.mark.parametrize("orientation", Orientation, ids=str)
def test_the_kernel_gets_operands_that_it_takes(
    orientation: Orientation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CPU version computes what the loop does; a GPU wants int32 offsets and aligned strides, too."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    kernel = functional.grouped_mm

    def noted(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append((a, b, offs))
        return kernel(a, b, offs=offs)

    def run(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        weight = weight_of(orientation, len(counts), torch.bfloat16)
        x = torch.randn(sum(counts), 8, dtype=torch.bfloat16, requires_grad=True)
        linear = GroupedLinear(weight, orientation, groups_of(counts))
        y = grouped(x, linear)
        of_x, of_weight = torch.autograd.grad(y.square().sum(), (x, weight))
        assert of_weight.stride() == weight.stride()
        return y, of_x, of_weight

    counts = [3, 0, 4]
    expected = run(counts)
    monkeypatch.setattr(module, "on_capable_gpu", lambda _: True)
    monkeypatch.setattr(functional, "grouped_mm", noted)
    for own, theirs in zip(run(counts), expected, strict=True):
        assert torch.allclose(own, theirs, rtol=2**-7, atol=2**-6)
    assert [(a.ndim, b.ndim) for a, b, _ in calls] == [(2, 3), (2, 3), (2, 2)]
    for a, b, ends in calls:
        assert ends.dtype is torch.int32
        assert ends.tolist() == [3, 3, 7]
        for operand in (a, b):
            assert operand.data_ptr() % 16 == 0
            assert sorted(operand.stride())[0] == 1
            assert all(stride * 2 % 16 == 0 for stride in sorted(operand.stride())[1:])


UNFIT: dict[str, Any] = {
    "float32": lambda: (torch.zeros(4, 8), torch.zeros(2, 8, 8)),
    "no rows": lambda: (torch.zeros(0, 8).bfloat16(), torch.zeros(2, 8, 8).bfloat16()),
    "a width that is no multiple of 8": lambda: (
        torch.zeros(4, 8).bfloat16(),
        torch.zeros(2, 8, 12).bfloat16(),
    ),
    "an address that is no multiple of 16": lambda: (
        torch.zeros(33).bfloat16()[1:].view(4, 8),
        torch.zeros(2, 8, 8).bfloat16(),
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_other_operands_are_multiplied_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = UNFIT[name]()
    monkeypatch.setattr(module, "on_capable_gpu", lambda _: True)
    assert not module.has_kernel(a, b)
    assert module.has_kernel(torch.zeros(4, 8).bfloat16(), torch.zeros(2, 8, 8).bfloat16())


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=6))
def test_rows_are_sorted_by_key_and_restored(keys: list[list[int]]) -> None:
    key_NK = torch.tensor(keys)
    num_rows, num_keys = key_NK.shape
    x = torch.arange(num_rows, dtype=F64)[:, None].requires_grad_()
    rows = order_by(key_NK.reshape(-1), num_keys)
    in_order = rows.sort(x)
    by_hand = sorted(range(num_rows * num_keys), key=lambda copy: int(key_NK.reshape(-1)[copy]))
    assert in_order[:, 0].tolist() == [copy // num_keys for copy in by_hand]
    assert rows.restore(in_order)[:, 0].tolist() == [n for n in range(num_rows) for _ in range(num_keys)]
    weights = torch.arange(float(num_rows * num_keys), dtype=F64)[:, None]
    (of_x,) = torch.autograd.grad((rows.restore(in_order) * weights).sum(), x)
    assert of_x[:, 0].tolist() == weights.view(num_rows, num_keys).sum(1).tolist()
