"""The engine against an independent brute-force event simulation, to the last bit."""

import pytest

from sim.step.deadlock import DeadlockError
from sim.step.engine import simulate
from tests.event_oracle import brute_force
from tests.random_lowered import random_durations, random_lowered


def assert_equal_times(lowered, duration_s):
    found = simulate(lowered, duration_s)
    wanted = brute_force(lowered, duration_s)
    assert not wanted.stuck
    assert {(s.rank, s.action): (s.start_s, s.end_s) for s in found.spans} == wanted.actions
    rows = {m.row: (m.ready_s, m.start_s, m.end_s) for m in found.messages}
    assert rows == wanted.rows


@pytest.mark.parametrize("chunk", range(8))
def test_equals_brute_force_on_random_plans(chunk):
    for seed in range(50 * chunk, 50 * chunk + 50):
        assert_equal_times(random_lowered(seed), random_durations(seed))


@pytest.mark.parametrize("chunk", range(4))
def test_equals_brute_force_where_ranks_share_cores(chunk):
    for seed in range(50 * chunk, 50 * chunk + 50):
        assert_equal_times(random_lowered(seed, cores=True), random_durations(seed))


def test_finds_the_deadlocks_that_brute_force_finds():
    num_stuck = 0
    for seed in range(200):
        lowered, duration_s = random_lowered(seed, scrambled=True), random_durations(seed)
        if brute_force(lowered, duration_s).stuck:
            num_stuck += 1
            with pytest.raises(DeadlockError, match="ranks never finished: rank"):
                simulate(lowered, duration_s)
        else:
            simulate(lowered, duration_s)
    assert 50 < num_stuck < 190
