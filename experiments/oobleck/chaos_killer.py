"""Kills nodes of a running job at chosen moments, from outside: a thread that watches and sends SIGKILL."""

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from runtime.elastic.nodes import Nodes
from runtime.elastic.orders import Moment

LOOK_EVERY_S = 0.0002
RECOVERY = (Moment.GROUPS, Moment.COPYING)


class Target(Enum):
    """What the victims are to be doing."""

    FORWARD = (Moment.FORWARD,)
    BACKWARD = (Moment.BACKWARD,)
    REDUCTION = (Moment.REDUCING,)
    VOTED = (Moment.VOTED,)
    RECOVERY = RECOVERY
    GATHERING = (Moment.GATHERING,)  # where weights are shared out


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """Nodes that die at once, when the first of them does what is wanted; after the shot before it."""

    victims: tuple[str, ...]
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A node that was killed, and what the rank that was hit was doing last."""

    node: str
    moment: Moment
    time_s: float  # on the machine's monotonic clock


class Killer(threading.Thread):
    """Fires its shots one after the other; one that never finds its moment fires when patience is over.

    Of each victim one random rank is hit: the rest of the node is the supervisor's to end.
    """

    def __init__(self, nodes: Nodes, shots: Sequence[Shot], rng: random.Random, patience_s: float) -> None:
        super().__init__(name="killer", daemon=True)
        self._nodes, self._shots, self._patience_s = nodes, shots, patience_s
        self._places = {victim: rng.random() for shot in shots for victim in shot.victims}
        self._delay_s = [rng.uniform(0, 0.003) for _ in shots]
        self.kills: list[Kill] = []

    def run(self) -> None:
        for shot, delay_s in zip(self._shots, self._delay_s, strict=True):
            deadline = time.monotonic() + self._patience_s
            while time.monotonic() < deadline and not self._is_seen(shot):
                time.sleep(LOOK_EVERY_S)
            time.sleep(delay_s)
            for victim in shot.victims:
                self._hit(victim)

    def _is_seen(self, shot: Shot) -> bool:
        return any(moment in shot.target.value for moment in self._nodes.moments(shot.victims[0]))

    def _hit(self, victim: str) -> None:
        processes, moments = self._nodes.process_ids(victim), self._nodes.moments(victim)
        if not processes or len(moments) != len(processes):
            return  # it is gone already
        place = int(self._places[victim] * len(processes))
        with suppress(ProcessLookupError):
            os.kill(processes[place], signal.SIGKILL)
            self.kills.append(Kill(node=victim, moment=moments[place], time_s=time.monotonic()))
