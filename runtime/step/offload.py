"""Takes a stage's weights and optimizer state to the host and brings them back, in place."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from runtime.step.stage_module import StageModule

Storage = torch.UntypedStorage


class Offload:
    """What some stages of a rank have on the host.

    Storages are emptied and filled again, so that all tensors on them, those that autograd keeps for the
    backward included, are whole again afterwards. On a CPU the copies lie in the same memory as before.
    On a GPU neither call waits: copies run beside the computation, see `_Lane`.

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
            Where copies run beside the computation, the event of their end.

        Raises:
            ValueError: memory that other tensors use too.
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
        """Fill the stage's tensors again."""
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
        """Memory of the stage's weights and of their moments, each piece once."""
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
        yield from (value for name, value in sorted(state.items()) if name.startswith("exp_avg"))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Lane:
    """Copies between one GPU and pinned host memory, in a stream of their own.

    A copy begins when what was asked of the GPU before it is done. Host memory is pinned once for each
    storage and used again, as pinning takes longer than a copy. Copies of both ways follow one another
    in the stream, so host memory is full before it is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._hosts: dict[tuple[int, int], Storage] = {}

    def take(self, storage: Storage, key: tuple[int, int]) -> Storage:
        """What will be the host's copy. The storage can be freed at once: its memory waits for the copy."""
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
        """Begin to fill the storage; `arrive` before anything reads it."""
        self._follow()  # what was in this memory before may still be read
        with torch.cuda.stream(self._stream):
            storage.copy_(host, non_blocking=True)

    def arrive(self) -> None:
        """From here on the GPU computes with what was brought."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def end(self) -> torch.cuda.Event:
        """Of all copies that were asked for."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
