"""Kills nodes of a training while they compute, from outside: a thread that watches and sends SIGKILL."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from runtime.elastic.nodes import Nodes
from runtime.elastic.orders import Moment

LOOK_EVERY_S = 0.0005


class NodeKiller(threading.Thread):
    """All processes of its victims die at once, as soon as the first victim is in a pass, or at the end.

    Where this thread gets its turn only after the victim's vote, the step counts: the next one is cut off.

    Args:
        nodes: of the training.
        victims: the first is watched, so it should be one that works.
    """

    def __init__(self, nodes: Nodes, victims: Sequence[str]) -> None:
        super().__init__(name="node-killer", daemon=True)
        self._nodes, self._victims = nodes, victims
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        self.killed_s: dict[str, float] = {}

    def run(self) -> None:
        """Wait, then kill."""
        while not self._computes() and not self._is_over.wait(LOOK_EVERY_S):
            continue
        for victim in () if self._is_given_up.is_set() else self._victims:
            self._kill(victim)

    def give_up(self) -> None:
        """Spare those who have not been killed yet, and return when that is sure."""
        self._is_given_up.set()
        self.end()

    def end(self) -> None:
        """Kill those who never computed while the step lasted, and return when it is done."""
        self._is_over.set()
        self.join()

    def _computes(self) -> bool:
        passes = (Moment.FORWARD, Moment.BACKWARD)
        return any(moment in passes for moment in self._nodes.moments(self._victims[0]))

    def _kill(self, victim: str) -> None:
        for process in self._nodes.process_ids(victim):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                self.killed_s.setdefault(victim, time.monotonic())
