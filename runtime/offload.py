"""Takes a stage's weights and optimizer state to the host and brings them back, in place."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from runtime.stage_module import StageModule

Storage = torch.UntypedStorage


class Offload:
    """What some stages of a rank have on the host.

    Storages are emptied and filled again, so that all tensors on them, those that autograd keeps for the
    backward included, are whole again afterwards. On a CPU the copies lie in the same memory as before.

    Args:
        modules: stage id -> module, of all stages of the rank.
    """

    def __init__(self, modules: Mapping[int, StageModule]) -> None:
        self._modules = modules
        self._away: dict[int, list[tuple[Storage, Storage]]] = {}

    def leave(self, stage: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Free the stage's tensors on the device.

        Raises:
            ValueError: memory that other tensors use too.
        """
        moved: list[tuple[Storage, Storage]] = []
        for storage in self._storages(stage, optimizer):
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
            host.copy_(storage)
            moved.append((storage, host))
        for storage, _ in moved:
            storage.resize_(0)
        self._away[stage] = moved

    def come_back(self, stage: int) -> None:
        """Fill the stage's tensors again."""
        for storage, host in self._away.pop(stage):
            storage.resize_(host.nbytes())
            storage.copy_(host)

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
