"""Kills nodes of a training while they compute, from outside: a thread that watches and sends SIGKILL."""

import os
import signal
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from runtime.elastic.nodes import Nodes
from runtime.elastic.orders import Moment

LOOK_EVERY_S = 0.0005
PASSES = (Moment.FORWARD, Moment.BACKWARD)
CONNECTING = (Moment.GROUPS,)


class NodeKiller(threading.Thread):
    """All processes of its victims die at once, as soon as the first victim is in a pass, or at the end.

    Where this thread gets its turn only after the victim's vote, the step counts: the next one is cut off.

    Args:
        nodes: of the training.
        victims: the first is watched, so it should be one that works.
        in_recovery: victims of the recovery from that, when the first of them connects to the others left.
    """

    def __init__(self, nodes: Nodes, victims: Sequence[str], in_recovery: Sequence[str] = ()) -> None:
        super().__init__(name="node-killer", daemon=True)
        self._nodes, self._victims, self._in_recovery = nodes, victims, in_recovery
        self._is_over, self._is_given_up = threading.Event(), threading.Event()
        self.killed_s: dict[str, float] = {}

    def run(self) -> None:
        """Wait, then kill."""
        self._kill_when(self._victims, PASSES)
        if self._in_recovery:
            self._kill_when(self._in_recovery, CONNECTING)

    def give_up(self) -> None:
        """Spare those who have not been killed yet, and return when that is sure."""
        self._is_given_up.set()
        self.end()

    def end(self) -> None:
        """Kill those who never computed while the step lasted, and return when it is done."""
        self._is_over.set()
        self.join()

    def _kill_when(self, victims: Sequence[str], moments: Collection[Moment]) -> None:
        while not any(moment in moments for moment in self._nodes.moments(victims[0])):
            if self._is_over.wait(LOOK_EVERY_S):
                break
        for victim in () if self._is_given_up.is_set() else victims:
            self._kill(victim)

    def _kill(self, victim: str) -> None:
        for process in self._nodes.process_ids(victim):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                self.killed_s.setdefault(victim, time.monotonic())
