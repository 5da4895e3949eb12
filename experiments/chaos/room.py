"""The environment of one round: its folders, its mark, and its programs."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.chaos.fault import INJECTED, Fault
from experiments.chaos.forked import MARK, MARK_LENGTH, Forked, fork
from experiments.chaos.processes import end_all, marked
from experiments.chaos.saves import STAMPS

ROOT = Path(__file__).parents[2]
FOREIGN = ("torch",)  # temporary folders that torch's launcher and compiler make


@dataclass(frozen=True, slots=True)
class Program:
    """A started program, whose output goes to files."""

    process: Forked
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr_text(self) -> str:
        return self.err.read_text(errors="replace")

    @property
    def printed(self) -> str:
        return self.out.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line of its standard error."""
        lines = [line for line in self.stderr_text.splitlines() if line.strip()]
        return lines[-1] if lines else ""


@dataclass(frozen=True, slots=True)
class Room:
    """A round's own folder, and the mark in the environment of all its processes."""

    folder: Path
    mark: str

    @property
    def scratch(self) -> Path:
        """The folder for temporary files of its programs."""
        return self.folder / "tmp"

    @property
    def saves(self) -> Path:
        return self.folder / "disk" / "saves"

    def start(self, name: str, *words: object) -> Program:
        """Start a program, see `forked`."""
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        for path in (out, err):
            path.touch()
        environment = {
            MARK: self.mark,
            "TMPDIR": str(self.scratch),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        process = fork(
            [str(word) for word in words], out=out, err=err, folder=self.folder, environment=environment
        )
        return Program(process, out, err)

    def left_over(self) -> list[str]:
        """Temporary files and folders that were not removed."""
        remaining = [path for path in self.scratch.iterdir() if not path.name.startswith(FOREIGN)]
        saves = [path for path in self.folder.rglob("*") if path.name.endswith((".part", ".tmp"))]
        torn = [
            path for path in self.saves.glob("step*") if not any((path / name).exists() for name in STAMPS)
        ]
        locks = list(self.folder.rglob("writer.json"))
        return sorted({str(path.relative_to(self.folder)) for path in (*remaining, *saves, *torn, *locks)})


@contextmanager
def room(seed: str) -> Iterator[Room]:
    """A context with a room, whose processes are ended and whose folder is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        mark = hashlib.sha256(f"{folder} {seed}".encode()).hexdigest()[:MARK_LENGTH]
        new_room = Room(Path(folder), mark)
        new_room.scratch.mkdir()
        try:
            yield new_room
        finally:
            if marked(mark):
                end_all(mark)


def workbench(fault: Fault | None, seed: str, *words: object) -> tuple[object, ...]:
    """A command of the workbench with injections."""
    return (*injected(fault, seed), "workbench", *words)


def injected(fault: Fault | None, seed: str) -> tuple[object, ...]:
    """The prefix of a program with an injection."""
    return ("injected", fault, seed) if fault in INJECTED else ()
