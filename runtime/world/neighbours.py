"""Ranks of one machine that watch each other, as nobody does where a foreign launcher started them."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from runtime.world.owner import Life, Owner, this_process
from workbench.stopped import LOOK_EVERY_S, StopWatch, is_stopped


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another rank of this machine; `descriptor` is of its process, whoever gets its number later."""

    rank: int
    pid: int
    descriptor: int


class Neighbours:
    """A thread that kills the ranks of this machine that a signal has stopped, and knows which they were.

    The peers of a stopped rank wait for it as long as they may, and nothing that the launcher sees is
    wrong. Once it is dead, their connections break, and the launcher names it and ends the others. The
    lowest rank that is not stopped does it; where all are stopped nobody does, and all may go on.

    Args:
        owners: the process of every rank, by rank; those of other machines are not looked at.
    """

    def __init__(self, rank: int, owners: Sequence[Owner]) -> None:
        self._rank, self._peers = rank, tuple(_peers(rank, owners))
        self._over = threading.Event()
        self._stopped: list[int] = []
        threading.Thread(target=self._watch, name="neighbours", daemon=True).start()

    @property
    def cause(self) -> str | None:
        """What went wrong with them; None: nothing that is known here."""
        if not self._stopped:
            return None
        return f"rank {self._stopped[0]} was stopped by a signal and not continued, so it was killed"

    def leave(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        watch, by_id = StopWatch(), {peer.pid: peer for peer in self._peers}
        while by_id and not self._over.wait(LOOK_EVERY_S):
            for pid in watch.stopped(by_id):
                peer = by_id.pop(pid)
                self._stopped.append(peer.rank)
                if all(each.rank > self._rank for each in by_id.values() if not is_stopped(each.pid)):
                    self._kill(peer)

    def _kill(self, peer: _Peer) -> None:
        sys.stderr.write(
            f"rank {peer.rank}, process {peer.pid}: stopped by a signal and not continued, so killed\n"
        )
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(peer.descriptor, signal.SIGKILL)


def owners_of_all(size: int) -> tuple[Owner, ...]:
    """The process of every rank, by rank; a collective of all."""
    owners: list[Owner | None] = [None] * size
    dist.all_gather_object(owners, this_process())
    return tuple(owner for owner in owners if owner is not None)


def _peers(rank: int, owners: Sequence[Owner]) -> list[_Peer]:
    if not hasattr(os, "pidfd_open"):
        return []
    found = []
    for other, owner in enumerate(owners):
        if other != rank and owner.life() is Life.ALIVE:
            with suppress(OSError):
                found.append(_Peer(other, owner.pid, os.pidfd_open(owner.pid)))
    return found
