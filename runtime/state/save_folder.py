"""A folder that saves go to: whether they can be written there, and who alone writes, which a file says."""

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.world.owner import MOST_BYTES, Life, Owner, owner_from, this_process
from workbench.bounded_file import open_regular
from workbench.units import gib
from workbench.whole_file import write_text

LOCK = "writer.json"
WAIT_S = 3.0  # for a writer that is ending: its processes take up to two seconds
LOOK_EVERY_S = 0.05


def check_folder(folder: Path, num_bytes: int) -> None:
    """Make it, and find out before the work what would end it at its first save.

    Args:
        num_bytes: about what has to fit on its disk.

    Raises:
        ValueError: it cannot be written to, another process does so, or there is no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder}: nothing can be saved there: {error.strerror}") from None
    refuse_writer(folder)
    if (free_bytes := shutil.disk_usage(folder).free) < num_bytes:
        raise ValueError(
            f"{folder}: saves take about {gib(num_bytes):.4g} GiB more, {gib(free_bytes):.4g} GiB are free"
        )


@contextmanager
def written_alone(folder: Path) -> Iterator[None]:
    """Around the work that saves there; see `take`."""
    take(folder)
    try:
        yield
    finally:
        give_back(folder)


def refuse_writer(folder: Path, wait_s: float = WAIT_S) -> None:
    """Raise ValueError where another process writes to the folder, and goes on doing so."""
    deadline = time.monotonic() + wait_s
    while (reason := _reason(folder, _writer(folder))) is not None:
        if time.monotonic() >= deadline:
            raise ValueError(reason)
        time.sleep(LOOK_EVERY_S)


def take(folder: Path) -> None:
    """Become the folder's writer; one that has ended without giving it back is named on standard error.

    Raises:
        ValueError: another process is.
        OSError: nothing can be written there.
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
    """No longer be the folder's writer; nothing happens where this process is not."""
    with suppress(OSError, ValueError), _alone(folder):
        if _writer(folder) == this_process():
            (folder / LOCK).unlink()


def forget_ended_writer(folder: Path) -> None:
    """Remove the mark of a writer that has ended without giving the folder back."""
    with suppress(OSError, ValueError), _alone(folder):
        writer = _writer(folder)
        if isinstance(writer, Owner) and writer.life() is Life.ENDED:
            (folder / LOCK).unlink()


def _writer(folder: Path) -> Owner | str | None:
    """Who the folder says writes to it; text: what is wrong with what it says."""
    try:
        with open_regular(folder / LOCK) as file:
            return owner_from(file.read(MOST_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return str(error)


def _reason(folder: Path, writer: Owner | str | None) -> str | None:
    """Why it is not this process's to take; None: it is."""
    if isinstance(writer, str):
        return f"{folder / LOCK}: cannot be read ({writer}); remove it if nobody writes there"
    if writer is None or writer == this_process():
        return None
    match writer.life():
        case Life.ALIVE:
            return f"{folder} is being written to by {writer}; want another folder"
        case Life.UNKNOWN:
            return (
                f"{folder} belongs to {writer}, which cannot be asked from here; "
                f"if it has ended, remove {folder / LOCK}"
            )
        case Life.ENDED:
            return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Between reading and writing who it is, nobody else of this machine does the same."""
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
