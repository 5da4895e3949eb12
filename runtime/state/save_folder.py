"""A folder of saves: checks that it is writable, and locks it for one process by a file."""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.world.owner import MOST_BYTES, Life, Owner, owner_from, this_process
from workbench.bounded_file import open_regular
from workbench.units import gib
from workbench.whole_file import nearest, try_writing, write_text

LOCK = "writer.json"
WAIT_S = 3.0  # for a writer that is ending, whose processes take up to two seconds
LOOK_EVERY_S = 0.05


def check_folder(folder: Path) -> None:
    """Detect before the work what would fail at its first save, or when that is read; creates nothing.

    Raises:
        ValueError: it is not writable, or used by another process, or its path is not UTF-8.
    """
    try:
        str(folder.resolve()).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{folder}: want a path in UTF-8, as safetensors reads no other") from None
    try:
        try_writing(nearest(folder))
    except OSError as error:
        raise ValueError(f"{folder}: nothing can be saved there: {error.strerror}") from None
    refuse_writer(folder)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise ValueError where the disk of a folder, which need not exist, lacks about so many bytes."""
    if (free_bytes := shutil.disk_usage(nearest(folder)).free) < num_bytes:
        raise ValueError(
            f"{folder}: saves take about {gib(num_bytes):.4g} GiB more, {gib(free_bytes):.4g} GiB are free"
        )


@contextmanager
def written_alone(folder: Path) -> Iterator[None]:
    """Context of the work that saves there; see `take`."""
    take(folder)
    try:
        yield
    finally:
        give_back(folder)


def refuse_writer(folder: Path, wait_s: float = WAIT_S) -> None:
    """Raise ValueError where another process owns the folder, and still does after a wait."""
    deadline = time.monotonic() + wait_s
    while (reason := _reason(folder, _writer(folder))) is not None:
        if time.monotonic() >= deadline:
            raise ValueError(reason)
        time.sleep(LOOK_EVERY_S)


def take(folder: Path) -> None:
    """Become the folder's owner; an owner that ended without releasing it is named on standard error.

    Raises:
        ValueError: another process is the owner.
        OSError: the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        before = _writer(folder)
        if (reason := _reason(folder, before)) is not None:
            raise ValueError(reason)
        write_text(this_process().as_json(), folder / LOCK)
    if isinstance(before, Owner) and before != this_process():
        sys.stderr.write(f"{folder}: taken over from {before}, which ended while it was its writer\n")


def give_back(folder: Path) -> None:
    """Release the folder, if this process is its owner."""
    with suppress(OSError, ValueError), _alone(folder):
        if _writer(folder) == this_process():
            (folder / LOCK).unlink()


def clear_after_writer(folder: Path, clear: Callable[[Path], None]) -> None:
    """Clear what processes left that have ended, and their lock; a folder of others stays as it is.

    Args:
        clear: removes incomplete saves.
    """
    with suppress(OSError, ValueError), _alone(folder):
        writer = _writer(folder)
        if _reason(folder, writer) is not None:
            return
        clear(folder)
        if writer != this_process():
            (folder / LOCK).unlink(missing_ok=True)


def _writer(folder: Path) -> Owner | str | None:
    """The folder's owner by its lock; a text if the lock is invalid."""
    try:
        with open_regular(folder / LOCK) as file:
            return owner_from(file.read(MOST_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return str(error)


def _reason(folder: Path, writer: Owner | str | None) -> str | None:
    """Why this process cannot own the folder; None if it can."""
    if isinstance(writer, str):
        return f"{folder / LOCK}: cannot be read ({writer}); remove it if nobody writes there"
    if writer is None or writer == this_process():
        return None
    match writer.life():
        case Life.ALIVE:
            return f"{folder} is being written to by {writer}; want another folder"
        case Life.UNKNOWN:
            return (
                f"{folder} belongs to {writer}, which cannot be checked from here; "
                f"if it has ended, remove {folder / LOCK}"
            )
        case Life.ENDED:
            return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Exclude this machine's other processes between reading and writing the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + WAIT_S
    try:
        while not _locked(descriptor):
            if time.monotonic() >= deadline:
                raise ValueError(f"{folder}: another process has been taking it over for {WAIT_S:g} s")
            time.sleep(LOOK_EVERY_S)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
