"""Files from somebody else: read as far as a limit, and entries of a list only inside its folder."""

import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

MOST_BYTES = 2**30
MOST_SETTINGS_BYTES = 2**24  # of what people write by hand


def read_bounded(path: Path, most_bytes: int = MOST_BYTES, encoding: str = "utf-8") -> str:
    """A file's text; a device or a pipe is read no further than a file.

    Raises:
        ValueError: it is longer, or no text.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path}: want at most {most_bytes} bytes, this is longer")
    try:
        return content.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from None


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; a pipe or device is refused, not waited for.

    Raises:
        ValueError: it is none.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: want a regular file")
    return os.fdopen(descriptor, "rb")


def entry_in(folder: Path, name: object) -> Path:
    """The file that a list in a folder names: a regular one, inside that folder by its name.

    A link in the folder is followed, wherever it leads: whoever made the folder made it.

    Raises:
        ValueError: no name, one that leaves the folder, or nothing regular there.
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
