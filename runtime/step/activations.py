"""Counts the bytes that a rank holds during a step: tensor by tensor, or as its GPU's allocator does."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Height(NamedTuple):
    """The most bytes held at once, and when (seconds, the machine's monotonic clock)."""

    time_s: float
    num_bytes: int


class Allocations(TorchDispatchMode):
    """Bytes of weights and of all storages made while this mode was entered, until they die.

    Every operator of forward, backward and optimizer passes through here, and so do the buffers
    of messages; a storage counts once, from the operator that makes it until its last tensor is
    gone, on whichever thread that happens. Not seen: scratch memory inside one operator, what
    the transport holds, and a step's data, which is made before the step. Watching costs a
    Python call for every operator, so a watched step is not a timed one.

    Args:
        weights: exist already and stay.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.num_bytes = _bytes_of(weights)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = threading.RLock()
        self._height = Height(time.perf_counter(), self.num_bytes)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = dict(kwargs or {})
        result = func(*args, **given)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made:
            old = {_place(leaf) for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)}
            for tensor in made:
                if _place(tensor) not in old:
                    self._note(tensor.untyped_storage())
        return result

    def resize(self, num_bytes: int) -> None:
        """A storage that exists already grew by so many bytes, or shrank."""
        with self._lock:
            self.num_bytes += num_bytes
            if self.num_bytes > self._height.num_bytes:
                self._height = Height(time.perf_counter(), self.num_bytes)

    def take_height(self) -> Height:
        """The height since this was asked last, and start anew from what is held now."""
        with self._lock:
            height = self._height
            self._height = Height(time.perf_counter(), self.num_bytes)
        return height

    def _note(self, storage: torch.UntypedStorage) -> None:
        index, size = storage._cdata, storage.nbytes()
        with self._lock:
            if index in self._alive:
                return
            self._alive[index] = weakref.ref(storage, lambda _: self._forget(index, size))
            self.num_bytes += size
            if self.num_bytes > self._height.num_bytes:
                self._height = Height(time.perf_counter(), self.num_bytes)

    def _forget(self, place: int, size: int) -> None:
        with self._lock:
            if self._alive.pop(place, None) is not None:
                self.num_bytes -= size


class AllocatorBytes:
    """Bytes of a rank's weights and of all that its step takes from the GPU's allocator.

    Counted by torch's own allocator, which knows when memory is taken and given back without waiting for
    the device. What lay there beside the weights when the first step began is left out: a step's data and
    buffers, as `Allocations` does not see them either. What libraries keep in it, such as the workspace of
    cuBLAS, counts. Watching costs nothing, but one rank must have the allocator for itself.

    Args:
        weights: exist already and stay.
        device: a GPU.
    """

    def __init__(self, weights: Iterable[Tensor], device: torch.device) -> None:
        self._device = device
        self._weight_bytes = _bytes_of(weights)
        self._beside_bytes: int | None = None  # known when the first step begins

    def __enter__(self) -> "AllocatorBytes":
        if self._beside_bytes is None:
            self._beside_bytes = torch.cuda.memory_allocated(self._device) - self._weight_bytes
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to undo."""

    @property
    def num_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - (self._beside_bytes or 0)

    def resize(self, num_bytes: int) -> None:
        """The allocator knows."""

    def take_height(self) -> Height:
        """The height since this was asked last, and start anew from what is held now."""
        most = torch.cuda.max_memory_allocated(self._device) - (self._beside_bytes or 0)
        torch.cuda.reset_peak_memory_stats(self._device)
        return Height(time.perf_counter(), most)


Watched = Allocations | AllocatorBytes


def watch(weights: Iterable[Tensor], device: torch.device) -> Watched:
    """What counts a rank's bytes on its device; `weights` exist already and stay."""
    return Allocations(weights) if device.type == "cpu" else AllocatorBytes(weights, device)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
