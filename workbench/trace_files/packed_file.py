"""Read files of other tools, gzip-compressed or not, up to a size limit."""

import gzip
import zlib
from pathlib import Path

from workbench.bounded_file import MOST_BYTES, open_regular

_GZIP = b"\x1f\x8b"


def read_packed(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """A file's bytes, decompressed; both compressed and decompressed size are bounded.

    Raises:
        ValueError: it is longer, truncated, or not a regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        try:
            content = (gzip.GzipFile(fileobj=file) if is_packed else file).read(most_bytes + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: the gzip file is cut off or damaged: {error}") from None
    if len(content) > most_bytes:
        raise ValueError(f"{path}: want at most {most_bytes:,} bytes, this is longer")
    return content
