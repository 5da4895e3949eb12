"""A signal that asks a program to end lets it clean up, and ends it with the code that shells expect."""

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
    """A signal came; the exit code is 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.name = signal.Signals(number).name


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise `Ended` in the main thread; a second one ends at once.

    Signals that are ignored, as `nohup` has it, stay ignored.
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
    """Within it the first of these signals is noted, with a line; a second one raises KeyboardInterrupt.

    Yields the one that came, or nothing yet. Those that are ignored, as in a background job, stay so.
    """
    came: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in signals}
    if threading.current_thread() is not threading.main_thread():
        yield came  # signals are the main thread's
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if came:
            raise KeyboardInterrupt
        came.append(signal.Signals(number))
        if answer:
            # a stream may be in the middle of a write
            os.write(sys.stderr.fileno(), f"\n{answer}\n".encode())

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, note)
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def forking() -> Iterator[None]:
    """Around a fork: a signal that asks to end waits until the child has undone `ending_by_signal`.

    Else `Ended` would go up the stack that the child has of its parent, and clean up what is the parent's.
    Python 3.12 warns of any fork beside threads; those of this program are idle at its forks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ended_by_default() -> None:
    """Undo it in a process forked within it, whose parent cleans up."""
    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def leave(code: int) -> NoReturn:
    """End this process at once: for programs with gloo's process groups.

    When Python takes itself down, gloo's threads outlive it. They wait for collectives that are under way,
    whose peers may be waiting for the end of this process. One that then lets go of a Python object aborts
    the process: Python ends a thread that asks for its lock by unwinding code that must not be unwound.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
    raise Ended(number)
