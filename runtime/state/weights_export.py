"""Exports of trained weights: ranks write parts, which one process turns into Hugging Face folders."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from runtime.models.adapter_files import by_file, check_origin, finish_adapters
from runtime.models.choose import adapter_of
from runtime.models.stored_tensors import as_stored, write_tensors
from runtime.models.weights import files_of, stored_in
from workbench.model.checkpoint import CONFIG, INDEX, SINGLE, composite_of
from workbench.model.composites.composite import Parts
from workbench.model.hf_config import read_config
from workbench.model.model_graph import ModelGraph, Module

DTYPE_KEYS = ("dtype", "torch_dtype")  # in newer and older releases of transformers


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

    Raises:
        ValueError: the export has failed elsewhere, so its folder of parts is gone and stays so.
    """
    parts = part_folder(target)
    try:
        for kind, named in by_file(weights).items():
            (parts / module).mkdir(exist_ok=True)
            tensors = {name: weight.detach().cpu().contiguous() for name, weight in named.items()}
            _write_readable(tensors, parts / module / f"{kind}-{first_layer:05d}.safetensors")
    except (OSError, ValueError):
        if parts.is_dir():
            raise
        raise ValueError(f"{parts} is gone, as the export has failed on another rank") from None


def _write_readable(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write atomically, with the permissions of any new file: safetensors' are for their owner alone."""
    unfinished = path.with_suffix(".tmp")
    path.touch()
    write_tensors(tensors, unfinished)
    unfinished.chmod(path.stat().st_mode)
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
        _drop(part_folder(target))
        raise


def _drop(parts: Path) -> None:
    """Delete parts; renamed first, so that a rank that is still writing one cannot bring them back."""
    aside = parts.with_name(f".{parts.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        parts.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


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
    file_of = files_of(origin, origin.name)
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
