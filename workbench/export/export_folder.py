"""Writes an exported folder whole or not at all, and only over one that is ours."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.export.folder import FORMAT, MARK
from workbench.whole_file import check_writable

_PROGRAM_MODE, _FOLDER_MODE = 0o755, 0o777


def check_folder(folder: Path) -> None:
    """Refuse early what will not be written over. Nothing is made.

    Raises:
        ValueError: it is a file, holds something that no export wrote, or lies where nothing may be written.
    """
    if folder.is_symlink() or folder.is_file():
        raise ValueError(f"{folder}: want a folder to write, this is a file or a link")
    check_writable(folder / MARK)
    if folder.exists() and any(folder.iterdir()) and not _is_ours(folder):
        raise ValueError(
            f"{folder}: holds files that no export wrote; want a new folder, or one of `workbench export`"
        )


def _is_ours(folder: Path) -> bool:
    try:
        mark = json.loads(read_bounded(folder / MARK, MOST_SETTINGS_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(mark, dict) and mark.get("format") == FORMAT


def write_folder(files: Mapping[str, str], folder: Path) -> None:
    """Write the files beside the folder's name first, then rename; what was there is replaced whole.

    Raises:
        ValueError: as `check_folder`.
        OSError: it cannot be written.
    """
    check_folder(folder)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        for name, text in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(_PROGRAM_MODE)
        made.chmod(_FOLDER_MODE & ~_umask())
        _replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _replace(made: Path, folder: Path) -> None:
    """An empty folder is renamed over; one of ours is moved aside first, and back where that fails."""
    if not folder.exists() or not any(folder.iterdir()):
        made.replace(folder)
        return
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.replace(aside)
    try:
        made.replace(folder)
    except OSError:
        aside.replace(folder)
        raise
    shutil.rmtree(aside)


def _umask() -> int:
    """The process's own, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
