"""Hosts that hear of each other: nobody healthy is named, who is silent is, and all are told."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from torch.distributed import TCPStore

from runtime.world.heartbeats import LOOKS, Heartbeats, Host, heartbeats_of, hosts_of
from runtime.world.owner import Owner, this_process
from tests.waiting import PATIENCE_S, eventually

EVERY_S = 0.02
HOSTS = (Host("a", (0, 1)), Host("b", (2,)), Host("c", (3, 4, 5)))


@dataclass
class Numbers:
    """A store of threads; while `hangs` is set nobody gets an answer."""

    numbers: Counter[str] = field(default_factory=Counter)
    answers: threading.Event = field(default_factory=threading.Event)
    silent: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.answers.set()

    def add(self, key: str, value: int, /) -> int:
        self.answers.wait(PATIENCE_S)
        with self.lock:
            self.numbers[key] += value
            return self.numbers[key]

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        assert (key, expected) == ("silent", "")
        with self.lock:
            self.silent = self.silent or desired
            return self.silent.encode()


def started(store: Numbers, said: dict[int, str]) -> list[Heartbeats]:
    def beats(place: int) -> Heartbeats:
        return Heartbeats(
            lambda: store, HOSTS, place, lambda text: said.update({place: text}), every_s=EVERY_S
        )

    return [beats(place) for place in range(len(HOSTS))]


def test_a_host_that_falls_silent_is_named_by_all_others_and_no_other_before() -> None:
    store, said = Numbers(), dict[int, str]()
    hosts = started(store, said)
    assert eventually(lambda: store.numbers["beat0"] > LOOKS // 2)
    assert said == {}
    hosts[1].leave()
    assert eventually(lambda: len(said) == 2)
    silence = f"no heartbeat of host 'b' (rank 2) for {LOOKS * EVERY_S:g} s: it hangs or is cut off"
    assert said == {0: silence, 2: silence}


def test_a_store_that_does_not_answer_is_its_hosts_or_the_askers_fault() -> None:
    store, said = Numbers(), dict[int, str]()
    hosts = started(store, said)
    assert eventually(lambda: store.numbers["beat2"] > 1)
    store.answers.clear()
    assert eventually(lambda: len(said) == 3)
    silence = f"no answer from host 'a' (2 ranks from 0) for {LOOKS * EVERY_S:g} s"
    assert set(said.values()) == {f"{silence}: it hangs, or this one is cut off"}
    for host in hosts:
        host.leave()
    store.answers.set()


def test_hosts_are_told_apart_by_container_and_boot_and_each_beats_by_its_lowest_rank() -> None:
    def owner(host: str, space: str) -> Owner:
        return Owner(host=host, boot="x", space=space, pid=1, start=1)

    owners = [owner("a", "1"), owner("a", "2"), owner("a", "1"), owner("b", "1")]
    assert hosts_of(owners) == (Host("a", (0, 2)), Host("a", (1,)), Host("b", (3,)))
    assert heartbeats_of(owners, 2, {}, lambda text: None) is None
    assert heartbeats_of([owner("a", "1")] * 2, 0, {}, lambda text: None) is None


def test_they_beat_through_the_launchers_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, other = this_process(), Owner(host="other", boot="", space="", pid=1, start=1)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    said: list[str] = []
    here = heartbeats_of([first, other], 0, environment, said.append)
    there = heartbeats_of([first, other], 1, environment, said.append)
    assert here is not None
    assert there is not None
    key = f"heartbeats/{first.host}/{first.pid}/{first.start}/beat"
    assert eventually(lambda: min(store.add(f"{key}{index}", 0) for index in (0, 1)) >= 2)
    here.leave()
    there.leave()
    assert said == []
