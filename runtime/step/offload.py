"""Offloads a stage's weights and optimizer state to the host, and loads them back, in place."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from runtime.step.stage_module import StageModule

Storage = torch.UntypedStorage


class Offload:
    """Offloaded state of some stages of a rank.

    Storages are freed and refilled, so that all tensors on them, including those that autograd keeps for the
    backward, are valid again afterwards. On a CPU the copies are in the same memory as before. On a GPU
    neither call waits: copies overlap the computation, see `_Lane`.

    Args:
        modules: stage id -> module, of all stages of the rank.
    """

    def __init__(self, modules: Mapping[int, StageModule]) -> None:
        self._modules = modules
        self._away: dict[int, list[tuple[Storage, Storage]]] = {}
        self._lanes: dict[torch.device, _Lane] = {}

    def leave(self, stage: int, optimizer: torch.optim.Optimizer | None) -> torch.cuda.Event | None:
        """Free the stage's tensors on the device.

        Returns:
            The event of the end of copies that overlap the computation, if any.

        Raises:
            ValueError: memory that is shared with other tensors.
        """
        moved: list[tuple[Storage, Storage]] = []
        for index, storage in enumerate(self._storages(stage, optimizer)):
            if storage.device.type == "cuda":
                host = self._lane(storage.device).take(storage, (stage, index))
            else:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
                host.copy_(storage)
            moved.append((storage, host))
        for storage, _ in moved:
            storage.resize_(0)
        self._away[stage] = moved
        return next((lane.end() for lane in self._lanes.values()), None)

    def come_back(self, stage: int) -> None:
        """Refill the stage's tensors."""
        for storage, host in self._away.pop(stage):
            storage.resize_(host.nbytes())
            if storage.device.type == "cuda":
                self._lane(storage.device).bring(storage, host)
            else:
                storage.copy_(host)
        for lane in self._lanes.values():
            lane.arrive()

    def _lane(self, device: torch.device) -> "_Lane":
        if device not in self._lanes:
            self._lanes[device] = _Lane(device)
        return self._lanes[device]

    def _storages(self, stage: int, optimizer: torch.optim.Optimizer | None) -> Iterator[Storage]:
        """Yield storages of the stage's weights and their moments, each once."""
        weights = list(self._modules[stage].parameters())
        elsewhere = {
            _address(p) for other, m in self._modules.items() if other != stage for p in m.parameters()
        }
        used: Counter[int] = Counter()
        storages: dict[int, Storage] = {}
        for tensor in [*weights, *_moments(weights, optimizer)]:
            used[_address(tensor)] += tensor.numel() * tensor.element_size()
            storages[_address(tensor)] = tensor.untyped_storage()
        for address, storage in storages.items():
            if address in elsewhere or used[address] != storage.nbytes():
                raise ValueError(
                    f"stage {stage} cannot be offloaded: its weights share memory with others "
                    "(want no sharded optimizer and no tied weights)"
                )
            yield storage


def _moments(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    for weight in weights if optimizer is not None else ():
        state = optimizer.state.get(weight, {}) if optimizer is not None else {}
        yield from (value for name, value in sorted(state.items()) if name != "step")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Lane:
    """Copies between one GPU and pinned host memory, in a stream of their own.

    A copy begins when the GPU's earlier work has ended. Host memory is pinned once per storage and reused, as
    pinning takes longer than a copy. Copies of both directions are ordered by the stream, so host memory is
    complete before it is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._hosts: dict[tuple[int, int], Storage] = {}

    def take(self, storage: Storage, key: tuple[int, int]) -> Storage:
        """Start a copy to the host. The storage can be freed at once; its memory is kept until the end."""
        host = self._hosts.get(key)
        if host is None or host.nbytes() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
            self._hosts[key] = host
        self._follow()
        with torch.cuda.stream(self._stream):
            host.copy_(storage, non_blocking=True)
        torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage).record_stream(self._stream)
        return host

    def bring(self, storage: Storage, host: Storage) -> None:
        """Start refilling the storage; call `arrive` before it is read."""
        self._follow()  # earlier contents of this memory may still be in use
        with torch.cuda.stream(self._stream):
            storage.copy_(host, non_blocking=True)

    def arrive(self) -> None:
        """Let later computation wait for the copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def end(self) -> torch.cuda.Event:
        """Event of the end of all copies so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
