"""Answers of ranks as bytes: a tensor is its numbers, where torch would write a file for each."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def packed(answer: object) -> bytes:
    """The pickled answer; tensors in it are copied, also those that share memory."""
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(answer)
    return file.getvalue()


class _Packer(pickle.Pickler):
    def reducer_override(self, value: object) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        if type(value) is not Tensor or value.requires_grad or not _is_plain(value):
            return NotImplemented
        numbers = value.contiguous().view(-1).view(torch.uint8).numpy()
        return _unpacked, (bytearray(numbers), value.dtype, tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is real numbers in this process's memory, as they stand there."""
    is_here = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_here and not tensor.is_complex() and not tensor.is_neg() and tensor.numel() > 0


def _unpacked(numbers: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(numbers, dtype=dtype).view(shape)
