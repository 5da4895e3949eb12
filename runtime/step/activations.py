"""Counts a rank's memory during a step: by tensor, or by its GPU's allocator."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(NamedTuple):
    """Maximum bytes in use, and when (seconds on the machine's monotonic clock)."""

    time_s: float
    num_bytes: int


class Allocations(TorchDispatchMode):
    """Bytes of weights and of all storages created within this mode, until they are freed.

    Every operator of forward, backward and optimizer is intercepted here, and so are buffers of messages; a
    storage counts once, from the operator that creates it until its last tensor is gone, on any thread. Not
    counted: scratch memory within an operator, memory of the transport, and a step's data, created before the
    step. Counting costs a Python call per operator, so counted steps are not timed.

    Args:
        weights: already existing, and permanent.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.num_bytes = _bytes_of(weights)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = threading.RLock()
        self._height = Peak(time.perf_counter(), self.num_bytes)

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
        """Record that an existing storage grew, or shrank, by that many bytes."""
        with self._lock:
            self.num_bytes += num_bytes
            if self.num_bytes > self._height.num_bytes:
                self._height = Peak(time.perf_counter(), self.num_bytes)

    def take_peak(self) -> Peak:
        """The height since this was asked last, and start anew from what is held now."""
        with self._lock:
            height = self._height
            self._height = Peak(time.perf_counter(), self.num_bytes)
        return height

    def _note(self, storage: torch.UntypedStorage) -> None:
        index, size = storage._cdata, storage.nbytes()
        with self._lock:
            if index in self._alive:
                return
            self._alive[index] = weakref.ref(storage, lambda _: self._forget(index, size))
            self.num_bytes += size
            if self.num_bytes > self._height.num_bytes:
                self._height = Peak(time.perf_counter(), self.num_bytes)

    def _forget(self, storage_key: int, size: int) -> None:
        with self._lock:
            if self._alive.pop(storage_key, None) is not None:
                self.num_bytes -= size


class AllocatorBytes:
    """Bytes of a rank's weights and of a step's allocations on a GPU.

    Counted by torch's own allocator, which tracks allocations without waiting for the device. Memory other
    than weights at the start of the first step is excluded: a step's data and buffers, as in `Allocations`.
    Memory of libraries, such as the workspace of cuBLAS, counts. Counting is free, but the rank needs the
    allocator for itself.

    Args:
        weights: already existing, and permanent.
        device: a GPU.
    """

    def __init__(self, weights: Iterable[Tensor], device: torch.device) -> None:
        self._device = device
        self._weight_bytes = _bytes_of(weights)
        self._beside_bytes: int | None = None  # known from the first step on

    def __enter__(self) -> "AllocatorBytes":
        if self._beside_bytes is None:
            self._beside_bytes = torch.cuda.memory_allocated(self._device) - self._weight_bytes
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing, as there is nothing to undo."""

    @property
    def num_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - (self._beside_bytes or 0)

    def resize(self, num_bytes: int) -> None:
        """Do nothing, as the allocator counts by itself."""

    def take_peak(self) -> Peak:
        """The height since this was asked last, and start anew from what is held now."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - (self._beside_bytes or 0)
        torch.cuda.reset_peak_memory_stats(self._device)
        return Peak(time.perf_counter(), peak_bytes)


Watched = Allocations | AllocatorBytes


def watch(weights: Iterable[Tensor], device: torch.device) -> Watched:
    """A counter of a rank's bytes on its device; `weights` exist already and are permanent."""
    return Allocations(weights) if device.type == "cpu" else AllocatorBytes(weights, device)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
