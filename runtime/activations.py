"""Counts the bytes of every tensor that lives on a rank during a step."""

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
        storages = (weight.untyped_storage() for weight in weights)
        self.num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
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
        place, size = storage._cdata, storage.nbytes()
        with self._lock:
            if place in self._alive:
                return
            self._alive[place] = weakref.ref(storage, lambda _: self._forget(place, size))
            self.num_bytes += size
            if self.num_bytes > self._height.num_bytes:
                self._height = Height(time.perf_counter(), self.num_bytes)

    def _forget(self, place: int, size: int) -> None:
        with self._lock:
            if self._alive.pop(place, None) is not None:
                self.num_bytes -= size


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
