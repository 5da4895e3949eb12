"""Reads untrusted files up to a size limit, and listed files only inside their folder."""

import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

MOST_BYTES = 2**30
PIECE_BYTES = 2**20
MOST_SETTINGS_BYTES = 2**24  # of hand-written files


def read_bounded(path: Path, most_bytes: int = MOST_BYTES, encoding: str = "utf-8") -> str:
    """A file's text, up to a size limit even for a device or a pipe.

    Raises:
        ValueError: it is longer, or not text.
        OSError: it cannot be read.
    """
    content = bytearray()
    with path.open("rb") as file:  # in pieces: a read of the limit allocates it all
        while len(content) <= most_bytes and (piece := file.read(min(PIECE_BYTES, most_bytes + 1))):
            content += piece
    if len(content) > most_bytes:
        raise ValueError(f"{path}: want at most {most_bytes} bytes, this is longer")
    try:
        return content.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from None


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or device is refused without waiting for it.

    Raises:
        ValueError: it is not a regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: want a regular file")
    return os.fdopen(descriptor, "rb")


def entry_in(folder: Path, name: object) -> Path:
    """A file that a list in a folder names: a regular file inside that folder, by its name.

    Links in the folder are followed wherever they lead, as its owner made them.

    Raises:
        ValueError: not a name, a name that leaves the folder, or not a regular file.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{folder}: want names of files, got {name!r:.80}")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"{folder}: {name!r:.80} is not inside it")
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder}: {name!r:.80} is no regular file in it")
    return path
