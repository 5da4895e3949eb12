"""Weights in Hugging Face folders: one folder per module, config.json beside safetensors."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.models.adapter import Adapter
from runtime.models.choose import adapter_of
from workbench.bounded_file import entry_in, read_bounded
from workbench.model.model_graph import ModelGraph, Module

MOST_INDEX_BYTES = 2**27
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class WeightReader:
    """Reads single tensors of one module out of `FOLDER/<module>/`.

    The folder holds `model.safetensors`, or shards and `model.safetensors.index.json`. Files
    are opened only for the tensors asked for. A projector's tensors stand in its encoder's
    folder, under "projector.".

    Raises:
        ValueError: no such folder, or a tensor that neither the module nor the list of known
            unused ones explains. All of them are named.
    """

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        self.folder = folder
        self.module = adapter.module.name
        self._prefixes = adapter.prefixes
        self._file_of = _files(folder, self.module)
        known = {*adapter.shapes(), *adapter.aliases}
        extra = [name for name in self._file_of if not self._explained(name, known, adapter.ignored)]
        if extra:
            raise ValueError(
                f"module {self.module!r}: {folder} has unexpected tensors {', '.join(sorted(extra))}"
            )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, on the CPU, in the type it was stored in.

        Raises:
            ValueError: it is missing or has another shape.
        """
        stored = next((p + name for p in self._prefixes if p + name in self._file_of), None)
        if stored is None:
            raise ValueError(f"module {self.module!r}: {self.folder} lacks tensor {name!r}")
        with safe_open(self._file_of[stored], framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"module {self.module!r}: tensor {stored!r} in {self.folder} has shape "
                f"{tuple(tensor.shape)}, want {shape}"
            )
        return tensor

    def _explained(self, name: str, known: set[str], ignored: tuple[str, ...]) -> bool:
        bare = [name[len(prefix) :] for prefix in self._prefixes if name.startswith(prefix)]
        return any(b in known or b.startswith(ignored) for b in bare)


def _files(folder: Path, module: str) -> dict[str, Path]:
    """Tensor name -> file that holds it."""
    index = folder / INDEX
    try:
        if index.is_file():
            placed = json.loads(read_bounded(index, MOST_INDEX_BYTES))["weight_map"]
            files = {file: entry_in(folder, file) for file in dict.fromkeys(placed.values())}
            return {name: files[file] for name, file in placed.items()}
        single = folder / SINGLE
        if not single.is_file():
            raise ValueError(f"module {module!r}: {folder} has neither {SINGLE} nor {INDEX}")
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (
        SafetensorError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(f"module {module!r}: {folder} is not readable as safetensors: {error}") from None


def part_folder(target: Path) -> Path:
    """Where ranks put their parts of an export until it is complete."""
    return target.with_name(target.name + ".part")


def write_part(target: Path, module: str, first_layer: int, weights: Mapping[str, Tensor]) -> None:
    """Write one stage's weights. Every stage of one replica does, then one process finishes.

    Args:
        target: the folder that `finish_export` will make; parts go into a folder beside it.
        module: name of the module.
        first_layer: of the stage; shards are numbered in its order.
        weights: `StageModule.owned_weights()`.
    """
    if not weights:
        return
    folder = part_folder(target) / module
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stage-{first_layer:05d}.safetensors"
    held = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    unfinished = path.with_suffix(".tmp")
    path.touch()
    save_file(held, unfinished, metadata={"format": "pt"})
    unfinished.chmod(path.stat().st_mode)  # safetensors gives its files to their owner alone
    unfinished.replace(path)


def finish_export(target: Path, model: ModelGraph) -> None:
    """Turn the parts into Hugging Face folders, one per module; `target` appears at once or not at all.

    Raises:
        ValueError: `target` holds something, or the parts do not hold every weight of the model once.
    """
    refuse_taken(target)
    placed = [(module, *_placed(part_folder(target) / module.name, module)) for module in model.modules]
    for module, parts, names in placed:
        _finish_module(part_folder(target) / module.name, module, parts, names)
    part_folder(target).rename(target)


def start_export(target: Path) -> None:
    """Refuse a folder that holds something, and drop parts that an interrupted export left.

    One process calls it, before the others write. The folder for the parts is made here, so that
    a place where nothing can be written is refused before the work and not after it.
    """
    refuse_taken(target)
    if part_folder(target).exists():
        shutil.rmtree(part_folder(target))
    part_folder(target).mkdir(parents=True)


@contextmanager
def exporting(target: Path | None, model: ModelGraph) -> Iterator[None]:
    """Around the work that writes the parts: refuses before it, finishes after it.

    When the work fails its parts are dropped; None: nothing is exported.
    """
    if target is None:
        yield
        return
    start_export(target)
    try:
        yield
    except BaseException:
        shutil.rmtree(part_folder(target), ignore_errors=True)
        raise
    finish_export(target, model)


def refuse_taken(target: Path) -> None:
    """ValueError unless `target` can be made by a rename: it is new, or an empty folder."""
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        if target.is_mount():
            raise ValueError(f"export folder {target} is a mount point; give a new folder inside it")
        return
    if target.is_symlink() or target.exists():
        raise ValueError(f"export folder {target} exists already; give a new one")


def _placed(folder: Path, module: Module) -> tuple[list[Path], dict[str, int]]:
    """The parts in layer order, and tensor name -> number of the part that holds it."""
    parts = sorted(folder.glob("stage-*.safetensors"))
    names: dict[str, int] = {}
    for number, part in enumerate(parts):
        with safe_open(part, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in names:
                    raise ValueError(f"module {module.name!r}: two parts hold tensor {name!r}")
                names[name] = number
    missing = sorted(adapter_of(module).shapes().keys() - names.keys())
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
    with safe_open(folder / shards[0], framework="pt") as file:
        dtype = file.get_tensor(next(iter(file.keys()))).dtype
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tensor_bytes(file: Path) -> int:
    """What follows a safetensors file's header, whose length is its first eight bytes."""
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header_bytes


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
