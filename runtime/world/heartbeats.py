"""Hosts of one run that hear of each other: nobody else tells one that hangs from a slow wire."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore

from runtime.world.owner import Owner

BEAT_EVERY_S = 0.5
LOOKS = 20  # in a row that must find nothing new: 10 s
SILENCE_S = LOOKS * BEAT_EVERY_S
PUBLISHED_S = 1.0  # that a host's silence may take to be told to the others


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or a container, of a run."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        count = len(self.ranks)
        of = f"rank {self.ranks[0]}" if count == 1 else f"{count} ranks from {self.ranks[0]}"
        return f"host {self.name!r:.80} ({of})"


class Store(Protocol):
    """What all hosts reach: torch's, or one of the same manners."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a number that begins at 0; what it is then."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Put the latter where the former is, or nothing yet; what is there then."""


class Heartbeats:
    """Two threads on the lowest rank of a host: one counts up in a store, one watches the next host's number.

    The hosts are a ring, so that the store has three requests a host and beat, however many there are, and
    somebody who lives watches somebody who does not. Who finds the next host silent says so in the store,
    and all end by its name. Where the store does not answer, its host is silent, or this one is cut off.

    Looks are counted, not seconds, as `StopWatch` does: a host that was stopped has not looked meanwhile.

    Args:
        connect: to the store; called in a thread, as a store that hangs answers nobody.
        place: of this host in `hosts`, of which the first has the store.
        end: called once, with what went wrong in a line.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        hosts: Sequence[Host],
        place: int,
        end: Callable[[str], None],
        *,
        every_s: float = BEAT_EVERY_S,
    ) -> None:
        self._connect, self._hosts, self._place, self._end = connect, hosts, place, end
        self._next, self._every_s = (place + 1) % len(hosts), every_s
        self._over, self._published = threading.Event(), threading.Event()
        self._num_answers = self._next_count = 0
        self._silent: int | None = None  # place of the host that is, as it was found here or told
        for run in (self._beat, self._watch):
            threading.Thread(target=run, name="heartbeats", daemon=True).start()

    def leave(self) -> None:
        """Beat and watch no longer."""
        self._over.set()

    def _beat(self) -> None:
        store: Store | None = None
        while not self._over.wait(self._every_s):
            try:
                store = store or self._connect()
                self._exchange(store)
            except RuntimeError:  # torch's, of connections: the watch counts what is not answered
                store = None

    def _exchange(self, store: Store) -> None:
        store.add(f"beat{self._place}", 1)
        self._next_count = store.add(f"beat{self._next}", 0)
        told = store.compare_set("silent", "", "" if self._silent is None else str(self._silent))
        if told:  # by whoever was the first
            self._silent = int(told)
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
    """Those on which the ranks are, in the order of their lowest ranks."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, owner in enumerate(owners):
        ranks.setdefault((owner.host, owner.boot, owner.space), []).append(rank)
    return tuple(Host(name, tuple(own)) for (name, *_), own in ranks.items())


def heartbeats_of(
    owners: Sequence[Owner], rank: int, environment: Mapping[str, str], end: Callable[[str], None]
) -> Heartbeats | None:
    """Those of this rank's host, through the launcher's store; None: another rank beats, or nobody has to.

    Args:
        owners: the process of every rank; the first one's tells this attempt from a launcher's earlier ones.
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
