"""Links: a message occupies exactly one, its route's slowest; who goes first is decided once per instant."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from simpy.core import Environment

from sim.clock import after, at_last
from workbench.cost.hardware import Cluster, Link
from workbench.plan.lowered import Transfer


class Port:
    """A link's sending end: free or busy, with the messages that wait for it."""

    __slots__ = ("bytes_per_s", "is_free", "latency_s", "waiting")

    def __init__(self, link: Link) -> None:
        self.bytes_per_s = link.bytes_per_s
        self.latency_s = link.latency_s
        self.is_free = True
        self.waiting: list[tuple[float, int]] = []  # (ready time, row), a heap


def nodes_of_ranks(cluster: Cluster) -> list[int]:
    """Rank -> its node."""
    return [index for index, node in enumerate(cluster.nodes) for _ in range(node.num_ranks)]


def port_of(
    cluster: Cluster, node_of: Sequence[int], transfer: Transfer
) -> tuple[tuple[str, int], Link] | None:
    """Name and link of the port that a row occupies; None where it stays on its rank."""
    source = transfer.source_rank
    if transfer.destination_ranks == (source,):
        return None
    nodes = {node_of[rank] for rank in (source, *transfer.destination_ranks)}
    port = ("rank", source) if len(nodes) == 1 else ("node", node_of[source])
    return port, cluster.link_of(nodes)


class Network:
    """Carries rows from the end of their producer to the start of their consumer.

    Inside a node a message occupies the sending rank's port, between nodes the sending
    node's NIC, which its ranks share. It starts when the port is free and no waiting
    message was ready earlier (ties: lower row), occupies the port for bytes / bandwidth and
    arrives latency later: (start + transmit) + latency. A broadcast is one message, with
    one slot for all its destinations; it becomes ready when the row it follows is there.

    Args:
        env: the clock.
        cluster: nodes and links.
        transfers: rows 0..n-1.
        arrived: called with a row when it is there.
    """

    def __init__(
        self,
        env: Environment,
        cluster: Cluster,
        transfers: Sequence[Transfer],
        arrived: Callable[[int], None],
    ) -> None:
        self._env = env
        self._cluster = cluster
        self._arrived = arrived
        self._node = nodes_of_ranks(cluster)
        self._ports: dict[tuple[str, int], Port] = {}
        self._port = [self._port_of(transfer) for transfer in transfers]
        self._num_bytes = [transfer.num_bytes for transfer in transfers]
        self._followers: dict[int, list[int]] = {}
        for transfer in transfers:
            if transfer.after is not None:
                self._followers.setdefault(transfer.after, []).append(transfer.row)
        self._undecided: list[Port] = []  # ports to look at when this instant ends
        self.ready_s: dict[int, float] = {}
        self.start_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}

    def send(self, row: int) -> None:
        """The row is ready: a local one is there at once, any other waits for its port."""
        port = self._port[row]
        self.ready_s[row] = now = self._env.now
        if port is None:
            self._deliver(row)
            return
        heappush(port.waiting, (now, row))
        if port.is_free:
            self._decide_later(port)

    def _port_of(self, transfer: Transfer) -> Port | None:
        found = port_of(self._cluster, self._node, transfer)
        if found is None:
            return None
        key, link = found
        if key not in self._ports:
            self._ports[key] = Port(link)
        return self._ports[key]

    def _decide_later(self, port: Port) -> None:
        if not self._undecided:
            at_last(self._env, self._decide)
        self._undecided.append(port)

    def _decide(self) -> None:
        """Every free port takes its lowest (ready time, row)."""
        ports, self._undecided = self._undecided, []
        for port in ports:
            if port.is_free and port.waiting:
                port.is_free = False
                row = heappop(port.waiting)[1]
                self.start_s[row] = self._env.now
                transmit_s = self._num_bytes[row] / port.bytes_per_s
                after(self._env, transmit_s, self._transmitted, (port, row))

    def _transmitted(self, message: tuple[Port, int]) -> None:
        port, row = message
        port.is_free = True
        if port.waiting:
            self._decide_later(port)
        after(self._env, port.latency_s, self._deliver, row)

    def _deliver(self, row: int) -> None:
        self.end_s[row] = self._env.now
        self._arrived(row)
        for follower in self._followers.get(row, ()):
            self.send(follower)
