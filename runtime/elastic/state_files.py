"""Weights and moments of layers as files, written by one process and read by any."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from runtime.elastic.moves import Holdings

PLACES = ("weight", "first_moment", "second_moment")


def write_state(folder: Path, held: Holdings) -> None:
    """A folder in the format of torch's distributed checkpoints, from this process alone."""
    with _alone():
        save(_by_key(held), storage_writer=FileSystemWriter(folder), no_dist=True)


def read_state(folder: Path, empty: Holdings) -> None:
    """Fill tensors from the folders in `folder`, each layer from the one that has it.

    Raises:
        ValueError: a layer that none of them has.
    """
    missing = _by_key(empty)
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        reader = FileSystemReader(part)
        keys = reader.read_metadata().state_dict_metadata.keys() & missing.keys()
        here = {key: missing.pop(key) for key in sorted(keys)}
        with _alone():
            load(here, storage_reader=reader, no_dist=True)
    if missing:
        raise ValueError(f"{folder}: {min(missing)} is in none of its parts")


@contextmanager
def _alone() -> Iterator[None]:
    """torch warns whoever saves or loads by himself that he does so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _by_key(held: Holdings) -> dict[str, Tensor]:
    return dict(_keyed(held))


def _keyed(held: Holdings) -> Iterator[tuple[str, Tensor]]:
    for (module, layer), state in held.items():
        for name, kept in state.items():
            for place, tensor in zip(PLACES, kept.tensors(), strict=False):
                yield f"{module}/{layer}/{name}/{place}", tensor
