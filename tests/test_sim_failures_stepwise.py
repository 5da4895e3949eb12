"""Counted failures against failures played step by step: every system, every kind of change, ties too."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench import failures
from experiments.bench.rivals.failures_stepwise import play_failures
from experiments.oobleck.runs import BUILDERS
from sim.failures.run import FailureRun, Iteration
from sim.failures.simulate import simulate_failures
from sim.failures.training_system import Checkpoints, Joins, Restart, System
from tests.examples import examples
from workbench.elastic.availability import Availability, Change, NodeEvent, Rates, random_trace, warned

NODES = 4
REL_TOL = 1e-9


def joins(nodes: int) -> list[NodeEvent]:
    return [NodeEvent(time_s=0.0, change=Change.JOIN, node=f"n{k}") for k in range(nodes)]


@st.composite
def traces_of_ticks(draw: st.DrawFn) -> Availability:
    """Nodes that come and go at whole seconds, several at once, with and without warnings."""
    events, present, now_s = joins(NODES), {f"n{k}" for k in range(NODES)}, 0
    for _ in range(draw(st.integers(0, 12))):
        now_s += draw(st.sampled_from((0, 1, 2, 3, 5, 8, 13, 21, 60)))
        node = f"n{draw(st.integers(0, NODES))}"
        change = Change.LEAVE if node in present else Change.JOIN
        (present.remove if change is Change.LEAVE else present.add)(node)
        notice_s = draw(st.sampled_from((0.0, 0.0, 2.0, 7.0, 30.0))) if change is Change.LEAVE else 0.0
        events.append(NodeEvent(time_s=float(now_s), change=change, node=node, warned_s=notice_s))
    return Availability(name="ticks", events=tuple(events))


@st.composite
def systems_of_ticks(draw: st.DrawFn) -> System:
    """Iterations, checkpoints and recoveries of whole seconds: every sum is exact, so ties are ties."""
    lasts_s = [draw(st.sampled_from((0, 1, 2, 3, 4, 6))) for _ in range(NODES + 2)]
    if not any(lasts_s):
        lasts_s[NODES] = 2
    checkpoints = None
    if draw(st.booleans()):
        checkpoints = Checkpoints(
            every=draw(st.integers(1, 4)),
            save_s=float(draw(st.integers(0, 3))),
            first=draw(st.sampled_from((None, 1, 2, 6))),
            copy_s=float(draw(st.sampled_from((0, 0, 1, 5, 20)))),
        )
    return System(
        name="ticks",
        samples_per_s=[0.0 if not each_s else 12.0 / each_s for each_s in lasts_s],
        samples_per_step=12.0,
        recover_s=float(draw(st.integers(0, 6))),
        checkpoints=checkpoints,
        joins=draw(st.sampled_from(Joins)),
        restart=draw(st.sampled_from(Restart)),
        redundant_share=draw(st.sampled_from((0.0, 0.25))),
        idle_nodes=draw(st.sampled_from(((), (0, 0, 1, 0, 2)))),
        creation_s=float(draw(st.integers(0, 6))),
    )


def lasting(run: FailureRun) -> list[Iteration]:
    """Iterations, without those cut off at the instant at which they begin."""
    return [each for each in run.iterations if each.end_s > each.start_s]


def assert_same(ours: FailureRun, played: FailureRun) -> None:
    """Seconds by kind to a billionth of the window, all iterations one by one, and the counts."""
    slack_s = REL_TOL * ours.window_s
    for (kind, seconds), (_, want_s) in zip(ours.spent_s, played.spent_s, strict=True):
        assert seconds == pytest.approx(want_s, rel=REL_TOL, abs=slack_s), kind
    assert ours.num_recoveries == played.num_recoveries
    assert ours.node_s == played.node_s
    assert ours.samples == pytest.approx(played.samples, rel=REL_TOL)
    for mine, theirs in zip(lasting(ours), lasting(played), strict=True):
        assert mine.start_s == pytest.approx(theirs.start_s, rel=REL_TOL, abs=slack_s)
        assert mine.end_s == pytest.approx(theirs.end_s, rel=REL_TOL)
        assert mine.samples == pytest.approx(theirs.samples, rel=REL_TOL, abs=slack_s)


@given(systems_of_ticks(), traces_of_ticks(), st.integers(1, 240))
@examples(150)
def test_counting_is_playing_where_everything_may_happen_at_once(system, trace, window_s):
    assert_same(
        simulate_failures(system, trace, float(window_s)), play_failures(system, trace, float(window_s))
    )


@pytest.mark.parametrize("restart", Restart)
@pytest.mark.parametrize("name", BUILDERS)
@given(
    seed=st.integers(0, 10**6),
    notice_s=st.sampled_from((0.0, 30.0, 120.0)),
    leaves_per_node_h=st.floats(0.02, 2.0),
    copy_s=st.sampled_from((0.0, 40.0)),
)
@settings(max_examples=4, deadline=None)
def test_counting_is_playing_for_every_system_on_random_traces(
    name, restart, seed, notice_s, leaves_per_node_h, copy_s
):
    built = replace(BUILDERS[name]("GPT-2"), restart=restart)
    if built.checkpoints is not None:
        built = replace(built, checkpoints=replace(built.checkpoints, copy_s=copy_s))
    rates = Rates(leaves_per_node_h=leaves_per_node_h, joins_per_missing_h=4.0)
    trace = warned(random_trace(30, rates, 4 * 3600.0, seed), notice_s)
    ours, played = (run(built, trace, 4 * 3600.0) for run in (simulate_failures, play_failures))
    assert_same(ours, played)
    assert len(ours.stretches) <= 4 + 8 * len(trace.events)


def test_the_bench_compares_both_and_counts_what_it_spares(monkeypatch):
    monkeypatch.setattr(failures, "DAYS", 1.0)
    rows = [failures.measure(name, "6h") for name in ("oobleck", "varuna")]
    result = failures.as_json(rows)
    assert result["all_agree"] is True
    assert result["rows"][0]["ratio"] > 0
    for row in rows:
        assert 10 * row.num_stretches < row.num_iterations
        assert row.simulated_h == 24
