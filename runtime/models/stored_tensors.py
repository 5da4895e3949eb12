"""Where files hold the tensors of a module: as they are here, turned round, or experts one by one."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.models.adapter import Adapter
from runtime.models.mixture import EXPERTS


class Stored(NamedTuple):
    """Where a tensor lies: its name in a file, and whether it is held as [..., in, out]."""

    name: str
    file: Path
    is_transposed: bool = False


Pieces = tuple[tuple[Stored, ...], ...]
"""[experts, parts] where a tensor of experts lies piece by piece, parts of one above each other."""


def located(
    adapter: Adapter, names: Collection[str], place: Callable[[str], Stored | None]
) -> dict[str, Stored | Pieces]:
    """By own name, where those tensors lie that are there.

    Experts that may be held as [experts, in, out] are, where the shape says so; where it is the same either
    way they are taken as they lie, as transformers takes them.

    Raises:
        ValueError: of a tensor of experts, some are there and some are not, or a file that has not what its
            index says.
    """
    found: dict[str, Stored | Pieces] = {}
    separate = adapter.separate_experts
    is_turned = adapter.transposes_experts
    shapes = {} if separate is None and not is_turned else adapter.shapes()  # every layer is built for it
    for own in names:
        whole = place(own)
        if whole is None and separate is not None:
            whole = place(separate.renamed(own))
        if whole is not None:
            is_experts = is_turned and f".{EXPERTS}." in own
            found[own] = _turned(whole, shapes[own]) if is_experts else whole
        elif separate is not None and own in shapes:
            wanted = separate.pieces(own, shapes[own][0])
            pieces = [[(name, place(name)) for name in parts] for parts in wanted]
            missing = [name for parts in pieces for name, piece in parts if piece is None]
            if missing and len(missing) < sum(map(len, pieces)):
                raise ValueError(f"module {adapter.module.name!r}: tensor {missing[0]!r} is missing")
            if pieces and not missing:
                found[own] = tuple(tuple(piece for _, piece in parts if piece) for parts in pieces)
    return found


def _turned(stored: Stored, shape: tuple[int, ...]) -> Stored:
    """As it lies, given the shape that it has here."""
    try:
        with safe_open(stored.file, framework="pt") as file:
            held = tuple(file.get_slice(stored.name).get_shape())
    except SafetensorError as error:
        raise ValueError(f"{stored.file}: {error}") from None
    *experts, rows, columns = shape
    return stored._replace(is_transposed=held != shape and held == (*experts, columns, rows))


def names_of(stored: Mapping[str, Stored | Pieces]) -> set[str]:
    """Of all that was found, in the files."""
    found: set[str] = set()
    for each in stored.values():
        pieces: Pieces = ((each,),) if isinstance(each, Stored) else each
        found.update(piece.name for parts in pieces for piece in parts)
    return found


def as_stored(tensor: Tensor, stored: Stored | Pieces) -> Iterator[tuple[str, Tensor]]:
    """By their names in a checkpoint, the tensors that it holds in place of one of ours."""
    if isinstance(stored, Stored):
        yield stored.name, tensor.mT.contiguous() if stored.is_transposed else tensor
        return
    for parts, expert in zip(stored, tensor.unbind(0), strict=True):
        for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
            yield part.name, piece.contiguous()
