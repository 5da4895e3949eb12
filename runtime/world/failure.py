"""What goes wrong on a rank, and who is named as the cause."""

import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass


class RankError(RuntimeError):
    """Something failed on a rank in the middle of its program; the message names rank and action.

    `peers` are the ranks it waited for, where the failure may be theirs.
    """

    def __init__(self, message: str, *, peers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers


def first_line(error: BaseException) -> str:
    """What happened, without gloo's source location, C++ stack and advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^\[[^\]]*\.(?:cc|h|cpp):\d+\]\s*", "", lines[0])
    return text.partition(". This is typically")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One process's failure, as its parent came to know it.

    Args:
        process: index in the world.
        time_s: on the machine's monotonic clock.
        signal_number: the signal that killed it, or None.
        exit_code: of a process that went away by itself, or None.
        is_stopped: it stood still by a signal, and was ended for that.
        kind: class name of the exception, or None.
        text: of the exception.
        trace: its traceback, for a log.
        is_echo: it failed while waiting for another rank, so the cause may be there.
        is_value_error: bad input, refused.
    """

    process: int
    time_s: float
    signal_number: int | None = None
    exit_code: int | None = None
    is_stopped: bool = False
    kind: str | None = None
    text: str = ""
    trace: str = ""
    is_echo: bool = False
    is_value_error: bool = False

    def describe(self, where: str) -> str:
        """One line; `where` names the rank and what it was doing."""
        if self.is_stopped:
            return f"{where}: stopped by a signal and not continued"
        if self.signal_number is not None:
            return f"{where}: killed by {signal.Signals(self.signal_number).name}"
        if self.exit_code is not None:
            return f"{where}: the process ended with exit code {self.exit_code}"
        return self.text if self.kind == "RankError" else f"{where}: {self.kind}: {self.text}"


def failure_of(process: int, error: BaseException) -> Failure:
    """The exception of a process as something that travels through a pipe."""
    return Failure(
        process=process,
        time_s=time.perf_counter(),
        kind=type(error).__name__,
        text=str(error),
        trace="".join(traceback.format_exception(error)),
        is_echo=isinstance(error, RankError) and bool(error.peers),
        is_value_error=isinstance(error, ValueError),
    )


def death_of(process: int, exit_code: int) -> Failure:
    """A process that ended without a word; negative exit codes are signals."""
    is_signal = exit_code < 0
    return Failure(
        process=process,
        time_s=time.perf_counter(),
        signal_number=-exit_code if is_signal else None,
        exit_code=None if is_signal else exit_code,
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others.

    A dead process comes before an exception, an exception of a rank's own before one raised
    while waiting for another rank; then the earliest, then the lowest process.
    """
    return min(failures, key=lambda f: (f.kind is not None, f.is_echo, f.time_s, f.process))


class WorldFailed(ChildProcessError):  # noqa: N818  (names what happened, as ChildProcessError's kin do)
    """A job ended because of one process; all others have been ended too.

    Args:
        cause: the failure that explains the others.
        message: one line that names the rank, what it did, the peer and the cause.
    """

    def __init__(self, message: str, cause: Failure) -> None:
        super().__init__(message)
        self.cause = cause
