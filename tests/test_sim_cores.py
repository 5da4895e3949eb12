"""Shared cores against a fluid model that keeps what is left of every job."""

from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.lowered_by_hand import lowered, one_node

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
