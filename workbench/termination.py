"""Termination signals let the program clean up, and end it with the exit code that shells expect."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ASKING = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """A signal arrived; the exit code is 128 plus its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.name = signal.Signals(number).name


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """In this context SIGTERM and SIGHUP raise `Ended` in the main thread; a second one ends at once.

    Signals that are ignored, as under `nohup`, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = {number: signal.getsignal(number) for number in ASKING}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def noting(*signals: signal.Signals, answer: str = "") -> Iterator[Sequence[signal.Signals]]:
    """In this context the first of these signals is noted, with a line; a second one ends at once.

    That is by KeyboardInterrupt for SIGINT, by `Ended` for others. Yields a sequence that holds the signal
    once it has arrived. Ignored signals, as in a background job, stay ignored.
    """
    arrived: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in signals}
    if threading.current_thread() is not threading.main_thread():
        yield arrived  # signals are the main thread's
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if arrived:
            raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)
        arrived.append(signal.Signals(number))
        if answer:
            # a stream may be in the middle of a write
            os.write(sys.stderr.fileno(), f"\n{answer}\n".encode())

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, note)
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def forking() -> Iterator[None]:
    """Around a fork: termination signals wait until the child has undone `ending_by_signal`.

    Otherwise `Ended` would unwind the stack that the child copied from its parent, and clean up the parent's
    resources. Ctrl-C does not reach the child, see `uninterrupted`. Python 3.12 warns of any fork beside
    threads; those of this program are idle at its forks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        with uninterrupted(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Around the start of another process, for which SIGINT stays blocked.

    A terminal sends it to all processes of a command, and the one that was started first decides when to
    stop. One that is still starting would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ended_by_default() -> None:
    """Undo `ending_by_signal` in a process forked inside it, whose parent cleans up."""
    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def leave(code: int) -> NoReturn:
    """End this process at once: for programs with gloo's process groups.

    gloo's threads outlive the interpreter's shutdown. They wait for collectives in progress, whose peers may
    wait for the end of this process. One that then releases a Python object aborts the process, as Python
    ends a thread that requests the interpreter's lock by unwinding code that must not be unwound.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
    raise Ended(number)
