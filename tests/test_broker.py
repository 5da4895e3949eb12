"""Microbatches between units of unequal data parallelism: closed forms and what each topology promises."""

from itertools import pairwise
from math import gcd, lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.broker import Boundary, Crossing, Sending, Topology, cross
from tests.examples import examples


def boundary(up_dp: int, down_dp: int, **other: float) -> Boundary:
    chosen: dict[str, float] = {
        "num_microbatches": 24,
        "up_s": 1.0,
        "down_s": 1.0,
        "num_bytes": 1.0,
        "bytes_per_s": 4.0,
    }
    return Boundary(up_dp=up_dp, down_dp=down_dp, **(chosen | other))  # type: ignore[arg-type]


def crossed(given_: Boundary, topology: Topology, sending: Sending = Sending.ASYNCHRONOUS) -> Crossing:
    return cross(given_, topology, sending)


@given(st.integers(1, 12), st.integers(1, 12))
def test_routes(up_dp: int, down_dp: int) -> None:
    found = boundary(up_dp, down_dp)
    assert found.num_brokers == gcd(up_dp, down_dp)
    assert found.num_connections(Topology.ALL_PAIRS) == lcm(up_dp, down_dp)
    assert found.num_connections(Topology.LEADERS) == up_dp + down_dp - 1
    assert found.num_connections(Topology.BROKERS) == up_dp + down_dp - gcd(up_dp, down_dp)
    for microbatch in range(up_dp * down_dp):
        for topology in Topology:
            hops = found.hops(microbatch, topology)
            assert hops[0][0] == ("up", microbatch % up_dp)
            assert hops[-1][1] == ("down", microbatch % down_dp)
            assert all(one[1] == other[0] for one, other in pairwise(hops))


@pytest.mark.parametrize("topology", Topology)
def test_one_replica_each_is_a_plain_pipeline(topology: Topology) -> None:
    found = boundary(1, 1, latency_s=0.5)
    assert crossed(found, topology).end_s == 24 + 0.25 + 0.5 + 1
    waiting = cross(found, topology, Sending.SYNCHRONOUS)
    assert waiting.end_s == 24 * 1.75 + 1
    assert waiting.paused_s == 24 * 0.75


def test_a_slow_network_is_as_fast_as_what_carries_it() -> None:
    """Leaders have one NIC; brokers one each, of which a share goes on to their neighbours."""
    slow = boundary(4, 8, up_s=0.0, down_s=0.0, num_microbatches=96)
    assert crossed(slow, Topology.LEADERS).end_s >= 96 * slow.transmit_s
    assert crossed(slow, Topology.LEADERS).busiest_s == 96 * slow.transmit_s
    assert crossed(slow, Topology.BROKERS).busiest_s == 96 / 4 * slow.transmit_s
    assert crossed(slow, Topology.ALL_PAIRS).busiest_s == 96 / 4 * slow.transmit_s
    even = boundary(8, 8, up_s=0.0, down_s=0.0, num_microbatches=96)
    assert crossed(even, Topology.BROKERS) == crossed(even, Topology.ALL_PAIRS)


@examples(30)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from(Topology),
)
def test_bounds(up_dp: int, down_dp: int, num: int, up: int, down: int, topology: Topology) -> None:
    found = boundary(up_dp, down_dp, num_microbatches=num, up_s=float(up), down_s=float(down))
    ahead = cross(found, topology, Sending.ASYNCHRONOUS)
    assert ahead.paused_s == 0.0
    assert ahead.end_s >= max(-(-num // up_dp) * up, -(-num // down_dp) * down) + found.transmit_s
    assert ahead.end_s >= ahead.busiest_s
    assert cross(found, topology, Sending.SYNCHRONOUS).end_s <= num * (up + down + 3 * found.transmit_s)


def test_nonsense_is_refused() -> None:
    for change in (
        {"num_microbatches": 0},
        {"up_s": -1.0},
        {"bytes_per_s": 0.0},
        {"latency_s": float("nan")},
    ):
        with pytest.raises(ValueError, match="boundary: want"):
            boundary(2, 3, **change)
