"""Checkpoints of a run as folders: their completeness, their identity, and the latest one."""

import json
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.state.tensor_files import (
    MANIFEST,
    OLD_METADATA,
    TornError,
    check_tensors,
    manifest_sha256,
    old_format,
    read_stamp,
)
from workbench.plan.codec import named_hash, plan_hash
from workbench.plan.plan import Plan
from workbench.whole_file import write_text

STAMP = "stamp.json"
PART = ".part"  # suffix of a folder that is being written
OLD_TENSORS = "tensors"  # folder of a rank in the previous format
LOOK_EVERY_S = 0.01
KEPT = 2  # complete checkpoints; older ones are removed


class ForeignError(ValueError):
    """A checkpoint of another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a checkpoint's run; state of another plan, type, seed or other data is refused.

    Args:
        plan_hash: of the first step's plan.
        named_hash: of the same plan, as in checkpoints from before version 3 of plan files.
        dtype: of weights.
        seed: of weights and data.
        ranks: that write one folder each.
        data: text that identifies the data of its steps; None: not compared, as with stamps of earlier
            versions, which lack it.
    """

    plan_hash: str
    dtype: str
    seed: int
    ranks: tuple[int, ...]
    named_hash: str = ""
    data: str | None = None


def identity_of(plan: Plan, dtype: torch.dtype, seed: int, *, data: str | None = None) -> Identity:
    """Identity of a run of that plan."""
    return Identity(
        plan_hash=plan_hash(plan),
        dtype=str(dtype),
        seed=seed,
        ranks=plan.ranks,
        named_hash=named_hash(plan),
        data=data,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A checkpoint that is verified as complete, after `step` steps.

    Args:
        torn: why newer ones are not complete.
    """

    folder: Path
    step: int
    torn: tuple[str, ...] = ()


def part_folder(root: Path, step: int) -> Path:
    """Folder in which ranks write; renamed when all have."""
    return root / f"step-{step:010}{PART}"


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}"


def finish(root: Path, step: int, identity: Identity, timeout_s: float) -> Path:
    """Wait for all ranks, write the stamp, rename the folder, and remove all but one older checkpoint.

    Raises:
        TimeoutError: ranks that did not write in time.
    """
    part, deadline = part_folder(root, step), time.monotonic() + timeout_s
    while missing := [r for r in identity.ranks if not (rank_folder(part, r) / MANIFEST).is_file()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{part}: nothing from ranks {missing} after {timeout_s:g} s")
        time.sleep(LOOK_EVERY_S)
    sums = {str(rank): manifest_sha256(rank_folder(part, rank)) for rank in identity.ranks}
    write_text(json.dumps(_stamp(step, identity) | {"manifests": sums}), part / STAMP)
    whole = part.with_suffix("")
    if whole.exists():  # of a run that was killed after this step, and resumed from before it
        shutil.rmtree(whole)
    part.rename(whole)
    for old in finished(root)[:-KEPT]:
        shutil.rmtree(old)
    return whole


def clear_parts(root: Path) -> None:
    """Remove incomplete saves."""
    for part in root.glob(f"step-*{PART}"):
        shutil.rmtree(part, ignore_errors=True)


def drop_rank(root: Path, step: int, rank: int) -> None:
    """Remove a rank's part of a checkpoint that will not be finished."""
    part = part_folder(root, step)
    shutil.rmtree(rank_folder(part, rank), ignore_errors=True)
    with suppress(OSError):  # it still has other ranks' parts
        part.rmdir()


def check_whole(folder: Path, identity: Identity) -> Whole:
    """Verify every byte of a checkpoint, in chunks; executes nothing in it.

    Raises:
        TornError: missing or changed files.
        ForeignError: another plan, type, seed or set of ranks, or other data.
        ValueError: the previous format.
    """
    try:
        return _checked(folder, identity)
    except TornError as error:
        raise TornError(f"checkpoint {folder} is torn: {error}") from None


def _checked(folder: Path, identity: Identity) -> Whole:
    stamp = read_stamp(folder / STAMP)
    step = stamp.get("step")
    for name, want in _stamp(0, identity).items():
        accepted = {"plan": (want, identity.named_hash), "data": (want, None)}.get(name, (want,))
        if name != "step" and stamp.get(name) not in accepted:
            recorded, own = _shown(stamp.get(name)), _shown(want)
            raise ForeignError(
                f"checkpoint {folder} is of {name} {recorded}, this run of {own}; "
                f"want the same {name}, or another folder"
            )
    if any((rank_folder(folder, rank) / OLD_TENSORS / OLD_METADATA).exists() for rank in identity.ranks):
        raise old_format(folder)
    sums = stamp.get("manifests")
    for rank in identity.ranks:
        part = rank_folder(folder, rank)
        if not isinstance(sums, dict) or sums.get(str(rank)) != manifest_sha256(part):
            raise TornError(f"{part / MANIFEST} is not what was written")
        check_tensors(part)
    if type(step) is not int or step < 1:
        raise TornError(f"its step is {step!r:.60}")
    return Whole(folder=folder, step=step)


def _shown(value: object) -> str:
    """An entry of a stamp for people: 80 letters at most, and of hashes the first 12 digits."""
    return re.sub("([0-9a-f]{12})[0-9a-f]{52}", r"\1", str(value))[:80]


def latest_whole(root: Path, identity: Identity) -> Whole | None:
    """The newest complete checkpoint, and why newer ones are torn; None without a finished one.

    Unfinished ones are ignored.

    Raises:
        ForeignError: the newest readable one belongs to another run.
        TornError: there are checkpoints, but all are torn.
    """
    torn: list[str] = []
    for folder in reversed(finished(root)):
        try:
            return replace(check_whole(folder, identity), torn=tuple(torn))
        except TornError as error:
            torn.append(str(error))
    if torn:
        raise TornError(f"{'; '.join(torn)}; want an intact copy of one, or another folder to start again")
    return None


def refuse_taken(root: Path) -> None:
    """Raise ValueError where checkpoints of another run would be mixed with those of a new one."""
    if present := finished(root):
        raise ValueError(f"{root} holds {present[-1].name} already: want --resume, or another folder")


def finished(root: Path) -> Sequence[Path]:
    """Finished checkpoints, oldest first."""
    paths = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in paths if re.fullmatch(r"step-\d{10}", path.name))


def step_of(folder: Path) -> int:
    """The steps that a finished checkpoint has seen, by its name."""
    return int(folder.name.removeprefix("step-"))


def _stamp(step: int, identity: Identity) -> dict[str, Any]:
    return {
        "step": step,
        "plan": identity.plan_hash,
        "dtype": identity.dtype,
        "seed": identity.seed,
        "ranks": list(identity.ranks),
    } | ({} if identity.data is None else {"data": identity.data})
