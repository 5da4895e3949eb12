"""A disk of a few megabytes that can be filled, where mounting is allowed."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

BALLAST = "ballast"
PIECE_BYTES = 2**16


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A context with a folder that is a separate small disk."""
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "chaos", str(folder))
    try:
        yield
    finally:
        _run("umount", "-l", str(folder))


@cache
def can_mount() -> bool:
    """Whether this process may mount file systems."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            with small_disk(Path(folder) / "disk", PIECE_BYTES):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def fill(folder: Path) -> None:
    """Fill the disk."""
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (PIECE_BYTES, os.sysconf("SC_PAGESIZE")):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                continue


def make_room(folder: Path) -> None:
    (folder / BALLAST).unlink(missing_ok=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
