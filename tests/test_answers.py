"""Answers of ranks come back as they were, and their tensors as little more than their numbers."""

import pickle

import pytest
import torch
from torch import nn

from runtime.world.answers import packed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_every_bit_and_their_shape(dtype: torch.dtype):
    numbers = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    for tensor in (numbers, numbers.T, numbers[1:, ::2], numbers[0, 0]):
        again = pickle.loads(packed({"a": [tensor]}))["a"][0]
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        assert bits(again) == bits(tensor)


def test_what_is_no_number_stays_and_answers_can_be_changed():
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    again = pickle.loads(packed(tensor))
    assert bits(again) == bits(tensor)
    again += 1
    assert bits(tensor) == bits(pickle.loads(packed(tensor)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ],
    ids=["empty", "conjugate", "gradient", "parameter", "sparse"],
)
def test_other_tensors_come_back_as_torch_pickles_them(tensor: torch.Tensor):
    again = pickle.loads(packed(tensor))
    assert type(again) is type(tensor)
    assert again.requires_grad == tensor.requires_grad
    assert again.layout == tensor.layout
    assert torch.equal(again.to_dense(), tensor.to_dense())


def test_a_tensor_in_two_places_is_packed_once():
    tensor = torch.ones(1000)
    first, second = pickle.loads(packed((tensor, tensor)))
    assert first is second
    assert len(packed((tensor, tensor))) < len(packed(tensor)) + 100


def test_many_small_tensors_are_their_numbers_and_not_files_of_torch():
    answer = {f"weight {index}": torch.ones(4) for index in range(100)}
    assert len(packed(answer)) < len(pickle.dumps(answer)) / 4
