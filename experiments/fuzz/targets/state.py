"""Checkpoints: stamps, metadata, tensors, notes of ranks; and the writer's lock on a folder."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.fuzz.target import Ready, Target, naming
from experiments.fuzz.targets.models import SAFETENSORS, safetensors_tree
from experiments.fuzz.targets.writing import JSON, folder_in, json_bytes, reading
from runtime.state.checkpoint_files import Identity, finish, latest_whole, part_folder, rank_folder
from runtime.state.rank_state import RankNotes, notes_from
from runtime.state.save_folder import LOCK, refuse_writer
from runtime.state.tensor_files import (
    MANIFEST,
    TENSORS,
    manifest_sha256,
    read_manifest,
    read_tensors,
    write_tensors,
)
from runtime.world.owner import owner_from, this_process

IDENTITY = Identity(plan_hash="0" * 64, dtype="torch.float32", seed=0, ranks=(0,))
STAMP = "stamp.json"
WHOLE = "step-0000000001"


def _tensors() -> dict[str, Tensor]:
    return {"weight": torch.ones(3, 4), "moment": torch.zeros(5), "step": torch.tensor(1.0)}


def _notes() -> dict[str, Any]:
    return RankNotes(losses=(1.5, float("inf")), python_random=random.Random(0).getstate()).as_json()


def _checkpoint(folder: Path) -> Path:
    """The folder of the one rank of a whole checkpoint."""
    part = rank_folder(part_folder(folder, 1), 0)
    part.parent.mkdir(parents=True)
    write_tensors(part, _tensors(), _notes())
    return rank_folder(finish(folder, 1, IDENTITY, 1.0), 0)


def _resume(folder: Path) -> None:
    """Resume a run from the checkpoint."""
    whole = latest_whole(folder, IDENTITY)
    assert whole is not None
    rank = rank_folder(whole.folder, 0)
    notes_from(read_tensors(rank, _tensors()).about, where=rank)


def _stamped(rank: Path) -> None:
    """Fix stamp and metadata to match the files, so that the reader proceeds."""
    stamp = rank.parent / STAMP
    document = json.loads(stamp.read_text(encoding="utf-8"))
    stamp.write_bytes(json_bytes(document | {"manifests": {"0": manifest_sha256(rank)}}))


def _stamp(folder: Path) -> Ready:
    root = folder_in(folder, "saves")
    stamp = _checkpoint(root).parent / STAMP
    seeds = [json.loads(stamp.read_bytes())]
    return reading(JSON, stamp, seeds, lambda path: _resume(root), called=WHOLE)


def _manifest(folder: Path) -> Ready:
    root = folder_in(folder, "saves")
    rank = _checkpoint(root)

    def use(manifest: object) -> None:
        del manifest
        _stamped(rank)
        with naming(WHOLE):
            _resume(root)

    seeds = [json.loads((rank / MANIFEST).read_bytes())]
    return reading(JSON, rank / MANIFEST, seeds, lambda path: read_manifest(path.parent), use)


def _tensor_file(folder: Path) -> Ready:
    root = folder_in(folder, "saves")
    rank = _checkpoint(root)
    good = json.loads((rank / MANIFEST).read_bytes())

    def read(path: Path) -> None:
        content = path.read_bytes()
        sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (rank / MANIFEST).write_bytes(json_bytes(good | sums))
        _stamped(rank)
        _resume(root)

    seeds = [safetensors_tree((rank / TENSORS).read_bytes())]
    return reading(SAFETENSORS, rank / TENSORS, seeds, read, called=WHOLE)


def _rank_notes(folder: Path) -> Ready:
    where = folder / WHOLE

    def take(content: bytes) -> None:
        with naming(WHOLE):
            notes_from(_object(content), where=where)

    return Ready(seeds=[_notes()], render=json_bytes, parse=json.loads, take=take)


def _object(content: bytes) -> dict[str, Any]:
    """The input of the notes' reader: parsed JSON that is an object."""
    try:
        about = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _writer(folder: Path) -> Ready:
    saves = folder_in(folder, "saves")

    def use(path: Path) -> None:
        owner_from(path.read_bytes()[: 2**20]).life()
        with naming(saves.name):
            refuse_writer(saves, wait_s=0.0)

    return reading(JSON, saves / LOCK, [json.loads(this_process().as_json())], lambda path: path, use)


TARGETS = (
    Target(
        name="checkpoint-stamp",
        make=_stamp,
        readers=("runtime.state.tensor_files:read_stamp", "runtime.state.tensor_files:read_small"),
    ),
    Target(
        name="checkpoint-metadata",
        make=_manifest,
        readers=("runtime.state.tensor_files:read_manifest", "runtime.state.tensor_files:manifest_sha256"),
    ),
    Target(
        name="checkpoint-tensors",
        make=_tensor_file,
        readers=("runtime.state.tensor_files:read_tensors", "runtime.state.tensor_files:_sums"),
    ),
    Target(name="checkpoint-notes", make=_rank_notes, readers=("runtime.state.rank_state:notes_from",)),
    Target(
        name="writer-of-a-folder",
        make=_writer,
        readers=(
            "runtime.state.save_folder:_writer",
            "runtime.world.owner:owner_from",
            "runtime.world.scratch:_is_left",
        ),
    ),
)
