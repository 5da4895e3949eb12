"""Ranks of one machine that watch each other, as external launchers do not."""

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
    """Another rank of this machine; `descriptor` identifies its process even if its id is reused."""

    rank: int
    pid: int
    descriptor: int


class Neighbours:
    """A thread that kills ranks of this machine that were stopped by a signal, and records them.

    The peers of a stopped rank would wait for it until their timeout, and the launcher would notice nothing.
    Once it is dead, their connections break, and the launcher names it and ends the others. The lowest rank
    that is not stopped does it; if all are stopped none does, and all may continue.

    Args:
        owners: the process of every rank, by rank; those of other machines are ignored.
    """

    def __init__(self, rank: int, owners: Sequence[Owner]) -> None:
        self._rank, self._peers = rank, tuple(_peers(rank, owners))
        self._over = threading.Event()
        self._stopped: list[int] = []
        threading.Thread(target=self._watch, name="neighbours", daemon=True).start()

    @property
    def cause(self) -> str | None:
        """The first stop that was observed, as a text; None if there was none."""
        if not self._stopped:
            return None
        return f"rank {self._stopped[0]} was stopped by a signal and not continued, so it was killed"

    def leave(self) -> None:
        """Stop watching."""
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
    """The process of every rank, by rank; a collective of all ranks."""
    owners: list[Owner | None] = [None] * size
    dist.all_gather_object(owners, this_process())
    return tuple(owner for owner in owners if owner is not None)


def _peers(rank: int, owners: Sequence[Owner]) -> list[_Peer]:
    if not hasattr(os, "pidfd_open"):
        return []
    peers = []
    for other, owner in enumerate(owners):
        if other != rank and owner.life() is Life.ALIVE:
            with suppress(OSError):
                peers.append(_Peer(other, owner.pid, os.pidfd_open(owner.pid)))
    return peers
