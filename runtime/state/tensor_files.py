"""Named tensors as a folder in the format of torch's distributed checkpoints, written by one process."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """A new folder; what is written is on the disk when this returns."""
    with _alone():
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place.

    Raises:
        ValueError: one that the folder does not have, or has in another shape.
    """
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    for key, tensor in tensors.items():
        found = known.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"{folder} has no tensor {key!r}")
        if found.size != tensor.shape:
            raise ValueError(f"{folder}: {key!r} is {list(found.size)}, want {list(tensor.shape)}")
    with _alone():
        load(dict(tensors), storage_reader=reader, no_dist=True)


def keys_in(folder: Path) -> frozenset[str]:
    """Names of the tensors of a folder."""
    return frozenset(FileSystemReader(folder).read_metadata().state_dict_metadata)


@contextmanager
def _alone() -> Iterator[None]:
    """torch warns whoever saves or loads by himself that he does so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
