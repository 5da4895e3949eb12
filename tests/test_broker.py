"""DistTrain's broker: layouts and runs."""

from dataclasses import replace
from itertools import pairwise
from math import gcd, lcm
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.emulation.emulate import emulate
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from sim.broker import Boundary, Crossing, Sending, Topology, cross
from sim.predict import predict
from tests.command_line import workbench
from tests.examples import examples
from tests.layout_jobs import Degrees, planned, vision_language
from tests.test_parity import assert_same
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.plan.boundaries import Boundaries
from workbench.plan.codec import write_plan
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, Lowered, Route, Transfer
from workbench.plan.plan import Plan, Precision
from workbench.timing.accept import accept


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


IMAGES = (1, 2, 1, 1, 2, 1, 1, 1, 2, 1, 1, 2)
EDGE = "vision>llm"


def brokered(plan: Plan) -> Plan:
    return replace(plan, settings=replace(plan.settings, boundaries=Boundaries.BROKERS))


def apart(vision: Degrees, llm: Degrees, images: tuple[int, ...] = IMAGES) -> Plan:
    return planned(vision_language(), {"vision": vision, "llm": llm}, microbatch=1, images=images)


def crossing(lowered: Lowered) -> list[Transfer]:
    return [row for row in lowered.transfers if row.edge == EDGE and row.route is not Route.LOCAL]


@pytest.mark.parametrize(("up", "down"), [(1, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3)])
def test_a_byte_takes_another_hop_only_to_replicas_that_host_no_broker(up: int, down: int) -> None:
    plan = apart((up, 1, 1), (down, 1, 1))
    brokers = gcd(up, down)
    straight, over = crossing(lower(plan)), crossing(lower(brokered(plan)))
    replica = {stage.id: stage.replica for stage in plan.stages}
    twice = 0
    for row in straight:
        is_forward = row.direction is Direction.FORWARD
        reader = replica[row.consumer.stage if is_forward else row.producer.stage]
        twice += row.num_bytes * (reader % (down // brokers) > 0)
    assert sum(row.num_bytes for row in over) == sum(row.num_bytes for row in straight) + twice
    hosts = {plan.chain["llm", b * down // brokers][0].flat_ranks[0] for b in range(brokers)}
    assert {row.destination_rank for row in over if row.route is Route.RELAY} <= hosts
    ends = {(row.source_rank, row.destination_rank) for row in over if row.direction is Direction.FORWARD}
    boundary = Boundary(
        up_dp=up, down_dp=down, num_microbatches=1, up_s=0, down_s=0, num_bytes=0, bytes_per_s=1
    )
    assert len(ends) == boundary.num_connections(Topology.BROKERS)


def test_what_a_broker_hands_on_follows_what_it_received() -> None:
    lowered, memory = accept(brokered(apart((2, 1, 1), (3, 1, 1))))
    relayed = {row.row: row for row in crossing(lowered) if row.route is Route.RELAY}
    handed_on = [row for row in crossing(lowered) if row.after in relayed]
    assert len(handed_on) == len(relayed) > 0
    assert all(relayed[row.after].destination_rank == row.source_rank for row in handed_on)
    broker = handed_on[0].source_rank
    plain = accept(apart((2, 1, 1), (3, 1, 1)))[1]
    held = sum(row.num_bytes for row in relayed.values() if row.destination_rank == broker)
    more = memory.acquired_bytes[broker][0] - plain.acquired_bytes[broker][0]
    assert more == held


def test_the_simulator_prices_both_ways() -> None:
    cost = CostModel(load_profile("A40"))
    plan = apart((2, 1, 1), (3, 1, 1))
    direct, over = (predict(*accept(each), cost) for each in (plan, brokered(plan)))
    assert over.iteration_s > direct.iteration_s  # every hop takes its time
    moved = [sum(m.num_bytes for m in trace.messages if m.edge == EDGE) for trace in (direct, over)]
    assert moved[1] > moved[0]


@pytest.mark.parametrize(
    ("vision", "llm"),
    [
        pytest.param((1, 1, 1), (2, 1, 1), id="one-to-two"),
        pytest.param((2, 1, 1), (3, 1, 1), id="two-to-three"),
        pytest.param((1, 1, 1, 2), (2, 1, 1), id="tensor-parallel-to-two"),
        pytest.param((1, 1, 1), (2, 1, 2), id="one-to-two-context-parallel"),
    ],
)
def test_runs_over_brokers_train_as_one_process(vision: Degrees, llm: Degrees, pool: Pool) -> None:
    plan = brokered(apart(vision, llm, (1, 2, 0, 1, 1, 1)))
    assert any(row.route is Route.RELAY for row in lower(plan).transfers)
    assert_same(plan, pool, Precision.FLOAT64)


def test_an_emulation_has_no_brokers() -> None:
    with pytest.raises(ValueError, match=r"got emulated ranks; want settings\.boundaries 'direct'"):
        emulate(lower(brokered(apart((1, 1, 1), (2, 1, 1), (1, 2)))), RunSettings(timeout_s=10.0))


def test_check_refuses_brokers_on_gpus_and_takes_them_on_cpus(tmp_path: Path) -> None:
    plan = brokered(apart((1, 1, 1), (2, 1, 1), (1, 2)))
    for device, code in (("A40", 2), ("cpu", 0)):
        nodes = tuple(replace(node, device=device) for node in plan.cluster.nodes)
        write_plan(replace(plan, cluster=replace(plan.cluster, nodes=nodes)), tmp_path / "plan.json")
        done = workbench("check", tmp_path / "plan.json")
        assert done.exit_code == code, done.output
        assert ("got A40; want settings.boundaries 'direct'" in done.output) == (code == 2)
