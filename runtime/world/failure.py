"""Failures of ranks, and the choice of the one to name as cause."""

import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass


class RankError(RuntimeError):
    """A failure of a rank within its program; the message names rank and action.

    `peers` are the ranks it waited for, where the failure may be theirs.
    """

    def __init__(self, message: str, *, peers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers


def first_line(error: BaseException) -> str:
    """The message of an error, without gloo's source location, C++ stack and advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^\[[^\]]*\.(?:cc|h|cpp):\d+\]\s*", "", lines[0])
    return text.partition(". This is typically")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A process's failure, as its parent observed it.

    Args:
        process: index in the world.
        time_s: on the machine's monotonic clock.
        signal_number: the signal that killed it, or None.
        exit_code: of a process that exited by itself, or None.
        is_stopped: whether it was stopped by a signal, and killed for that.
        kind: class name of the exception, or None.
        text: of the exception.
        trace: its traceback, for a log.
        is_echo: whether it failed while waiting for another rank, which may be the cause.
        is_value_error: whether it refused bad input.
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
        """A description in one line; `where` names the rank and its action."""
        if self.is_stopped:
            return f"{where}: stopped by a signal and not continued"
        if self.signal_number is not None:
            return f"{where}: killed by {signal.Signals(self.signal_number).name}"
        if self.exit_code is not None:
            return f"{where}: the process ended with exit code {self.exit_code}"
        return self.text if self.kind == "RankError" else f"{where}: {self.kind}: {self.text}"


def failure_of(process: int, error: BaseException) -> Failure:
    """The exception of a process, in a form that can be pickled."""
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
    """A process that ended without a report; negative exit codes are signals."""
    is_signal = exit_code < 0
    return Failure(
        process=process,
        time_s=time.perf_counter(),
        signal_number=-exit_code if is_signal else None,
        exit_code=None if is_signal else exit_code,
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that explains the others.

    A dead process precedes an exception, a rank's own exception precedes one raised while waiting for another
    rank; then the earliest counts, then the lowest process.
    """
    return min(failures, key=lambda f: (f.kind is not None, f.is_echo, f.time_s, f.process))


class WorldFailed(ChildProcessError):  # noqa: N818  (the name says what happened)
    """A job that was ended because of one process; all others have been ended too.

    Args:
        cause: the failure that explains the others.
        message: one line that names the rank, its action, the peer and the cause.
    """

    def __init__(self, message: str, cause: Failure) -> None:
        super().__init__(message)
        self.cause = cause
