"""Writes files whole or not at all."""

import os
from pathlib import Path


def write_text(text: str, path: Path) -> None:
    """Write a file whole or not at all: beside its name first, then renamed.

    Missing folders are made; permissions are those of any new file; a link stays one, and what
    it names is written. A device or a pipe, which cannot be renamed over, is written to as it is.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
