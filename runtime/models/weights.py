"""Weights in Hugging Face folders: one folder per module, config.json beside safetensors."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.models.adapter import Adapter
from runtime.models.adapter_files import by_file, check_origin, finish_adapters
from runtime.models.choose import adapter_of
from runtime.models.stored_tensors import Pieces, Stored, as_stored, located, names_of, write_tensors
from workbench.bounded_file import entry_in
from workbench.model.checkpoint import CONFIG, INDEX, SINGLE, composite_of, weight_map
from workbench.model.composites.composite import (
    Parts,
    name_in_composite,
    names_in_files,
    spellings,
    starts_in_files,
)
from workbench.model.families.tiles import NEWLINE
from workbench.model.hf_config import read_config
from workbench.model.item_tokens import packs_tiles
from workbench.model.model_graph import ModelGraph, Module

DTYPE_KEYS = ("dtype", "torch_dtype")  # in newer and older releases of transformers


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
            contains. All of them are named.
    """
    composite = composite_of(folder)
    if composite is None:
        return _of_module(folder / adapter.module.name, adapter)
    return _of_composite(folder, composite, adapter)


def _of_module(folder: Path, adapter: Adapter) -> WeightReader:
    module, file_of = adapter.module.name, _files(folder, adapter.module.name)

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
    _refuse_unexpected(module, folder, extra)
    return WeightReader(module, folder, stored)


def _of_composite(folder: Path, parts: Parts, adapter: Adapter) -> WeightReader:
    """Reader in a composite's checkpoint; tensors with this module's prefix are its own, or known unused."""
    module, file_of = adapter.module.name, _files(folder, adapter.module.name)
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
    _refuse_unexpected(module, folder, extra)
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


def _refuse_unexpected(module: str, folder: Path, extra: Sequence[str]) -> None:
    if extra:
        raise ValueError(f"module {module!r}: {folder} has unexpected tensors {', '.join(sorted(extra))}")


def _files(folder: Path, module: str) -> dict[str, Path]:
    """Tensor name -> its file."""
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


def part_folder(target: Path) -> Path:
    """Folder of the ranks' parts of an export until it is complete."""
    return target.with_name(target.name + ".part")


def write_part(target: Path, module: str, first_layer: int, weights: Mapping[str, Tensor]) -> None:
    """Write one stage's weights. Every stage of one replica does so, then one process finishes.

    Args:
        target: the folder that `finish_export` will create; parts go into a folder next to it.
        module: name of the module.
        first_layer: of the stage; shards are numbered in its order.
        weights: `StageModule.owned_weights()`.
    """
    folder = part_folder(target) / module
    for kind, named in by_file(weights).items():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{kind}-{first_layer:05d}.safetensors"
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in named.items()}
        unfinished = path.with_suffix(".tmp")
        path.touch()
        write_tensors(tensors, unfinished)
        unfinished.chmod(path.stat().st_mode)  # safetensors makes files readable only by their owner
        unfinished.replace(path)


def finish_export(target: Path, model: ModelGraph, origin: Path | None = None) -> None:
    """Turn the parts into Hugging Face folders, one per module; `target` appears atomically.

    Args:
        origin: folder of the initial weights: if it is a composite's checkpoint, the target becomes one too.

    Raises:
        ValueError: `target` is not empty, or the parts do not have every weight of the model exactly once.
    """
    refuse_taken(target)
    placed = [(module, *_placed(part_folder(target) / module.name, module)) for module in model.modules]
    composite = None if origin is None else composite_of(origin)
    if origin is not None and composite is not None:
        _finish_composite(part_folder(target), composite, origin, [(m, p) for m, p, _ in placed])
    else:
        for module, parts, names in placed:
            _finish_module(part_folder(target) / module.name, module, parts, names)
    part_folder(target).rename(target)


def start_export(target: Path) -> None:
    """Refuse a folder that is not empty, and delete parts of an interrupted export.

    One process calls it before the others write. The folder for the parts is created here, so that an
    unwritable location is refused before the work.
    """
    refuse_taken(target)
    if part_folder(target).exists():
        shutil.rmtree(part_folder(target))
    part_folder(target).mkdir(parents=True)


@contextmanager
def exporting(target: Path | None, model: ModelGraph, origin: Path | None = None) -> Iterator[None]:
    """Context of the work that writes the parts: starts the export before it, finishes it after.

    When the work fails, or what follows it, the parts are deleted; target None: nothing is exported.
    """
    if target is None:
        yield
        return
    if origin is not None and composite_of(origin) is not None:
        check_origin(model.modules, str(origin))
    start_export(target)
    try:
        yield
        finish_export(target, model, origin)
    except BaseException:
        shutil.rmtree(part_folder(target), ignore_errors=True)
        raise


def refuse_taken(target: Path) -> None:
    """Raise ValueError unless `target` is new or an empty folder, so that a rename can create it."""
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        if target.is_mount():
            raise ValueError(f"export folder {target} is a mount point; give a new folder inside it")
        return
    if target.is_symlink() or target.exists():
        raise ValueError(f"export folder {target} exists already; give a new one")


def _placed(folder: Path, module: Module) -> tuple[list[Path], dict[str, int]]:
    """The parts in layer order, and tensor name -> number of its part."""
    parts = sorted(folder.glob("stage-*.safetensors"))
    names: dict[str, int] = {}
    for number, part in enumerate(parts):
        with safe_open(part, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in names:
                    raise ValueError(f"module {module.name!r}: two parts hold tensor {name!r}")
                names[name] = number
    missing = sorted(by_file(adapter_of(module).stored_shapes())["stage"].keys() - names.keys())
    if missing:
        raise ValueError(f"module {module.name!r}: no part holds tensors {', '.join(missing)}")
    return parts, names


def _finish_module(folder: Path, module: Module, parts: list[Path], names: dict[str, int]) -> None:
    shards = [SINGLE] if len(parts) == 1 else [_shard_name(i, len(parts)) for i in range(len(parts))]
    for part, shard in zip(parts, shards, strict=True):
        part.rename(folder / shard)
    if len(parts) > 1:
        size = sum(_tensor_bytes(folder / shard) for shard in shards)
        index = {
            "metadata": {"total_size": size},
            "weight_map": {name: shards[number] for name, number in sorted(names.items())},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    assert module.source is not None, "adapter_of has refused modules without a source"
    config = json.loads(module.source.config) | {"model_type": module.source.architecture}
    config["dtype"] = _dtype_of(folder / shards[0])
    finish_adapters(folder, adapter_of(module))
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _finish_composite(
    folder: Path, composite: Parts, origin: Path, parts: Sequence[tuple[Module, Sequence[Path]]]
) -> None:
    """Write shards with the names of the original checkpoint, and one with tensors of no module.

    One shard is in memory at a time.
    """
    file_of = _files(origin, origin.name)
    shards = [(module, part) for module, files in parts for part in files]
    count = len(shards) + 1
    shard_of: dict[str, str] = {}
    for number, (module, part) in enumerate(shards):
        renamed = _as_origin_has(composite, origin, file_of, module, part)
        write_tensors(renamed, folder / _shard_name(number, count))
        shard_of |= dict.fromkeys(renamed, _shard_name(number, count))
        part.unlink()
    untouched: dict[str, Tensor] = {}
    for name in file_of.keys() - shard_of.keys():
        with safe_open(file_of[name], framework="pt") as file:
            untouched[name] = file.get_tensor(name)
    write_tensors(untouched, folder / _shard_name(count - 1, count))
    shard_of |= dict.fromkeys(untouched, _shard_name(count - 1, count))
    size = sum(_tensor_bytes(folder / shard) for shard in set(shard_of.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(shard_of.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = with_dtype(read_config(origin), _dtype_of(folder / _shard_name(0, count)))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for module, _ in parts:
        (folder / module.name).rmdir()


def _as_origin_has(
    composite: Parts, origin: Path, file_of: Mapping[str, Path], module: Module, part: Path
) -> dict[str, Tensor]:
    """A stage's weights by their names in a composite's checkpoint; a tied one under all of its names."""
    with safe_open(part, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    adapter = adapter_of(module)
    tied = {alias: tensors[name].clone() for alias, name in adapter.aliases.items() if name in tensors}
    located_tensors = stored_in(composite, adapter, file_of, (*tensors, *tied))
    missing = sorted(tensors.keys() - located_tensors.keys())
    if missing:
        raise ValueError(
            f"module {module.name!r}: {origin} has no tensors {', '.join(missing)} to write back"
        )
    tensors |= tied
    return {
        name: stored_tensor
        for own_name, stored in located_tensors.items()
        for name, stored_tensor in as_stored(tensors[own_name], stored)
    }


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A composite's configuration with the type in which its weights were written.

    Nested configurations with the same type as the whole change too; others keep theirs.
    """
    had = tuple(config[key] for key in DTYPE_KEYS if key in config)
    return {**_renamed(config, had, dtype), **({} if had else {"dtype": dtype})}


def _renamed(config: Any, had: tuple[Any, ...], dtype: str) -> Any:
    if isinstance(config, list):
        return [_renamed(each, had, dtype) for each in config]
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in DTYPE_KEYS and value in had else _renamed(value, had, dtype)
        for key, value in config.items()
    }


def _dtype_of(file: Path) -> str:
    """Type of a stage's weights, all of one, as configurations name it."""
    with safe_open(file, framework="pt") as opened:
        return str(opened.get_tensor(next(iter(opened.keys()))).dtype).removeprefix("torch.")


def _tensor_bytes(file: Path) -> int:
    """Bytes after a safetensors file's header, whose length is in the first eight bytes."""
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header_bytes


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
