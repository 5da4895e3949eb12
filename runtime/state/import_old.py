"""Imports saves of the previous format, torch's distributed checkpoints, whose reading may execute code."""

import json
import random
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from runtime.state.checkpoint_files import (
    OLD_TENSORS,
    STAMP,
    Identity,
    finish,
    finished,
    part_folder,
    rank_folder,
)
from runtime.state.rank_state import RankNotes, notes_from
from runtime.state.tensor_files import (
    CHUNK_BYTES,
    OLD_METADATA,
    TornError,
    manifest_sha256,
    read_stamp,
    write_tensors,
)
from workbench.whole_file import write_text

OLD_RANK_STAMP = "rank.json"
OLD_PROGRESS = "progress.json"  # of elastic training
FINISH_S = 60.0


def import_old(old: Path, new: Path) -> tuple[Path, ...]:
    """Convert a folder of the previous format into a new folder of the current one.

    Only for folders from trusted writers: torch's distributed checkpoints contain pickles, which can execute
    code.

    Args:
        old: a run's folder of checkpoints, or one save of elastic training.
        new: folder to create.

    Returns:
        The saves in the new folder.

    Raises:
        ValueError: nothing of the previous format, or a torn save; `new` is not empty.
    """
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise ValueError(f"{new} is not empty; want a new folder")
    if (old / OLD_PROGRESS).is_file():
        return (_import_progress(old, new),)
    steps = [folder for folder in finished(old) if list(folder.glob(f"rank-*/{OLD_TENSORS}/{OLD_METADATA}"))]
    if not steps:
        raise ValueError(f"{old}: no save of the earlier format in it")
    return tuple(_import_step(folder, new) for folder in steps)


def _import_step(old: Path, new: Path) -> Path:
    match read_stamp(old / STAMP):
        case {
            "step": int(step),
            "plan": str(plan),
            "dtype": str(dtype),
            "seed": int(seed),
            "ranks": list(ranks),
        }:
            identity = Identity(plan_hash=plan, dtype=dtype, seed=seed, ranks=tuple(ranks))
        case _:
            raise TornError(f"{old / STAMP} has no step, plan, dtype, seed or ranks")
    for rank in identity.ranks:
        source = rank_folder(old, rank)
        stamp = json.loads((source / OLD_RANK_STAMP).read_text(encoding="utf-8"))
        _check_sums(source / OLD_TENSORS, stamp["files"])
        notes = _notes(stamp["about"])
        notes_from(notes, where=source)
        write_tensors(rank_folder(part_folder(new, step), rank), _tensors(source / OLD_TENSORS), notes)
    return finish(new, step, identity, FINISH_S)


def _notes(about: Mapping[str, Any]) -> dict[str, Any]:
    version, words, gauss = about["python_random"]
    random.Random().setstate((version, tuple(words), gauss))
    losses = tuple(map(float, about["losses"]))
    return RankNotes(losses=losses, python_random=(version, tuple(words), gauss)).as_json()


def _import_progress(old: Path, new: Path) -> Path:
    stamp = read_stamp(old / OLD_PROGRESS)
    parts = sorted(path.parent for path in old.glob(f"part*/{OLD_METADATA}"))
    if not parts:
        raise ValueError(f"{old}: no save of the earlier format in it")
    try:
        for part in parts:
            write_tensors(new / part.name, _tensors(part))
        sums = {part.name: manifest_sha256(new / part.name) for part in parts}
        write_text(json.dumps(stamp | {"manifests": sums}), new / OLD_PROGRESS)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return new


def _tensors(folder: Path) -> dict[str, Tensor]:
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {}
    for key, entry in metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{folder}: {key!r:.80} is no tensor")
        tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors


def _check_sums(folder: Path, files: Mapping[str, Any]) -> None:
    """Check size and CRC-32 of every file, recorded as [bytes, CRC-32]."""
    for name, sums in files.items():
        size = crc = 0
        with (folder / Path(name).name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        if [size, crc] != sums:
            raise TornError(f"{folder / name} is not what was written")
