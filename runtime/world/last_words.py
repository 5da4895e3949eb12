"""What a rank that a launcher started says last: a refusal once for each machine, not for each rank."""

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

from workbench.termination import Ended

STDERR = 2  # descriptor
FIRST_SPEAKS_S = 15.0  # longest wait of other ranks for torchrun to end them
SAME_ARGUMENTS_S = 60.0  # the same where they cannot but be refused, too


def say_last(line: str) -> None:
    """Write a final line to standard error, even beyond a soft limit on its file's size."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        os.write(STDERR, f"{line}\n".encode())


def let_first_speak(environment: Mapping[str, str], wait_s: float) -> None:
    """Before this rank says that its input was refused: the first rank of its machine may have said so.

    All read the same input. The first one then ends, and the launcher ends this one, which is quiet about it.
    If nothing ends it, the reason is its own.

    Args:
        wait_s: less than the time after which ranks that were not refused give up waiting for this one.

    Raises:
        SystemExit: the launcher ended it.
    """
    if is_first_here(environment):
        return
    try:
        time.sleep(wait_s)
    except Ended as ended:
        raise SystemExit(ended.code) from None


@contextmanager
def first_speaks(environment: Mapping[str, str]) -> Iterator[None]:
    """Context of reading arguments, which all ranks of a machine refuse, or explain, alike."""
    if is_first_here(environment):
        yield
        return
    said = StringIO()
    try:
        with redirect_stdout(StringIO()), redirect_stderr(said):
            yield
    except SystemExit as ended:
        if ended.code:
            let_first_speak(environment, SAME_ARGUMENTS_S)
            say_last(said.getvalue().rstrip())
        raise


def is_first_here(environment: Mapping[str, str]) -> bool:
    """Whether this is the first rank of its machine, or was started without a launcher."""
    return environment.get("LOCAL_RANK", "0") == "0"
