"""Writes files atomically: whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_writable(path: Path, *reads: Path | str | None) -> None:
    """Raise early for a path that cannot be written after long work; nothing is created.

    Args:
        reads: files that the same command reads, which its output must not replace.

    Raises:
        ValueError: the path is a folder, its parent is not a writable folder, or it is read.
    """
    if path.is_dir():
        raise ValueError(f"{path}: want a file to write, this is a folder")
    for source in (Path(read) for read in reads if read):
        if path.is_file() and source.is_file() and path.samefile(source):
            raise ValueError(f"{path}: this command reads it; want another file to write")
    above = nearest(Path(os.path.realpath(path)).parent)
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    try:
        try_writing(above)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written, {above} is no folder that I may write to: {error.strerror}"
        ) from None


def nearest(path: Path) -> Path:
    """The path, or what exists above it: a folder, unless the path leads through a file."""
    real = Path(os.path.realpath(path))
    return next(each for each in (real, *real.parents) if each.exists())


def try_writing(folder: Path) -> None:
    """Write a file there that has no name and is gone at once: permissions alone do not tell.

    Raises:
        OSError: it cannot be written, as in a file system that is read-only, full or not made of files.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b" ")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which an operation that fails without naming a file, as on a full disk, names this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_text(text: str, path: Path) -> None:
    """Write a file of UTF-8 text atomically; see `write_bytes`."""
    write_bytes(text.encode("utf-8"), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file atomically: to a temporary file beside it, which is then renamed.

    Missing folders are created; permissions are those of any new file; links are kept, and their targets
    written. A device or a pipe, which cannot be renamed over, is written directly.

    Raises:
        OSError: it cannot be written; names the file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file, other errors the temporary one
        raise
    finally:
        temporary.unlink(missing_ok=True)
