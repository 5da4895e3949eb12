"""The sweep gives the engine's times to the last bit, or refuses the plan."""

import pytest

from sim.step.deadlock import DeadlockError
from sim.step.engine import simulate
from sim.step.sweep import Sweep
from tests.lowered_by_hand import lowered, one_node
from tests.plans import disjoint_plan, sample, two_encoders
from tests.random_lowered import random_durations, random_lowered
from workbench.plan.lower import lower
from workbench.schedule.action import Pass
from workbench.trace import Lane


def assert_equal_times(plan, duration_s, step_s=None):
    """The iteration: engine and sweep agree on all to the last bit."""
    trace = simulate(plan, duration_s, step_s=step_s)
    times = Sweep(plan).times(duration_s, step_s)
    spans = [span for span in trace.spans if span.lane is Lane.COMPUTE]
    assert times.passes == {s.action: (s.start_s, s.end_s) for s in spans if s.action.kind is not Pass.STEP}
    assert times.steps == {s.rank: (s.start_s, s.end_s) for s in spans if s.action.kind is Pass.STEP}
    assert times.messages == {m.row: (m.ready_s, m.start_s, m.end_s) for m in trace.messages}
    assert times.iteration_s == trace.iteration_s == Sweep(plan).iteration_s(duration_s, step_s)
    return trace.iteration_s


@pytest.mark.parametrize("chunk", range(10))
def test_equals_the_engine_on_random_plans(chunk):
    for seed in range(100 * chunk, 100 * chunk + 100):
        assert_equal_times(random_lowered(seed), random_durations(seed))


def test_finds_the_deadlocks_that_the_engine_finds():
    num_stuck = 0
    for seed in range(150):
        plan, duration_s = random_lowered(seed, scrambled=True), random_durations(seed)
        try:
            simulate(plan, duration_s)
        except DeadlockError:
            num_stuck += 1
            with pytest.raises(DeadlockError, match="never ended"):
                Sweep(plan).times(duration_s)
        else:
            assert_equal_times(plan, duration_s)
    assert num_stuck > 40


def test_steps_differ_by_rank_and_durations_may_change():
    batch = [sample(index) for index in range(4)]
    plan = lower(
        disjoint_plan(
            two_encoders(llm=(True,) * 4), batch, {"vision": [2, 1], "audio": [2], "llm": [2, 2]}, replicas=2
        )
    )
    sweep = Sweep(plan)
    for factor in (1.0, 0.25):
        trace = simulate(plan, lambda _, f=factor: f, step_s=lambda rank: 0.1 * rank)
        found = sweep.times(lambda _, f=factor: f, lambda rank: 0.1 * rank)
        assert found.iteration_s == trace.iteration_s


def test_shared_cores_are_refused():
    plan = lowered({(0,): "0F0 STEP", (1,): "1F0 STEP"}, cluster=one_node(2, num_cores=1))
    with pytest.raises(ValueError, match="1 for 2; use the engine"):
        Sweep(plan)
