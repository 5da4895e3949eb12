"""Weights in Hugging Face folders: one folder per module, config.json beside safetensors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.models.adapter import Adapter
from runtime.models.stored_tensors import Pieces, Stored, located, names_of
from workbench.bounded_file import entry_in
from workbench.model.checkpoint import INDEX, SINGLE, composite_of, weight_map
from workbench.model.composites.composite import (
    Parts,
    name_in_composite,
    names_in_files,
    spellings,
    starts_in_files,
)
from workbench.model.families.tiles import NEWLINE
from workbench.model.item_tokens import packs_tiles
from workbench.model.lora import is_of_adapter
from workbench.plain_text import some


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads single tensors of one module. Files are opened only for requested tensors.

    Args:
        module: its name.
        folder: of its weights.
        stored: own name of a tensor -> its location.
    """

    module: str
    folder: Path
    stored: Mapping[str, Stored | Pieces]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, on the CPU, in its stored type.

        Raises:
            ValueError: it is missing or has another shape.
        """
        stored = self.stored.get(name)
        if stored is None:
            raise ValueError(f"module {self.module!r}: {self.folder} lacks tensor {name!r}")
        if isinstance(stored, Stored):
            return self._checked(stored, shape)
        _, rows, columns = shape
        experts = []
        for parts in stored:
            part_shape = (rows // len(parts), columns)
            experts.append(torch.cat([self._checked(part, part_shape) for part in parts]))
        return torch.stack(experts)

    def _checked(self, stored: Stored, shape: tuple[int, ...]) -> Tensor:
        try:
            with safe_open(stored.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(stored.name)
        except SafetensorError as error:
            raise ValueError(f"module {self.module!r}: {stored.file}: {error}") from None
        if stored.is_transposed:
            tensor = tensor.mT.contiguous()
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"module {self.module!r}: tensor {stored.name!r} in {self.folder} has shape "
                f"{tuple(tensor.shape)}, want {shape}"
            )
        return tensor


def weights_of(folder: Path, adapter: Adapter) -> WeightReader:
    """Reader of a module's weights in `FOLDER/<module>/`, or in a composite model's checkpoint in FOLDER.

    A folder of a module holds `model.safetensors`, or shards and `model.safetensors.index.json`. A
    projector's tensors are in its encoder's folder, under "projector.".

    Raises:
        ValueError: no such folder, or tensors that neither the module nor the list of known unused ones
            contains.
    """
    composite = composite_of(folder)
    if composite is None:
        return _of_module(folder / adapter.module.name, adapter)
    return _of_composite(folder, composite, adapter)


def _of_module(folder: Path, adapter: Adapter) -> WeightReader:
    module, file_of = adapter.module.name, files_of(folder, adapter.module.name)

    def place(own: str) -> Stored | None:
        name = next((each for each in adapter.spellings(own) if each in file_of), None)
        return None if name is None else Stored(name, file_of[name])

    known = {*adapter.stored_shapes(), *adapter.aliases}
    stored = located(adapter, known, place)
    used = names_of(stored)
    extra = []
    for name in file_of.keys() - used:
        bare = [name[len(prefix) :] for prefix in adapter.prefixes if name.startswith(prefix)]
        if not any(bare_name in known or bare_name.startswith(adapter.ignored) for bare_name in bare):
            extra.append(name)
    _refuse_unexpected(adapter, folder, extra, stored)
    return WeightReader(module, folder, stored)


def _of_composite(folder: Path, parts: Parts, adapter: Adapter) -> WeightReader:
    """Reader in a composite's checkpoint; tensors with this module's prefix are its own, or known unused."""
    module, file_of = adapter.module.name, files_of(folder, adapter.module.name)
    if module not in parts.modules:
        raise ValueError(
            f"module {module!r}: {folder} is a checkpoint of {', '.join(parts.modules)}; want modules of "
            "these names"
        )
    stored = stored_in(parts, adapter, file_of, (*adapter.stored_shapes(), *adapter.aliases))
    own = tuple(starts_in_files(parts.modules[module]))
    others = tuple(
        start for name, part in parts.modules.items() if name != module for start in starts_in_files(part)
    )
    left_out = [each.weights for each in parts.dropped]
    prefixes = tuple(parts.modules[module].weights)
    ignored = (start for start in adapter.ignored if start.startswith(prefixes))
    left_out += [name_in_composite(parts.modules[module], start) for start in ignored]
    if not packs_tiles(adapter.module):
        left_out.append(f"model.{NEWLINE}")  # of a job whose images are single tiles
    dropped = tuple(start for each in left_out for start in spellings(each))
    extra = [
        name
        for name in file_of.keys() - names_of(stored)
        if name.startswith(own)
        and not name.startswith(dropped)
        and _longest(name, own) > _longest(name, others)
    ]
    _refuse_unexpected(adapter, folder, extra, stored)
    return WeightReader(module, folder, stored)


def stored_in(
    parts: Parts, adapter: Adapter, file_of: Mapping[str, Path], names: Collection[str]
) -> dict[str, Stored | Pieces]:
    """Locations of a module's tensors in a composite's checkpoint, under any of their spellings."""
    part = parts.modules[adapter.module.name]

    def place(own: str) -> Stored | None:
        name = next((each for each in names_in_files(part, own) if each in file_of), None)
        return None if name is None else Stored(name, file_of[name], own in part.transposed)

    return located(adapter, names, place)


def _longest(name: str, starts: Collection[str]) -> int:
    return max((len(start) for start in starts if name.startswith(start)), default=0)


def _refuse_unexpected(
    adapter: Adapter, folder: Path, extra: Collection[str], stored: Mapping[str, Stored | Pieces]
) -> None:
    if not extra:
        return
    own = [name for name in adapter.stored_shapes() if not is_of_adapter(name)]
    lacking = [name for name in own if name not in stored]
    also = f", and lacks {len(lacking):,} of the {len(own):,} of this module" if lacking else ""
    raise ValueError(
        f"module {adapter.module.name!r}: {folder} has unexpected tensors {some(extra)}{also}; "
        "want weights of this model"
    )


def files_of(folder: Path, module: str) -> dict[str, Path]:
    """Tensor name -> its file, in a folder of weights; ValueError names the module where it has none."""
    try:
        if (folder / INDEX).is_file():
            placed = weight_map(folder)
            files = {file: entry_in(folder, file) for file in dict.fromkeys(placed.values())}
            return {name: files[file] for name, file in placed.items()}
        single = folder / SINGLE
        if not single.is_file():
            raise ValueError(f"module {module!r}: {folder} has neither {SINGLE} nor {INDEX}")
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ValueError(f"module {module!r}: {folder} is not readable as safetensors: {error}") from None
