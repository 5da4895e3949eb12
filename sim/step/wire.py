"""Links: a message occupies exactly one, the slowest of its route; arbitration is once per instant."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy.core import Environment

from sim.clock import after, at_last
from workbench.plan.lowered import Lowered
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.port import Port, port_of


class Wires(NamedTuple):
    """Transmission of every row, [R] each.

    Args:
        transmit_s: seconds that it occupies its port.
        latency_s: seconds from then until it arrives.
        port: number of its port; -1 where nothing is sent.
    """

    transmit_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    port: NDArray[np.int64]


_KNOWN: LruCache[Wires] = LruCache(1_000_000, lambda of: len(of.port) + 1)


def wires(lowered: Lowered) -> Wires:
    """The port and times of every row, see `port_of`.

    Complexity: O(rows); recent results are cached.
    """
    key = Identity(lowered.transfers), Identity(lowered.plan.cluster)
    return _KNOWN.get_or(key, lambda: _wires(lowered))


def _wires(lowered: Lowered) -> Wires:
    cluster, rows = lowered.plan.cluster, lowered.rows
    numbers: dict[Port, int] = {}
    columns = np.zeros((3, len(rows.ends)))  # bytes a second, latency, port
    used, first = np.unique(rows.end, return_index=True)
    for end in used[np.argsort(first)].tolist():
        source, destinations = rows.ends[end]
        if destinations == (source,):
            columns[:, end] = inf, 0.0, -1
        else:
            port, link = port_of(cluster, source, destinations)
            columns[:, end] = link.bytes_per_s, link.latency_s, numbers.setdefault(port, len(numbers))
    bytes_per_s, latency_s, number = columns[:, rows.end]
    return Wires(rows.num_bytes / bytes_per_s, latency_s, number.astype(np.int64))


class Network:
    """Carries rows from the end of their producer to the start of their consumer.

    A message starts when its port is free and no waiting message was ready earlier (ties: lower row),
    occupies the port for bytes / bandwidth and arrives latency later: (start + transmit) + latency. A
    broadcast is one message, with one slot for all its destinations. Messages that start together and take
    equally long end in one event.

    Args:
        env: the clock.
        wires: port and times of every row.
        arrived: called with rows when they arrive.
    """

    def __init__(self, env: Environment, wires: Wires, arrived: Callable[[Iterable[int]], None]) -> None:
        self._env, self._arrived = env, arrived
        self._transmit_s: list[float] = wires.transmit_s.tolist()
        self._latency_s: list[float] = wires.latency_s.tolist()
        self._port: list[int] = wires.port.tolist()
        num_ports = max(self._port, default=-1) + 1
        self._is_free = [True] * num_ports
        self._waiting: list[list[tuple[float, int]]] = [[] for _ in range(num_ports)]  # heaps of (ready, row)
        self._undecided: list[int] = []  # ports to arbitrate at the end of this instant
        self.ready_s = [nan] * len(self._port)
        self.start_s = [nan] * len(self._port)
        self.end_s = [nan] * len(self._port)

    def send(self, rows: Iterable[int]) -> None:
        """Send rows that are ready: local rows arrive at once, others wait for their port."""
        now, is_free, ready_s = self._env.now, self._is_free, self.ready_s
        port_of, waiting = self._port, self._waiting
        local: list[int] = []
        undecided: list[int] = []
        for row in rows:
            ready_s[row] = now
            port = port_of[row]
            if port < 0:
                local.append(row)
                continue
            heappush(waiting[port], (now, row))
            if is_free[port]:
                undecided.append(port)
        self._decide_later(undecided)
        if local:
            self._deliver(local)

    def _decide_later(self, ports: list[int]) -> None:
        if ports and not self._undecided:
            at_last(self._env, self._decide)
        self._undecided += ports

    def _decide(self) -> None:
        """Let every free port take its lowest (ready time, row)."""
        ports, self._undecided = self._undecided, []
        now, is_free, start_s = self._env.now, self._is_free, self.start_s
        waiting, transmit_s_of = self._waiting, self._transmit_s
        started: defaultdict[float, list[int]] = defaultdict(list)
        for port in ports:
            if is_free[port] and waiting[port]:
                is_free[port] = False
                row = heappop(waiting[port])[1]
                start_s[row] = now
                started[transmit_s_of[row]].append(row)
        for transmit_s, rows in started.items():
            after(self._env, transmit_s, self._transmitted, rows)

    def _transmitted(self, rows: list[int]) -> None:
        is_free, waiting, latency_s_of = self._is_free, self._waiting, self._latency_s
        travelling: defaultdict[float, list[int]] = defaultdict(list)
        ports = [self._port[row] for row in rows]
        for port in ports:
            is_free[port] = True
        for row in rows:
            travelling[latency_s_of[row]].append(row)
        self._decide_later([port for port in ports if waiting[port]])
        for latency_s, together in travelling.items():
            after(self._env, latency_s, self._deliver, together)

    def _deliver(self, rows: list[int]) -> None:
        now, end_s = self._env.now, self.end_s
        for row in rows:
            end_s[row] = now
        self._arrived(rows)
