"""Locations of a module's tensors in files: as they are here, transposed, or experts one by one."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.models.adapter import Adapter
from runtime.models.mixture import EXPERTS


class Stored(NamedTuple):
    """Location of a tensor: its name and file, and whether it is stored as [..., in, out]."""

    name: str
    file: Path
    is_transposed: bool = False


Pieces = tuple[tuple[Stored, ...], ...]
"""[experts, parts] where a tensor of experts lies piece by piece, parts of one above each other."""


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of safetensors; ValueError names it where it cannot be written, such as on a full disk."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ValueError(f"{path}: cannot be written: {error}") from None


def located(
    adapter: Adapter, names: Collection[str], find: Callable[[str], Stored | None]
) -> dict[str, Stored | Pieces]:
    """Own name -> location, of the tensors that exist.

    Experts that may be stored as [experts, in, out] count as such if the shape says so; where both shapes are
    equal they are taken as they are, as in transformers.

    Raises:
        ValueError: only some experts of a tensor exist, or a file lacks a tensor of its index.
    """
    stored: dict[str, Stored | Pieces] = {}
    separate = adapter.separate_experts
    is_turned = adapter.transposes_experts
    shapes = {} if separate is None and not is_turned else adapter.shapes()  # every layer is built for it
    for own in names:
        whole = find(own)
        if whole is None and separate is not None:
            whole = find(separate.renamed(own))
        if whole is not None:
            is_experts = is_turned and f".{EXPERTS}." in own
            stored[own] = _turned(whole, shapes[own]) if is_experts else whole
        elif separate is not None and own in shapes:
            wanted = separate.pieces(own, shapes[own][0])
            pieces = [[(name, find(name)) for name in parts] for parts in wanted]
            missing = [name for parts in pieces for name, piece in parts if piece is None]
            if missing and len(missing) < sum(map(len, pieces)):
                raise ValueError(f"module {adapter.module.name!r}: tensor {missing[0]!r} is missing")
            if pieces and not missing:
                stored[own] = tuple(tuple(piece for _, piece in parts if piece) for parts in pieces)
    return stored


def _turned(stored: Stored, shape: tuple[int, ...]) -> Stored:
    """The location, with its orientation, from the shape that the tensor has here."""
    try:
        with safe_open(stored.file, framework="pt") as file:
            stored_shape = tuple(file.get_slice(stored.name).get_shape())
    except SafetensorError as error:
        raise ValueError(f"{stored.file}: {error}") from None
    *experts, rows, columns = shape
    return stored._replace(is_transposed=stored_shape != shape and stored_shape == (*experts, columns, rows))


def names_of(stored: Mapping[str, Stored | Pieces]) -> set[str]:
    """Names in the files of all located tensors."""
    names: set[str] = set()
    for entry in stored.values():
        pieces: Pieces = ((entry,),) if isinstance(entry, Stored) else entry
        names.update(piece.name for parts in pieces for piece in parts)
    return names


def as_stored(tensor: Tensor, stored: Stored | Pieces) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of what a checkpoint stores in place of one of our tensors."""
    if isinstance(stored, Stored):
        yield stored.name, tensor.mT.contiguous() if stored.is_transposed else tensor
        return
    for parts, expert in zip(stored, tensor.unbind(0), strict=True):
        for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
            yield part.name, piece.contiguous()
