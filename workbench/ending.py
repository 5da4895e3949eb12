"""A signal that asks a program to end lets it clean up, and ends it with the code that shells expect."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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
def noting_interrupt(answer: str) -> Iterator[Callable[[], bool]]:
    """Within it a first Ctrl-C is answered by a line and noted; a second one raises KeyboardInterrupt.

    Yields what says whether there was a first one. Where Ctrl-C is ignored it stays so.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        came.append(number)
        os.write(sys.stderr.fileno(), f"\n{answer}\n".encode())  # a stream may be in the middle of a write

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


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


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
    raise Ended(number)
