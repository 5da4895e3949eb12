"""Brokers between modules of unequal data parallelism: what they carry, and runs against one process."""

from dataclasses import replace
from math import gcd
from pathlib import Path

import pytest

from runtime.emulation.emulate import emulate
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from sim.broker import Boundary, Topology
from sim.predict import predict
from tests.command_line import workbench
from tests.layout_jobs import Degrees, planned, vision_language
from tests.test_parity import assert_same
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.plan.codec import write_plan
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, Lowered, Route, Transfer
from workbench.plan.plan import Boundaries, Plan, Precision
from workbench.timing.accept import accept

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
