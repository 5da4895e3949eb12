"""Reads a folder of saves without the code that wrote it, checking every byte against its SHA-256."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAMPS = ("stamp.json", "progress.json")  # of a run, of elastic training
MANIFEST, TENSORS = "tensors.json", "tensors.safetensors"


@dataclass(frozen=True, slots=True)
class Save:
    """A finished save."""

    folder: Path
    step: int


def named(folder: Path) -> int:
    """The last step with a finished save, by its stamp; 0 where there is none."""
    return max((step for step, _ in _stamps(folder)), default=0)


def whole(folder: Path) -> Save | None:
    """The last save whose bytes are all as written."""
    for step, stamp in sorted(_stamps(folder), reverse=True):
        if _is_whole(stamp):
            return Save(stamp.parent, step)
    return None


def losses(save: Save) -> dict[int, float]:
    """Losses of all steps of a run until the save, summed over ranks."""
    parts = [
        [float.fromhex(loss) for loss in _read(path)["about"]["losses"]]
        for path in sorted(save.folder.glob(f"rank-*/{MANIFEST}"))
    ]
    return dict(enumerate(map(sum, zip(*parts, strict=True))))


def _stamps(folder: Path) -> Iterator[tuple[int, Path]]:
    for name in STAMPS:
        for stamp in folder.glob(f"*/{name}"):
            if ".part" not in stamp.parent.name:
                try:
                    yield int(_read(stamp)["step"]), stamp
                except (OSError, ValueError, KeyError):
                    continue  # it is going, or torn


def _is_whole(stamp: Path) -> bool:
    try:
        sums: Mapping[str, str] = _read(stamp)["manifests"]
        parts = [_part(stamp.parent, name) for name in sums]
        return bool(parts) and all(
            _sha256(part / MANIFEST) == sha256 and _sha256(part / TENSORS) == _read(part / MANIFEST)["sha256"]
            for part, sha256 in zip(parts, sums.values(), strict=True)
        )
    except (OSError, ValueError, KeyError):
        return False


def _part(folder: Path, name: str) -> Path:
    return folder / (f"rank-{int(name):05}" if name.isdecimal() else name)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
