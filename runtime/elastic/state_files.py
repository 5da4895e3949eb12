"""Weights and moments of layers as files, written by one process and read by any."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from runtime.elastic.moves import Holdings
from runtime.state.tensor_files import keys_in, read_tensors, write_tensors

PLACES = ("weight", "first_moment", "second_moment")


def write_state(folder: Path, held: Holdings) -> None:
    """A folder with these layers."""
    write_tensors(folder, dict(_keyed(held)))


def read_state(folder: Path, empty: Holdings) -> None:
    """Fill tensors from the folders in `folder`, each layer from the one that has it.

    Raises:
        ValueError: a layer that none of them has.
    """
    missing = dict(_keyed(empty))
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        if keys := sorted(keys_in(part) & missing.keys()):
            read_tensors(part, {key: missing.pop(key) for key in keys})
    if missing:
        raise ValueError(f"{folder}: {min(missing)} is in none of its parts")


def _keyed(held: Holdings) -> Iterator[tuple[str, Tensor]]:
    for (module, layer), state in held.items():
        for name, kept in state.items():
            for place, tensor in zip(PLACES, kept.tensors(), strict=False):
                yield f"{module}/{layer}/{name}/{place}", tensor
