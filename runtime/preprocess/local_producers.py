"""Producers on the server's own host, which are replaced when they die."""

import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from runtime.preprocess.keys import ClientKeys
from runtime.preprocess.producer import settings_text
from workbench.stopped import StopWatch
from workbench.supervised import as_arguments, as_parent, same_imports
from workbench.termination import uninterrupted

MOST_STILLBORN = 3  # in a row, which means that all of them fail
KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # no reason to suspect the others
END_S = 5.0


class LocalProducers:
    """A fixed number of producers.

    Args:
        number: of producers; 0: they run on other hosts only.
        address: of the server, from this host.
        folder: of the data.
        silence_s: after which a producer without messages from the server ends.
    """

    def __init__(
        self, number: int, *, address: str, folder: Path, keys: ClientKeys | None, silence_s: float
    ) -> None:
        self._address, self._folder, self._keys, self._silence_s = address, folder, keys, silence_s
        self._numbers, self._token = count(), secrets.token_hex(4)
        self._at_work: dict[str, subprocess.Popen[str]] = {}
        self._unheard: set[str] = set()
        self._num_stillborn = 0
        self._watch = StopWatch()
        self.num_lost = 0
        for _ in range(number):
            self._start()

    @property
    def pids(self) -> dict[str, int]:
        """Producer -> process id."""
        return {name: process.pid for name, process in self._at_work.items()}

    def heard_of(self, name: str) -> None:
        """Record that a producer has contacted the server."""
        if name in self._unheard:
            self._unheard.discard(name)
            self._num_stillborn = 0

    def replace_lost(self) -> tuple[str, ...]:
        """Replace producers that have died since the last call; returns their names.

        Producers that have been stopped by a signal for some seconds are killed.

        Raises:
            ValueError: several in a row ended without contacting the server.
        """
        for pid in self._watch.stopped(process.pid for process in self._at_work.values()):
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the pid is still its own
            sys.stderr.write(f"producer, process {pid}: stopped by a signal and not continued, so killed\n")
        lost = [name for name, process in self._at_work.items() if process.poll() is not None]
        for name in lost:
            code = self._at_work.pop(name).returncode
            self.num_lost += 1
            if name in self._unheard:
                self._unheard.discard(name)
                self._num_stillborn += code not in KILLED_FROM_OUTSIDE
            if self._num_stillborn >= MOST_STILLBORN:
                raise ValueError(
                    f"producers: {MOST_STILLBORN} in a row ended before their first word, "
                    f"the last with exit code {code}"
                )
            self._start()
        return tuple(lost)

    def end(self) -> None:
        """End all producers; those that do not exit within 5 s are killed."""
        for process in self._at_work.values():
            process.terminate()
        for name, process in self._at_work.items():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            if process.poll() is None:
                sys.stderr.write(f"producer {name}, process {process.pid}: killed, and does not end\n")
        self._at_work.clear()

    def _start(self) -> None:
        name = f"local-{next(self._numbers)}-{self._token}"  # those of a killed server may still exist
        text = settings_text(
            self._address, self._folder, keys=self._keys, name=name, silence_s=self._silence_s
        )
        with uninterrupted():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.preprocess.producer", *as_arguments(as_parent())],
                stdin=subprocess.PIPE,
                text=True,
                env=same_imports(),
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # it has ended, which `replace_lost` reports
            pipe.write(text)
        self._at_work[name] = process
        self._unheard.add(name)
