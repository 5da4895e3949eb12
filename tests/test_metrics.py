"""Metrics on traces small enough to count by hand, and what holds for every trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.lowered_by_hand import lowered, one_node, row
from tests.random_lowered import random_durations, random_lowered
from workbench.cost.hardware import Link
from workbench.metrics import (
    action_s,
    bubble_fraction,
    busy_s,
    exposed_communication_s,
    imbalance,
    peak_bytes,
    step_metrics,
    time_by_kind,
)
from workbench.schedule.action import STEP, Pass, parse_action
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace


def trace_of(*spans: Span, messages=(), memory=()) -> Trace:
    return Trace(plan_hash="", executor=Executor.EXECUTED, spans=spans, messages=messages, memory=memory)


def span(rank: int, action: str, start_s: float, end_s: float) -> Span:
    parsed = parse_action(action)
    lane = Lane.REDUCE if parsed.kind is Pass.REDUCE_GRAD else Lane.COMPUTE
    return Span(rank, lane, parsed, start_s, end_s)


def message(destination: int, ready_s: float, start_s: float, end_s: float) -> Message:
    return Message(0, "m", 9, destination, 1, ready_s, start_s, end_s)


TWO_RANKS = trace_of(
    span(0, "0F0", 0.0, 2.0),
    span(0, "0B0", 6.0, 10.0),
    span(1, "1F0", 3.0, 4.0),
    span(1, "1B0", 4.0, 5.0),
    messages=(message(1, 2.0, 2.0, 3.0), message(0, 5.0, 5.5, 6.0)),
    memory=(
        MemorySample(0, 0.0, 5),
        MemorySample(0, 1.0, 9),
        MemorySample(0, 2.0, 4),
        MemorySample(1, 0.0, 7),
    ),
)


def test_counted_by_hand():
    assert busy_s(TWO_RANKS) == {0: 6.0, 1: 2.0}
    assert bubble_fraction(TWO_RANKS) == {0: pytest.approx(0.4), 1: pytest.approx(0.8)}
    assert imbalance(TWO_RANKS) == 6.0 / 4.0
    assert peak_bytes(TWO_RANKS) == {0: 9, 1: 7}
    assert exposed_communication_s(TWO_RANKS) == {0: 1.0, 1: 1.0}
    assert time_by_kind(TWO_RANKS) == {Pass.F: 3.0, Pass.B: 5.0}
    metrics = step_metrics(TWO_RANKS)
    assert metrics.iteration_s == 10.0
    assert metrics.bubble_fraction == pytest.approx(0.6)
    assert (metrics.imbalance, metrics.exposed_communication_s, metrics.peak_bytes) == (1.5, 1.0, 9)


def test_communication_under_compute_is_not_exposed_and_overlaps_count_once():
    trace = trace_of(
        span(0, "0F0", 0.0, 4.0),
        span(0, "0REDUCE_GRAD", 3.0, 7.0),
        messages=(message(0, 1.0, 1.0, 5.0), message(0, 6.0, 6.0, 8.0)),
    )
    assert exposed_communication_s(trace) == {0: 4.0}


def test_an_action_on_several_ranks_counts_once_and_as_long_as_on_the_slowest():
    trace = trace_of(span(0, "0F0", 0.0, 2.0), span(1, "0F0", 0.0, 3.0), span(0, "STEP", 3.0, 4.0))
    assert action_s(trace) == {parse_action("0F0"): 3.0, STEP: 1.0}
    assert time_by_kind(trace) == {Pass.F: 3.0, Pass.STEP: 1.0}


def test_a_step_without_time_has_no_bubble():
    trace = trace_of(span(0, "0F0", 0.0, 0.0))
    assert bubble_fraction(trace) == {0: 0.0}
    assert imbalance(trace) == 1.0


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="no spans"):
        step_metrics(trace_of())


@given(st.integers(2, 5), st.integers(2, 8))
def test_the_bubble_of_1f1b_on_equal_stages_is_p_minus_1_of_m_plus_p_minus_1(p, m):
    programs, rows = {}, []
    for s in range(p):
        warmup = min(p - s, m)
        words = [f"{s}F{i}" for i in range(warmup)]
        for i in range(m):
            words += [f"{s}B{i}", *([f"{s}F{warmup + i}"] if warmup + i < m else [])]
        programs[(s,)] = " ".join(words)
    for s in range(p - 1):
        for i in range(m):
            rows.append(row(len(rows), f"{s}F{i}", f"{s + 1}F{i}", (s, s + 1), num_bytes=0))
            rows.append(row(len(rows), f"{s + 1}B{i}", f"{s}B{i}", (s + 1, s), num_bytes=0))
    trace = simulate(lowered(programs, rows), lambda action: 1.0 if action.kind is Pass.F else 2.0)
    assert bubble_fraction(trace) == pytest.approx(dict.fromkeys(range(p), (p - 1) / (m + p - 1)))
    assert imbalance(trace) == 1.0


def test_a_slow_link_is_exposed():
    link = Link(name="slow", bytes_per_s=1, latency_s=1)
    rows = [row(0, "0F0", "1F0", (0, 1), num_bytes=2)]
    trace = simulate(lowered({(0,): "0F0", (1,): "1F0"}, rows, cluster=one_node(2, link=link)), lambda _: 1.0)
    assert exposed_communication_s(trace) == {0: 0.0, 1: 3.0}


@given(st.integers(0, 60))
def test_idle_time_holds_all_exposed_communication(seed):
    trace = simulate(random_lowered(seed), random_durations(seed))
    exposed = exposed_communication_s(trace)
    for rank, busy in busy_s(trace).items():
        assert -1e-9 <= exposed[rank] <= trace.iteration_s - busy + 1e-9
    metrics = step_metrics(trace)
    assert 0 <= metrics.bubble_fraction <= 1
    assert metrics.imbalance >= 1 - 1e-12
    assert sum(time_by_kind(trace).values()) == pytest.approx(sum(action_s(trace).values()))
