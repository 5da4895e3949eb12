"""Heartbeats among the hosts of a run, which distinguish a hanging host from a slow link."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore

from runtime.world.owner import Owner

BEAT_EVERY_S = 0.5
LOOKS = 20  # consecutive checks without a change: 10 s
SILENCE_S = LOOKS * BEAT_EVERY_S
PUBLISHED_S = 1.0  # limit for publishing a host's silence to the others


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or a container, of a run."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        count = len(self.ranks)
        ranks_text = f"rank {self.ranks[0]}" if count == 1 else f"{count} ranks from {self.ranks[0]}"
        return f"host {self.name!r:.80} ({ranks_text})"


class Store(Protocol):
    """A store that all hosts reach: torch's, or one with the same interface."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a number that starts at 0; returns the result."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the value to `desired` if it is `expected` or missing; returns the value afterwards."""


class Heartbeats:
    """Two threads on a host's lowest rank: one increments a counter in a store, one watches the next host's.

    The hosts are a ring, so that the store has three requests per host and beat, for any number of hosts, and
    some live host watches a dead one. A host that finds the next one silent publishes that in the store, and
    all end with its name. Where the store does not answer, its host is silent, or this one is disconnected.

    Checks are counted, not seconds, as in `StopWatch`: a host that was stopped has made no checks in that
    time.

    Args:
        connect: connects to the store; called in a thread, as it may hang.
        index: of this host in `hosts`; the first one has the store.
        end: called once, with an error line.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        hosts: Sequence[Host],
        index: int,
        end: Callable[[str], None],
        *,
        every_s: float = BEAT_EVERY_S,
    ) -> None:
        self._connect, self._hosts, self._place, self._end = connect, hosts, index, end
        self._next, self._every_s = (index + 1) % len(hosts), every_s
        self._over, self._published = threading.Event(), threading.Event()
        self._num_answers = self._next_count = 0
        self._silent: int | None = None  # index of a silent host, as observed here or published
        for run in (self._beat, self._watch):
            threading.Thread(target=run, name="heartbeats", daemon=True).start()

    def leave(self) -> None:
        """Stop both threads."""
        self._over.set()

    def _beat(self) -> None:
        store: Store | None = None
        while not self._over.wait(self._every_s):
            try:
                store = store or self._connect()
                self._exchange(store)
            except RuntimeError:  # torch's for connections; missing answers are counted by the watch
                store = None

    def _exchange(self, store: Store) -> None:
        store.add(f"beat{self._place}", 1)
        self._next_count = store.add(f"beat{self._next}", 0)
        silent = store.compare_set("silent", "", "" if self._silent is None else str(self._silent))
        if silent:  # by the first host that published
            self._silent = int(silent)
            self._published.set()
        self._num_answers += 1

    def _watch(self) -> None:
        unanswered = unheard = 0
        before = (0, 0)
        while not self._over.wait(self._every_s) and self._silent is None:
            now = (self._num_answers, self._next_count)
            is_answered, is_heard = (new != old for new, old in zip(now, before, strict=True))
            before = now
            unanswered = 0 if is_answered else unanswered + 1
            unheard = 0 if is_heard else unheard + is_answered
            if unheard >= LOOKS:
                self._silent = self._next
            elif unanswered >= LOOKS:
                break
        if not self._over.is_set():
            self._end(self._verdict())

    def _verdict(self) -> str:
        for_long = f"for {LOOKS * self._every_s:g} s"
        if self._silent is None:
            return f"no answer from {self._hosts[0]} {for_long}: it hangs, or this one is cut off"
        self._published.wait(PUBLISHED_S)
        return f"no heartbeat of {self._hosts[self._silent]} {for_long}: it hangs or is cut off"


def hosts_of(owners: Sequence[Owner]) -> tuple[Host, ...]:
    """The hosts of the ranks, in the order of their lowest ranks."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, owner in enumerate(owners):
        ranks.setdefault((owner.host, owner.boot, owner.space), []).append(rank)
    return tuple(Host(name, tuple(own)) for (name, *_), own in ranks.items())


def heartbeats_of(
    owners: Sequence[Owner], rank: int, environment: Mapping[str, str], end: Callable[[str], None]
) -> Heartbeats | None:
    """Heartbeats of this rank's host, by the launcher's store; None: done by another rank, or not needed.

    Args:
        owners: the process of every rank; the first one identifies this attempt among the launcher's.
    """
    hosts = hosts_of(owners)
    index = next((index for index, host in enumerate(hosts) if host.ranks[0] == rank), None)
    if len(hosts) == 1 or index is None:
        return None
    first, address, port = owners[0], environment["MASTER_ADDR"], int(environment["MASTER_PORT"])

    def connect() -> Store:
        wait = timedelta(seconds=SILENCE_S)
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
        return PrefixStore(f"heartbeats/{first.host}/{first.pid}/{first.start}", store)

    return Heartbeats(connect, hosts, index, end)
