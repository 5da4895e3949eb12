"""The state of a whole job as a folder, written by the job's processes and read by new ones."""

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.elastic.history import ElasticFailed
from runtime.elastic.job import ElasticJob, Member, held_by
from runtime.elastic.nodes import Nodes, Replies
from runtime.elastic.orders import Saved
from runtime.state.tensor_files import (
    OLD_METADATA,
    TornError,
    check_tensors,
    manifest_sha256,
    old_format,
    read_stamp,
)
from workbench.elastic.layout import NodeLayout
from workbench.plan.codec import digest_of
from workbench.whole_file import write_text

STAMP = "progress.json"
UNFINISHED = rf"part\d+|\.{re.escape(STAMP)}\.\d+\.tmp"  # contents of a save without its stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Saved weights and moments after `step` steps."""

    folder: Path
    step: int


def save_progress(
    nodes: Nodes, job: ElasticJob, layout: NodeLayout, lost: Collection[str], step: int, folder: Path
) -> Progress:
    """Have every layer, or part of it, written by one of its processes, then write the final stamp.

    On failure, everything written is removed, unless a process may still be writing.

    Raises:
        ElasticFailed: a layer that no process has, or a process that could not write or did not reply.
        OSError: the folder exists, or it or the stamp could not be written.
    """
    owner_of = {
        (layer, _part_of(job, member)): member
        for member, layers in held_by(job, layout).items()
        if member.node not in lost
        for layer in layers
    }
    dead = [layer for layer in range(len(job.chain.owners)) if (layer, 0) not in owner_of]
    if dead:
        raise ElasticFailed(f"no process holds layer {dead[0]} ({len(dead)} layers in all)")
    folder.mkdir(parents=True)  # must be new
    members = tuple(dict.fromkeys(owner_of.values()))
    parts = {
        member: (
            folder / f"part{number}",
            tuple(job.chain.owners[layer] for (layer, _), holder in owner_of.items() if holder == member),
        )
        for number, member in enumerate(members)
    }
    replies = nodes.save(parts, job.step_s)
    try:
        _check_saved(replies)
        stamp = _identity(job) | {
            "step": step,
            "model": job.model.name,
            "owners": [list(owner) for owner in job.chain.owners],
            "parts": _num_parts(job),
            "manifests": {part.name: manifest_sha256(part) for part, _ in parts.values()},
        }
        write_text(json.dumps(stamp), folder / STAMP)
    except (ElasticFailed, OSError, TornError) as error:
        if not replies.silent:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, TornError):  # another process changed the folder
            raise ElasticFailed(str(error)) from None
        raise
    return Progress(folder=folder, step=step)


def _check_saved(replies: Replies) -> None:
    """Raise ElasticFailed unless all processes have written their parts."""
    if replies.is_trouble:
        raise ElasticFailed(replies.describe())
    for member, reply in replies.answers.items():
        if isinstance(reply, Saved) and reply.problem is not None:
            raise ElasticFailed(f"{member}: {reply.problem}")


def unfinished_saves(root: Path) -> list[Path]:
    """The saves in a folder that have no stamp, and contain nothing but parts of a save."""
    return [
        folder
        for folder in root.glob("step*")
        if folder.is_dir() and all(re.fullmatch(UNFINISHED, path.name) for path in folder.iterdir())
    ]


def clear_unfinished(root: Path) -> None:
    """Remove what `unfinished_saves` finds in a folder."""
    for folder in unfinished_saves(root):
        shutil.rmtree(folder, ignore_errors=True)


def _num_parts(job: ElasticJob) -> int:
    """Number of parts of each weight, kept by as many ranks of a stage."""
    return job.lanes if job.is_sharded else 1


def _part_of(job: ElasticJob, member: Member) -> int:
    return member.slot % _num_parts(job)


def _identity(job: ElasticJob) -> dict[str, Any]:
    """What a training must have in common with the one that saved; absent in saves of earlier versions."""
    identity = {"seed": job.seed, "precision": job.precision.value, "graph": digest_of(job.model)}
    return identity if job.data is None else identity | {"data": job.data}


def read_progress(job: ElasticJob, folder: Path) -> Progress:
    """Check and return a folder of `save_progress`; model, precision, seed, data and sharding must agree.

    Every byte is verified.

    Raises:
        TornError: missing or changed files.
        ValueError: another model, precision, seed, data or number of parts, or the previous format.
    """
    try:
        stamp = read_stamp(folder / STAMP)
        match stamp:
            case {"step": int(step), "model": str(model), "owners": list(owners), "parts": int(num_parts)}:
                _check_model(job, folder, model, owners, num_parts)
                _check_identity(job, folder, stamp)
            case _:
                raise TornError(f"{folder / STAMP} has no step, model, owners or parts")
        _check_parts(folder, stamp)
    except TornError as error:
        reason = str(error).replace(f"{folder}/", "")  # named only once, to keep the line short
        raise TornError(f"{folder} holds no whole progress: {reason}") from None
    return Progress(folder=folder, step=step)


def _check_model(job: ElasticJob, folder: Path, model: str, owners: list[Any], num_parts: int) -> None:
    own = [list(owner) for owner in job.chain.owners]
    if model != job.model.name or owners != own:
        raise ValueError(
            f"{folder} is of model {model!r:.80} with {len(owners)} layers, "
            f"want {job.model.name!r} with {len(own)}"
        )
    if num_parts != _num_parts(job):
        raise ValueError(
            f"{folder} holds weights in {num_parts} parts, the job keeps them in {_num_parts(job)}: "
            f"want stages whose {num_parts} ranks shard them, or no sharding if that is 1"
        )


def _check_identity(job: ElasticJob, folder: Path, stamp: dict[str, Any]) -> None:
    for name, want in _identity(job).items():
        if stamp.get(name, want) != want:
            raise ValueError(f"{folder} is of {name} {stamp[name]!s:.80}, this training of {want}")


def _check_parts(folder: Path, stamp: dict[str, Any]) -> None:
    folders = {path.name for path in folder.iterdir() if path.is_dir()}
    if any((folder / name / OLD_METADATA).exists() for name in folders):
        raise old_format(folder)
    sums = stamp.get("manifests")
    if not isinstance(sums, dict) or sums.keys() != folders:
        raise TornError(f"{folder / STAMP} lists other folders than there are")
    for name, sha256 in sums.items():
        if manifest_sha256(folder / name) != sha256:
            raise TornError(f"{folder / name} is not what was written")
        check_tensors(folder / name)
