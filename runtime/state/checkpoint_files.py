"""Checkpoints of a run as folders: what makes one whole, whose it is, and which is the latest."""

import json
import re
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.whole_file import write_text

STAMP, RANK_STAMP, TENSORS = "stamp.json", "rank.json", "tensors"
PART = ".part"  # of a folder that is being written
CHUNK_BYTES = 2**20
LOOK_EVERY_S = 0.01
KEPT = 2  # whole checkpoints; older ones are removed


class TornError(ValueError):
    """A checkpoint that is not whole."""


class ForeignError(ValueError):
    """A checkpoint of another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose a checkpoint is: state of another plan, type or seed does not fit.

    Args:
        plan_hash: of the first step's plan.
        dtype: of weights.
        seed: of weights and data.
        ranks: that write one folder each.
    """

    plan_hash: str
    dtype: str
    seed: int
    ranks: tuple[int, ...]


def identity_of(plan: Plan, dtype: torch.dtype, seed: int) -> Identity:
    """Of a run of that plan."""
    return Identity(plan_hash=plan_hash(plan), dtype=str(dtype), seed=seed, ranks=plan.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A checkpoint that was found whole: after `step` steps."""

    folder: Path
    step: int


def part_folder(root: Path, step: int) -> Path:
    """Where the ranks write; it is renamed when all have."""
    return root / f"step-{step:010}{PART}"


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}"


def finish_rank(folder: Path, about: Mapping[str, Any]) -> None:
    """A rank has written all its tensors: note their sizes and sums, which says so to the others.

    Args:
        about: what else the rank wants to find again; JSON.
    """
    files = {path.name: _sums(path) for path in sorted((folder / TENSORS).iterdir())}
    write_text(json.dumps({"files": files, "about": dict(about)}), folder / RANK_STAMP)


def finish(root: Path, step: int, identity: Identity, timeout_s: float) -> Path:
    """Wait for all ranks, stamp the checkpoint and give it its name; older ones but one go.

    Raises:
        TimeoutError: ranks that did not write in time.
    """
    part, deadline = part_folder(root, step), time.monotonic() + timeout_s
    while missing := [r for r in identity.ranks if not (rank_folder(part, r) / RANK_STAMP).is_file()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{part}: nothing from ranks {missing} after {timeout_s:g} s")
        time.sleep(LOOK_EVERY_S)
    write_text(json.dumps(_stamp(step, identity)), part / STAMP)
    whole = part.with_suffix("")
    if whole.exists():  # of a run that was killed after this step, and resumed before it
        shutil.rmtree(whole)
    part.rename(whole)
    for old in _steps(root)[:-KEPT]:
        shutil.rmtree(old)
    return whole


def clear_parts(root: Path) -> None:
    """Remove what saves left that were cut off."""
    for part in root.glob(f"step-*{PART}"):
        shutil.rmtree(part)


def check_whole(folder: Path, identity: Identity) -> Whole:
    """Read every byte of a checkpoint.

    Raises:
        TornError: something is missing or was changed.
        ForeignError: it is of another plan, type, seed or set of ranks.
    """
    stamp = _read(folder / STAMP)
    step = stamp.get("step")
    for name, want in _stamp(0, identity).items():
        if name != "step" and stamp.get(name) != want:
            raise ForeignError(f"checkpoint {folder} is of {name} {stamp.get(name)}, this run of {want}")
    for rank in identity.ranks:
        part = rank_folder(folder, rank)
        files = _read(part / RANK_STAMP).get("files", {})
        for name, sums in files.items():
            path = part / TENSORS / name
            if not path.is_file() or _sums(path) != sums:
                raise TornError(
                    f"checkpoint {folder} is torn: {path.relative_to(folder)} is not what was written"
                )
    if not isinstance(step, int) or step < 1:
        raise TornError(f"checkpoint {folder} is torn: it says step {step}")
    return Whole(folder=folder, step=step)


def latest_whole(root: Path, identity: Identity) -> Whole | None:
    """The newest checkpoint that is whole; unfinished ones are not looked at. None without a finished one.

    Raises:
        ForeignError: the newest readable one is of another run.
        TornError: there are checkpoints, and all are torn.
    """
    torn: list[str] = []
    for folder in reversed(_steps(root)):
        try:
            return check_whole(folder, identity)
        except TornError as error:
            torn.append(str(error))
    if torn:
        raise TornError("; ".join(torn))
    return None


def refuse_taken(root: Path) -> None:
    """Raise ValueError where checkpoints of another run would be mixed with those of a new one."""
    if taken := _steps(root):
        raise ValueError(f"{root} holds {taken[-1].name} already: want --resume, or another folder")


def read_about(whole: Whole, rank: int) -> dict[str, Any]:
    """What the rank wanted to find again."""
    about: dict[str, Any] = _read(rank_folder(whole.folder, rank) / RANK_STAMP)["about"]
    return about


def _steps(root: Path) -> Sequence[Path]:
    """Finished checkpoints, oldest first."""
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in found if re.fullmatch(r"step-\d{10}", path.name))


def _stamp(step: int, identity: Identity) -> dict[str, Any]:
    return {
        "step": step,
        "plan": identity.plan_hash,
        "dtype": identity.dtype,
        "seed": identity.seed,
        "ranks": list(identity.ranks),
    }


def _sums(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TornError(f"checkpoint {path.parent} is torn: {path.name} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise TornError(f"checkpoint {path.parent} is torn: {path.name} holds no object")
    return found
