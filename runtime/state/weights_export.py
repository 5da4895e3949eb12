"""Exports of trained weights: ranks write parts, which one process turns into Hugging Face folders."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.models.adapter_files import PREFIX, by_file, check_origin, finish_adapters
from runtime.models.choose import adapter_of
from runtime.models.stored_tensors import as_stored, write_tensors
from runtime.models.weights import files_of, stored_in
from runtime.state.save_folder import check_space, give_back, refuse_writer, take
from workbench.model.checkpoint import CONFIG, INDEX, SINGLE, composite_of
from workbench.model.composites.composite import Parts
from workbench.model.hf_config import read_config
from workbench.model.lora import is_of_adapter
from workbench.model.model_graph import ModelGraph, Module
from workbench.plain_text import some

WHOLE = ".whole"  # folder of a composite's checkpoint until it is complete
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

    A composite's checkpoint is written beside them, so that until it is complete they hold the weights.

    Args:
        origin: folder of the initial weights: if it is a composite's checkpoint, the target becomes one too.

    Raises:
        ValueError: `target` is not empty, or the parts do not have every weight of the model exactly once.
    """
    refuse_taken(target)
    parts = part_folder(target)
    shards = _finish_modules(parts, model)
    give_back(parts)
    composite = None if origin is None else composite_of(origin)
    if origin is None or composite is None:
        parts.rename(target)
        return
    _write_composite(parts / WHOLE, composite, origin, shards)
    (parts / WHOLE).rename(target)
    _drop(parts)


def check_export(target: Path, model: ModelGraph, origin: Path | None, dtype: torch.dtype) -> None:
    """Refuse an export before the work; nothing is created.

    Args:
        dtype: of the weights.

    Raises:
        ValueError: a folder that is not new, or that another run writes, too little space, adapters of a
            composite's checkpoint.
    """
    refuse_taken(target)
    refuse_writer(part_folder(target))
    num_bytes = model.num_parameters * dtype.itemsize
    if origin is not None and composite_of(origin) is not None:
        check_origin(model.modules, str(origin))
        num_bytes *= 2  # the parts, and the checkpoint that is made of them
    check_space(target, num_bytes)


def start_export(target: Path, model: ModelGraph) -> None:
    """Refuse a folder that is not empty, and delete parts of an interrupted export, or keep complete ones.

    One process calls it before the others write. The folder for the parts is created here, so that an
    unwritable location is refused before the work, and is that process's own until the export ends.

    Raises:
        ValueError: `target` is taken, or another process's parts are being written.
    """
    parts = part_folder(target)
    if parts.exists():
        take(parts)
        _keep_or_drop(target, model)
    refuse_taken(target)
    take(parts)


@contextmanager
def exporting(
    target: Path | None, model: ModelGraph, origin: Path | None = None, *, dtype: torch.dtype
) -> Iterator[None]:
    """Context of the work that writes the parts: starts the export before it, finishes it after.

    When the work fails, or what follows it, parts that hold all weights are kept, and others deleted.

    Args:
        target: None: nothing is exported.
        dtype: of the weights.
    """
    if target is None:
        yield
        return
    check_export(target, model, origin, dtype)
    start_export(target, model)
    try:
        yield
        finish_export(target, model, origin)
    except BaseException:
        _keep_or_drop(target, model)
        raise


def kept_folder(target: Path) -> Path:
    """Folder of the trained weights of a failed export."""
    return target.with_name(target.name + ".trained")


def _keep_or_drop(target: Path, model: ModelGraph) -> None:
    """After a failure: keep the parts, with a line on standard error, if they hold all weights."""
    parts, kept = part_folder(target), kept_folder(target)
    shutil.rmtree(parts / WHOLE, ignore_errors=True)
    if not all(_holds_all(parts / module.name, module) for module in model.modules):
        _drop(parts)
        return
    with suppress(OSError, ValueError):
        _finish_modules(parts, model)  # where what failed came before
    give_back(parts)
    parts.rename(kept)
    is_read = all((kept / module.name / CONFIG).is_file() for module in model.modules)
    form = "--weights reads them" if is_read else "each stage is a file of safetensors"
    sys.stderr.write(f"{kept}: all weights as trained are kept here, as {target} was not completed; {form}\n")


def _holds_all(folder: Path, module: Module) -> bool:
    """Whether the files of a module, in whatever state of the export, have all of its weights."""
    adapter = adapter_of(module)
    wanted = {*by_file(adapter.stored_shapes())["stage"], *filter(is_of_adapter, adapter.shapes())}
    for path in folder.rglob("*.safetensors"):
        with suppress(SafetensorError), safe_open(path, framework="pt") as file:
            wanted -= {name.removeprefix(PREFIX) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    return not wanted


def _drop(parts: Path) -> None:
    """Delete parts; renamed first, so that a rank that is still writing one cannot bring them back."""
    aside = parts.with_name(f".{parts.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        parts.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def refuse_taken(target: Path) -> None:
    """Raise ValueError unless `target` is new or an empty folder, so that a rename can create it.

    Neither may an earlier export have failed there: what is kept of it is not mixed with what is new.
    """
    if (kept := kept_folder(target)).exists():
        raise ValueError(
            f"export folder {target}: {kept} holds the weights of an earlier run; move it, or give a new one"
        )
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        if target.is_mount():
            raise ValueError(f"export folder {target} is a mount point; give a new folder inside it")
        return
    if target.is_symlink() or target.exists():
        raise ValueError(f"export folder {target} exists already; give a new one")


def _finish_modules(parts: Path, model: ModelGraph) -> list[tuple[Module, list[Path]]]:
    """Turn the parts into a folder for each module; returns its shards, in layer order."""
    placed = [(module, *_placed(parts / module.name, module)) for module in model.modules]
    return [
        (module, _finish_module(parts / module.name, module, files, names)) for module, files, names in placed
    ]


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
        raise ValueError(f"module {module.name!r}: no part holds tensors {some(missing)}")
    return parts, names


def _finish_module(folder: Path, module: Module, parts: list[Path], names: dict[str, int]) -> list[Path]:
    """Turn the parts of a module into its folder; returns the shards, in layer order."""
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
    return [folder / shard for shard in shards]


def _write_composite(
    folder: Path, composite: Parts, origin: Path, modules: Sequence[tuple[Module, Sequence[Path]]]
) -> None:
    """Write the modules' shards by the names of the original checkpoint, and one with tensors of no module.

    One shard is in memory at a time.
    """
    file_of = files_of(origin, origin.name)
    shards = [(module, shard) for module, files in modules for shard in files]
    count = len(shards) + 1
    shard_of: dict[str, str] = {}
    folder.mkdir()
    for number, (module, shard) in enumerate(shards):
        renamed = _as_origin_has(composite, origin, file_of, module, shard)
        write_tensors(renamed, folder / _shard_name(number, count))
        shard_of |= dict.fromkeys(renamed, _shard_name(number, count))
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


def _as_origin_has(
    composite: Parts, origin: Path, file_of: Mapping[str, Path], module: Module, shard: Path
) -> dict[str, Tensor]:
    """A stage's weights by their names in a composite's checkpoint; a tied one under all of its names."""
    with safe_open(shard, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    adapter = adapter_of(module)
    tied = {alias: tensors[name].clone() for alias, name in adapter.aliases.items() if name in tensors}
    located_tensors = stored_in(composite, adapter, file_of, (*tensors, *tied))
    missing = sorted(tensors.keys() - located_tensors.keys())
    if missing:
        raise ValueError(f"module {module.name!r}: {origin} has no tensors {some(missing)} to write back")
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
