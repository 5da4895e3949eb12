"""Random chains take what a model of pipelines says that knows neither plans nor lowering."""

from random import Random

import pytest

from sim.step.engine import simulate
from sim.step.sweep import Sweep
from tests.chains import chain_plan
from tests.pipeline_by_hand import Op, Pipeline, gpipe, interleaved, one_f_one_b
from tests.plans import WIDTH
from workbench.cost.hardware import Link
from workbench.metrics import busy_s
from workbench.plan.lower import lower
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind

ORDERS = {
    ScheduleKind.ONE_F_ONE_B: one_f_one_b,
    ScheduleKind.GPIPE: gpipe,
    ScheduleKind.INTERLEAVED: interleaved,
}
BFLOAT16_BYTES = 2
STEP_S = 0.25


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("seed", range(12))
def test_a_chain_takes_what_its_seconds_and_bytes_say(kind: ScheduleKind, seed: int):
    """Stages of unequal times, some frozen, on a link that may be slow; gradients are reduced behind them."""
    random = Random(f"{kind} {seed}")
    v = random.randint(2, 3) if kind is ScheduleKind.INTERLEAVED else 1
    p, dp = random.randint(2, 4), random.randint(1, 3)
    m = p * random.randint(1, 3) if v > 1 else random.randint(1, 9)
    num_tokens, stages = random.randint(1, 4), range(p * v)
    trained = [random.random() < 0.6 for _ in stages[1:]] + [True]
    link = Link(
        name="link", bytes_per_s=10 ** random.uniform(0, 4), latency_s=random.choice([0.0, random.random()])
    )
    forward_s, backward_s, reduce_s = ([random.uniform(0.5, 2) for _ in stages] for _ in range(3))
    pipeline = Pipeline(
        p=p,
        v=v,
        m=m,
        dp=dp,
        order=ORDERS[kind],
        seconds=lambda op: (forward_s if op.kind == "F" else backward_s)[op.stage],
        has_backward=[any(trained[: stage + 1]) for stage in stages],
        message_s=num_tokens * WIDTH * BFLOAT16_BYTES / link.bytes_per_s,
        latency_s=link.latency_s,
        reduce_s={stage: reduce_s[stage] * (dp > 1) for stage in stages if trained[stage]},
    )

    def seconds(action: Action) -> float:
        if action.stage is None:
            return STEP_S
        stage = action.stage % len(stages)
        return {Pass.F: forward_s, Pass.B: backward_s}.get(action.kind, reduce_s)[stage]

    schedule = Schedule(kind=kind, virtual_stages=v)
    lowered = lower(chain_plan(schedule, p, m, trained=trained, dp=dp, num_tokens=num_tokens, link=link))
    trace = simulate(lowered, seconds)
    last_s, passes_s = pipeline.run()
    assert trace.iteration_s == pytest.approx(last_s + STEP_S, rel=1e-12)
    assert Sweep(lowered).times(seconds).iteration_s == trace.iteration_s
    assert busy_s(trace) == pytest.approx({rank: busy + STEP_S for rank, busy in passes_s.items()}, rel=1e-9)
    ends = {
        Op(*divmod(stage, len(stages)), kind.value, microbatch): span.end_s
        for span in trace.spans
        for stage, kind, microbatch in [span.action]
        if stage is not None and kind in (Pass.F, Pass.B)
    }
    assert ends == pytest.approx(pipeline.end_s, rel=1e-12)
