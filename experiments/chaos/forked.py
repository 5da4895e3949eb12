"""Programs as forks of this process, which has imported torch already, so that a start costs no core seconds.

In /proc a fork has its parent's environment, whatever it sets later, unless the bytes themselves change. So
this process starts with room for a mark there, and every fork writes its own; processes that the fork starts
have that mark, too.
"""

import ctypes
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

MARK = "CHAOS_ROUND"
MARK_LENGTH = 40
WAIT_S = 0.01
PROGRAMS = {
    "workbench": "workbench.cli.app",
    "launch": "runtime.launch",
    "torchrun": "torch.distributed.run",
    "trainer": "experiments.chaos.trainer",
    "injected": "experiments.chaos.injected",
}
USED = (
    *PROGRAMS.values(),
    "runtime.elastic.forecast",
    "runtime.elastic.run",
    "runtime.preprocess.server",
    "sim.predict",
    "workbench.cli.elastic",
    "workbench.cli.elastic_training",
    "workbench.cli.executing",
    "workbench.cli.planning",
    "workbench.cli.preprocessing",
    "workbench.cli.search",
)


class Forked:
    """A child of this process, with an interface like `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; TimeoutError where it still runs."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"process {self.pid} lives after {timeout_s:g} s")
            time.sleep(WAIT_S)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def with_room_for_a_mark(arguments: Sequence[str]) -> None:
    """Restart this program with a mark in its environment, unless it has one."""
    if len(os.environ.get(MARK, "")) != MARK_LENGTH:
        words = [sys.executable, "-m", "experiments.chaos", *arguments]
        os.execve(sys.executable, words, os.environ | {MARK: "." * MARK_LENGTH, "OMP_NUM_THREADS": "1"})


def import_all() -> None:
    """Import all modules of the programs before forking."""
    for module in USED:
        import_module(module)


def fork(
    program: Sequence[str], *, out: Path, err: Path, folder: Path, environment: Mapping[str, str]
) -> Forked:
    """Fork a program by its name in `PROGRAMS` and its arguments, in its own session."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork beside threads; a proxy's holds no lock that the fork needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _become(out, err, folder, environment)
            code = main_of(program)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return Forked(pid)


def main_of(program: Sequence[str]) -> int:
    """Run a program and return its exit code; uncaught exceptions are printed as by Python."""
    name, *arguments = program
    sys.modules["__main__"] = module = import_module(PROGRAMS[name])  # what spawned workers import
    main: Any = module.main
    sys.argv = [name, *arguments]
    try:
        return (main() if name == "workbench" else main(arguments)) or 0
    except SystemExit as end:
        return _code_of(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _become(out: Path, err: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Keep only the parent's imports: session, files, folder and environment are new."""
    os.setsid()
    for number, path, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT),
        (2, err, os.O_WRONLY | os.O_CREAT),
    ):
        descriptor = os.open(path, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.closerange(3, 1024)
    os.chdir(folder)
    _overwrite(environment[MARK])
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked up again


def _overwrite(mark: str) -> None:
    """Write the mark where /proc reads it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(MARK.encode())
    assert len(mark) == MARK_LENGTH, "the bytes that are there"
    ctypes.memmove(address, mark.encode(), MARK_LENGTH)
