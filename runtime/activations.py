"""Counts the bytes that wait for a backward, by watching what autograd saves."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

Key = tuple[int, int]  # stage, microbatch


class Activations:
    """Storages kept alive by the forwards whose backward is still to come.

    A storage counts once, however many tensors and microbatches share it; weights do not
    count. Watching costs a Python call for every saved tensor, so a watched step is not a
    timed one.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._held: dict[Key, dict[int, int]] = {}

    def watching(self, key: Key) -> AbstractContextManager[object]:
        """Everything that autograd saves inside belongs to that forward."""
        held = self._held.setdefault(key, {})

        def note(tensor: Tensor) -> Tensor:
            self._note(held, tensor)
            return tensor.detach()  # the tensor itself, if it is an output, would keep its own graph alive

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    def hold(self, key: Key, tensors: Iterable[Tensor]) -> None:
        """The executor itself keeps these until the backward."""
        for tensor in tensors:
            self._note(self._held.setdefault(key, {}), tensor)

    def release(self, key: Key) -> None:
        """The backward is done."""
        self._held.pop(key, None)

    @property
    def num_bytes(self) -> int:
        """Held now."""
        merged = {place: size for held in self._held.values() for place, size in held.items()}
        return sum(merged.values())

    def _note(self, held: dict[int, int], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            held[storage.data_ptr()] = storage.nbytes()


def state_bytes(optimizer: torch.optim.Optimizer | None, weights: Iterable[Tensor]) -> int:
    """Weights, the gradients that exist now, and the optimizer's state."""
    held = list(weights)
    total = sum(weight.nbytes + (0 if weight.grad is None else weight.grad.nbytes) for weight in held)
    states = [] if optimizer is None else list(optimizer.state.values())
    return total + sum(value.nbytes for state in states for value in state.values() if torch.is_tensor(value))
