"""Shared cores against a fluid model that keeps what is left of every job."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.fidelity.cases import text_work
from experiments.fidelity.divided import text_plans
from experiments.fidelity.work import UNMEASURED, this_machine
from sim.step.engine import simulate
from sim.step.sweep import Sweep
from tests.lowered_by_hand import lowered, one_node
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.schedule.action import Pass

works = st.floats(0.001, 5.0)


def fluid_ends_s(queues: list[list[float]], num_cores: int) -> list[list[float]]:
    """Rank -> ends of its jobs: go to the next end, take what was done off every active job."""
    left = [list(queue) for queue in queues]
    ends: list[list[float]] = [[] for _ in queues]
    now_s = 0.0
    while active := [rank for rank, queue in enumerate(left) if queue]:
        rate = min(1.0, num_cores / len(active))
        first = min(active, key=lambda rank: left[rank][0])
        done = left[first][0]
        now_s += done / rate
        for rank in active:
            left[rank][0] -= done
            if rank == first or left[rank][0] <= 1e-12:
                left[rank].pop(0)
                ends[rank].append(now_s)
    return ends


@given(st.lists(st.lists(works, min_size=1, max_size=4), min_size=1, max_size=5), st.integers(1, 4))
def test_queues_of_jobs_end_as_in_the_fluid_model(queues, num_cores):
    programs = {
        (rank,): " ".join(f"{rank}F{i}" for i in range(len(queue))) for rank, queue in enumerate(queues)
    }
    given_plan = lowered(programs, cluster=one_node(len(queues), num_cores=num_cores))
    trace = simulate(given_plan, lambda action: queues[action.stage][action.microbatch])
    wanted = [end_s for ends in fluid_ends_s(queues, num_cores) for end_s in ends]
    found = [span.end_s for span in trace.spans]
    assert all(abs(a - b) <= 1e-9 * (1 + b) for a, b in zip(found, wanted, strict=True))


SECONDS = {
    Pass.F: 2.0,
    Pass.B: 3.5,
    Pass.ALL_GATHER: 1.0,
    Pass.FREE: 0.0,
    Pass.REDUCE_SCATTER: 2.5,
    Pass.STEP: 0.5,
}


def sharded_plan(num_cores: int | None) -> Plan:
    """Two replicas on a node that shard all weights."""
    work = text_work()
    cluster = this_machine(UNMEASURED, 2)
    nodes = tuple(replace(node, num_cores=num_cores) for node in cluster.nodes)
    plans = dict(text_plans(work, replace(cluster, nodes=nodes)))
    return plans["weights shared out, 4 microbatches"]()


def test_a_core_does_passes_and_the_exchanges_beside_them_in_turn():
    """Replicas are alike, so no core ever waits: the step takes the sum of all that a core has to do."""
    on_cores, on_devices = (lower(sharded_plan(num_cores)) for num_cores in (2, None))
    cores_s, devices_s = (
        simulate(one, lambda action: SECONDS[action.kind]).iteration_s for one in (on_cores, on_devices)
    )
    assert cores_s == pytest.approx(sum(SECONDS[action.kind] for action in on_cores.plan.program[0]))
    assert devices_s < cores_s
    assert Sweep(on_devices).iteration_s(lambda action: SECONDS[action.kind]) == devices_s
    with pytest.raises(ValueError, match=r"that nothing else uses.*has 2 for 2"):
        Sweep(on_cores)
