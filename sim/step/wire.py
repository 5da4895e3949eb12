"""Links: a message occupies exactly one, its route's slowest; who goes first is decided once per instant."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy.core import Environment

from sim.clock import after, at_last
from workbench.cost.hardware import Cluster, Link
from workbench.plan.lowered import Lowered


class Wires(NamedTuple):
    """Of every row, [R] each.

    Args:
        transmit_s: how long it occupies its port.
        latency_s: from then until it is there.
        port: number of its port, -1 where nothing travels.
    """

    transmit_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    port: NDArray[np.int64]


def wires(lowered: Lowered) -> Wires:
    """What every row occupies: inside a node the sending rank's port, between nodes the sending node's card.

    Complexity: O(rows).
    """
    cluster, rows = lowered.plan.cluster, lowered.transfers
    node_of = [index for index, node in enumerate(cluster.nodes) for _ in range(node.num_ranks)]
    transmit_s, latency_s = np.zeros(len(rows)), np.zeros(len(rows))
    port = np.full(len(rows), -1, dtype=np.int64)
    numbers: dict[tuple[str, int], int] = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[int, Link] | None] = {}
    for place, row in enumerate(rows):
        ends = row.source_rank, row.destination_ranks
        if ends not in known:
            key_link = _port_of(cluster, node_of, *ends)
            known[ends] = key_link and (numbers.setdefault(key_link[0], len(numbers)), key_link[1])
        found = known[ends]
        if found is not None:
            port[place], link = found
            transmit_s[place] = row.num_bytes / link.bytes_per_s
            latency_s[place] = link.latency_s
    return Wires(transmit_s, latency_s, port)


def _port_of(
    cluster: Cluster, node_of: Sequence[int], source: int, destinations: tuple[int, ...]
) -> tuple[tuple[str, int], Link] | None:
    """Name and link of the port between these ranks; None where nothing travels."""
    if destinations == (source,):
        return None
    nodes = {node_of[rank] for rank in (source, *destinations)}
    port = ("rank", source) if len(nodes) == 1 else ("node", node_of[source])
    return port, cluster.link_of(nodes)


class Network:
    """Carries rows from the end of their producer to the start of their consumer.

    A message starts when its port is free and no waiting message was ready earlier (ties: lower row),
    occupies the port for bytes / bandwidth and arrives latency later: (start + transmit) + latency. A
    broadcast is one message, with one slot for all its destinations. Messages that start together and take
    equally long end in one event.

    Args:
        env: the clock.
        wires: what every row occupies.
        arrived: called with a row when it is there.
    """

    def __init__(self, env: Environment, wires: Wires, arrived: Callable[[int], None]) -> None:
        self._env, self._arrived = env, arrived
        self._transmit_s: list[float] = wires.transmit_s.tolist()
        self._latency_s: list[float] = wires.latency_s.tolist()
        self._port: list[int] = wires.port.tolist()
        num_ports = max(self._port, default=-1) + 1
        self._is_free = [True] * num_ports
        self._waiting: list[list[tuple[float, int]]] = [[] for _ in range(num_ports)]  # (ready, row), heaps
        self._undecided: list[int] = []  # ports to look at when this instant ends
        self.ready_s = [nan] * len(self._port)
        self.start_s = [nan] * len(self._port)
        self.end_s = [nan] * len(self._port)

    def send(self, row: int) -> None:
        """The row is ready: a local one is there at once, any other waits for its port."""
        self.ready_s[row] = now = self._env.now
        port = self._port[row]
        if port < 0:
            self._deliver([row])
            return
        heappush(self._waiting[port], (now, row))
        if self._is_free[port]:
            self._decide_later(port)

    def _decide_later(self, port: int) -> None:
        if not self._undecided:
            at_last(self._env, self._decide)
        self._undecided.append(port)

    def _decide(self) -> None:
        """Every free port takes its lowest (ready time, row)."""
        ports, self._undecided = self._undecided, []
        now = self._env.now
        started: dict[float, list[int]] = {}
        for port in ports:
            waiting = self._waiting[port]
            if waiting and self._is_free[port]:
                self._is_free[port] = False
                row = heappop(waiting)[1]
                self.start_s[row] = now
                started.setdefault(self._transmit_s[row], []).append(row)
        for transmit_s, rows in started.items():
            after(self._env, transmit_s, self._transmitted, rows)

    def _transmitted(self, rows: list[int]) -> None:
        travelling: dict[float, list[int]] = {}
        for row in rows:
            port = self._port[row]
            self._is_free[port] = True
            if self._waiting[port]:
                self._decide_later(port)
            travelling.setdefault(self._latency_s[row], []).append(row)
        for latency_s, together in travelling.items():
            after(self._env, latency_s, self._deliver, together)

    def _deliver(self, rows: list[int]) -> None:
        now = self._env.now
        for row in rows:
            self.end_s[row] = now
            self._arrived(row)
