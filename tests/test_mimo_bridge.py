"""What crosses between modules in a run: the bytes of the plan, and seconds that no late receiver adds to."""

import pytest

from experiments.mimo.bridge import CASES, EDGE, crossing, longest_sender_s, plan_of
from runtime.launch import run_lowered
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from workbench.metrics import union_s
from workbench.plan.lower import lower
from workbench.plan.plan import Precision
from workbench.schedule.action import Action, Pass
from workbench.trace import Executor, Lane, Message, Span, Trace


def test_intervals_that_overlap_count_once():
    assert union_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


def test_a_message_waits_for_its_receivers_pass_for_nothing():
    busy = Span(1, Lane.COMPUTE, Action(0, Pass.F, 0), 0.0, 4.0)
    sent = Message(0, EDGE, 0, 1, 8, 1.0, 1.0, 4.5)
    other = Message(1, "llm", 0, 1, 8, 0.0, 0.0, 9.0)
    trace = Trace(plan_hash="", executor=Executor.EXECUTED, spans=(busy,), messages=(sent, other))
    assert longest_sender_s(trace) == pytest.approx(0.5)


def test_a_run_sends_what_its_plan_names(pool: Pool) -> None:
    lowered = lower(plan_of(CASES[0]))
    settings = RunSettings(seed=7, precision=Precision.FLOAT32, timeout_s=60.0)
    found = crossing(CASES[0], lowered, run_lowered(lowered, settings, pool=pool).traces)
    assert found.sent_bytes == found.planned_bytes > 0
    assert 0 < found.boundary_s < found.step_s
