"""Simulates the traffic between two units of unequal data parallelism: by leaders, brokers, or all pairs."""

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import gcd, isfinite

from simpy.core import Environment
from simpy.events import Event
from simpy.resources.resource import Resource

Flow = Generator[Event, object, None]
End = tuple[str, int]  # ("up" or "down", replica)


class Topology(StrEnum):
    """Who carries a microbatch from an upstream replica to a downstream one."""

    ALL_PAIRS = "all pairs"  # directly
    BROKERS = "brokers"  # by one of gcd(up_dp, down_dp) downstream replicas, which forwards it
    LEADERS = "leaders"  # gathered at one upstream replica, sent to one downstream, scattered there


class Sending(StrEnum):
    """What the upstream stage does while a microbatch is sent."""

    SYNCHRONOUS = "synchronous"  # waits until the downstream replica has it
    ASYNCHRONOUS = "asynchronous"  # continues with its next microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A boundary between two units: microbatch k goes from upstream replica k mod up_dp to k mod down_dp.

    Args:
        up_s, down_s: seconds of one microbatch on the unit's stage next to the boundary.
        num_bytes: sent per microbatch.
        bytes_per_s, latency_s: of a rank's NIC, in each direction.
    """

    up_dp: int
    down_dp: int
    num_microbatches: int
    up_s: float
    down_s: float
    num_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.up_dp, self.down_dp, self.num_microbatches) < 1:
            raise ValueError(
                "boundary: want data-parallel sizes and microbatches >= 1, got "
                f"{self.up_dp}, {self.down_dp} and {self.num_microbatches}"
            )
        times_s = (self.up_s, self.down_s, self.num_bytes, self.latency_s)
        if any(not isfinite(each) or each < 0 for each in times_s) or not self.bytes_per_s > 0:
            raise ValueError("boundary: want times and bytes >= 0 and a rate > 0")

    @property
    def num_brokers(self) -> int:
        """Number of brokers. Source: DistTrain, section 6."""
        return gcd(self.up_dp, self.down_dp)

    @property
    def transmit_s(self) -> float:
        """Seconds that one microbatch occupies a NIC."""
        return self.num_bytes / self.bytes_per_s

    def hops(self, microbatch: int, topology: Topology) -> tuple[tuple[End, End], ...]:
        """Hops of a microbatch as (from, to), in order, without those from a rank to itself.

        Broker b serves the replicas that are b modulo the number of brokers, and lives on downstream replica
        b. Since both degrees are multiples of that number, microbatch k has one broker, k mod gcd.
        """
        source, target = ("up", microbatch % self.up_dp), ("down", microbatch % self.down_dp)
        middle: dict[Topology, tuple[End, ...]] = {
            Topology.ALL_PAIRS: (),
            Topology.BROKERS: (("down", microbatch % self.num_brokers),),
            Topology.LEADERS: (("up", 0), ("down", 0)),
        }
        stops = (source, *middle[topology], target)
        return tuple((a, b) for a, b in pairwise(stops) if a != b)

    def num_connections(self, topology: Topology) -> int:
        """Number of pairs of ranks that ever communicate."""
        period = range(self.up_dp * self.down_dp // self.num_brokers)
        return len({hop for microbatch in period for hop in self.hops(microbatch, topology)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Times of one iteration's microbatches across the boundary.

    Args:
        end_s: when the last downstream replica ends.
        paused_s: wait for sends, of the upstream replica that waited longest.
        busiest_s: time that the busiest direction of any NIC was occupied.
    """

    end_s: float
    paused_s: float
    busiest_s: float


class _Ranks:
    """NICs of the ranks; each sends one message at a time and receives one at a time."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._out: dict[End, Resource] = {}
        self._in: dict[End, Resource] = {}
        self.busy_s: dict[tuple[End, str], float] = {}

    def carry(self, boundary: Boundary, source: End, target: End) -> Flow:
        """Send one microbatch. The sender is acquired before the receiver, so there is no circular wait."""
        out = self._out.setdefault(source, Resource(self._env))
        into = self._in.setdefault(target, Resource(self._env))
        with out.request() as may_send:
            yield may_send
            with into.request() as may_receive:
                yield may_receive
                yield self._env.timeout(boundary.transmit_s)
        for key in ((source, "out"), (target, "in")):
            self.busy_s[key] = self.busy_s.get(key, 0.0) + boundary.transmit_s
        yield self._env.timeout(boundary.latency_s)


def cross(boundary: Boundary, topology: Topology, sending: Sending) -> Crossing:
    """Simulate one iteration, forward only; each upstream replica works at its own pace.

    Source: DistTrain, sections 4.1 and 6, in words.
    Differs: the printed description leaves open on which of the two units a broker lives: here downstream.
    """
    env = Environment()
    ranks = _Ranks(env)
    arrived = [env.event() for _ in range(boundary.num_microbatches)]
    paused_s = [0.0] * boundary.up_dp

    def deliver(microbatch: int) -> Flow:
        for source, target in boundary.hops(microbatch, topology):
            yield from ranks.carry(boundary, source, target)
        arrived[microbatch].succeed()

    def upstream(replica: int) -> Flow:
        for microbatch in range(replica, boundary.num_microbatches, boundary.up_dp):
            yield env.timeout(boundary.up_s)
            start_s = env.now
            delivery = env.process(deliver(microbatch))
            if sending is Sending.SYNCHRONOUS:
                yield delivery
            paused_s[replica] += env.now - start_s

    def downstream(replica: int) -> Flow:
        for microbatch in range(replica, boundary.num_microbatches, boundary.down_dp):
            yield arrived[microbatch]
            yield env.timeout(boundary.down_s)

    for replica in range(boundary.up_dp):
        env.process(upstream(replica))
    ends = [env.process(downstream(replica)) for replica in range(boundary.down_dp)]
    env.run(until=env.all_of(ends))
    return Crossing(end_s=env.now, paused_s=max(paused_s), busiest_s=max(ranks.busy_s.values(), default=0.0))
