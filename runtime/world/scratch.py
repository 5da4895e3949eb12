"""A temporary folder that is removed when its process ends, in any way."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from runtime.world.owner import MOST_BYTES, Life, owner_from, this_process
from workbench.whole_file import write_text

MARK = "owner.json"
# Waits for input, or for the end of all possible writers: this process and those forked from it.
CLEANER = 'trap "" HUP INT TERM; read -r word; rm -rf -- "$1"'
JOIN_S = 5.0
KILLED_S = 5.0  # a killed process ends when it is next scheduled


class ScratchFolder:
    """A new private folder, and a shell that removes it if nothing else does.

    The shell waits at the end of a pipe that this process and its forks keep open, in a session of its own,
    which signals to the process group do not reach. If it is killed as well, the next folder with the same
    prefix on this machine removes this one, by its owner's mark.
    """

    def __init__(self, prefix: str) -> None:
        sweep(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        write_text(this_process().as_json(), self.path / MARK)
        self._cleaner = subprocess.Popen(
            ["/bin/sh", "-c", CLEANER, "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder, and end the shell, by force if it does not end, as when it was stopped."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._cleaner.stdin is not None
        with suppress(BrokenPipeError), self._cleaner.stdin as pipe:
            pipe.write(b"end\n")
        try:
            self._cleaner.wait(JOIN_S)
        except subprocess.TimeoutExpired:
            self._cleaner.kill()
            sys.stderr.write(
                f"cleaner of {self.path}, process {self._cleaner.pid}: does not end, so killed\n"
            )
            with suppress(subprocess.TimeoutExpired):  # the folder is no longer needed in any case
                self._cleaner.wait(KILLED_S)


def sweep(prefix: str) -> tuple[Path, ...]:
    """Remove this user's folders with a prefix whose owners have ended; returns the removed ones."""
    left = [path for path in Path(tempfile.gettempdir()).glob(f"{prefix}*") if _is_left(path)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return tuple(path for path in left if not path.exists())


def _is_left(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        with (folder / MARK).open("rb") as file:
            return owner_from(file.read(MOST_BYTES + 1)).life() is Life.ENDED
    except (OSError, ValueError):
        return False  # another folder, or one being created
