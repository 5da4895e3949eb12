"""Trace files: exact round trip, equal bytes for equal traces, one-line errors for anything else."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.random_lowered import random_durations, random_lowered
from workbench.schedule.action import STEP, Action, Pass
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace
from workbench.trace_json import dumps, exchange_flows, loads, read_trace, write_trace

times = st.floats(0, 1e6, allow_nan=False)
ranks = st.integers(0, 5)
actions = st.one_of(
    st.just(STEP),
    st.builds(Action, ranks, st.sampled_from([Pass.F, Pass.B, Pass.I, Pass.W]), ranks),
    st.builds(Action, ranks, st.just(Pass.REDUCE_GRAD), st.none()),
)
spans = st.builds(Span, ranks, st.sampled_from(Lane), actions, times, times)
messages = st.builds(Message, ranks, st.text(max_size=5), ranks, ranks, ranks, times, times, times)
samples = st.builds(MemorySample, ranks, times, st.integers(0, 2**60))
traces = st.builds(
    Trace,
    plan_hash=st.text(max_size=8),
    executor=st.sampled_from(Executor),
    spans=st.lists(spans, max_size=6).map(tuple),
    messages=st.lists(messages, max_size=6).map(tuple),
    memory=st.lists(samples, max_size=6).map(tuple),
    loss=st.none() | st.floats(allow_nan=False),
    details=st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=3).map(tuple),
)


def simulated(seed=3):
    return simulate(random_lowered(seed), random_durations(seed))


@given(traces)
def test_reading_gives_back_what_was_written(trace):
    assert loads(dumps(trace)) == trace


def test_files_round_trip_and_equal_traces_give_equal_bytes(tmp_path):
    for seed in range(5):
        write_trace(simulated(seed), tmp_path / "a.json")
        write_trace(simulated(seed), tmp_path / "b.json")
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
        assert read_trace(tmp_path / "a.json") == simulated(seed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_trace_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(simulated(), path)
    before = path.read_bytes()
    endless = replace(simulated(), spans=(Span(0, Lane.COMPUTE, STEP, 0.0, float("inf")),))
    with pytest.raises(ValueError, match="finite"):
        write_trace(endless, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_slices_are_named_like_torch_names_them():
    trace = simulated()
    events = json.loads(dumps(trace))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["name"].startswith("PP:")]
    assert [event["name"] for event in slices] == [f"PP:{span.action}" for span in trace.spans]
    for event, span in zip(slices, trace.spans, strict=True):
        assert (event["pid"], event["cat"]) == (span.rank, span.action.kind)
        assert event["ts"] == pytest.approx(span.start_s * 1e6)
        assert event["ts"] + event["dur"] == pytest.approx(span.end_s * 1e6)


def test_processes_and_threads_have_names():
    events = json.loads(dumps(simulated()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    used = {event["pid"] for event in events}
    assert names == {rank: f"rank {rank}" for rank in used}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= threads


@given(st.integers(0, 60))
def test_slices_of_a_thread_never_overlap_and_every_message_has_an_arrow(seed):
    trace = simulated(seed)
    events = json.loads(dumps(trace))["traceEvents"]
    threads = {}
    for event in events:
        if event["ph"] == "X":
            args = event["args"]
            threads.setdefault((event["pid"], event["tid"]), []).append((args["start_s"], args["end_s"]))
    for slices in threads.values():
        slices.sort()
        assert all(before[1] <= later[0] for before, later in pairwise(slices))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() == set(range(len(trace.messages)))
    for number, message in enumerate(trace.messages):
        assert (starts[number]["pid"], ends[number]["pid"]) == (
            message.source_rank,
            message.destination_rank,
        )


def test_exchanges_of_sharded_weights_point_at_their_passes():
    gather, forward = Action(0, Pass.ALL_GATHER, 0), Action(0, Pass.F, 0)
    backward, scatter = Action(0, Pass.B, 0), Action(0, Pass.REDUCE_SCATTER, 0)
    others = [Span(0, Lane.COMPUTE, Action(1, Pass.F, 0), 1.0, 1.5), Span(1, Lane.COMPUTE, forward, 1.0, 2.0)]
    own = [
        Span(0, Lane.REDUCE, gather, 0.0, 1.0),
        Span(0, Lane.COMPUTE, forward, 1.5, 2.0),
        Span(0, Lane.COMPUTE, backward, 2.0, 4.0),
        Span(0, Lane.REDUCE, scatter, 4.0, 5.0),
        Span(0, Lane.REDUCE, Action(0, Pass.ALL_GATHER, 1), 5.0, 6.0),  # no pass comes behind it
    ]
    trace = Trace(plan_hash="x", executor=Executor.SIMULATED, spans=tuple(own + others))
    assert [(flow.name, flow.giver, flow.taker) for flow in exchange_flows(trace)] == [
        ("weights", own[0], own[1]),
        ("gradients", own[2], own[3]),
    ]
    events = json.loads(dumps(trace))["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    arrows = {}
    for event in events:
        if event["ph"] in "sf":
            sent = slices[event["pid"], event["tid"], event["ts"]]
            arrows.setdefault((event["cat"], event["id"]), []).append(sent)
    assert arrows == {
        ("weights", 0): ["PP:0ALL_GATHER0", "PP:0F0"],
        ("gradients", 1): ["PP:0B0", "PP:0REDUCE_SCATTER0"],
    }
    assert loads(dumps(trace)) == trace


def without_a_line(text):
    lines = text.split("\n")
    del lines[next(i for i, line in enumerate(lines) if '"PP:' in line)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "not a trace file", id="truncated"),
        pytest.param(lambda text: "", "not a trace file", id="empty"),
        pytest.param(lambda text: "{}", "otherData.format", id="foreign-json"),
        pytest.param(lambda text: "[1, 2]", "otherData.format", id="a-list"),
        pytest.param(lambda text: "[" * 100_000, "nested too deeply", id="deep"),
        pytest.param(
            lambda text: text.replace('version":3', 'version":7'), "must be 1 to 3, got 7", id="version"
        ),
        pytest.param(without_a_line, "damaged trace file: want", id="lost-event"),
        pytest.param(lambda text: text.replace('"action":', '"deed":'), "'action' is missing", id="key"),
        pytest.param(lambda text: text.replace('"action":"', '"action":"x'), "bad action 'x", id="action"),
        pytest.param(
            lambda text: text.replace('"start_s":', '"start_s":"0",'), "not a trace file", id="no-json"
        ),
        pytest.param(
            lambda text: text.replace('"traceEvents":[', '"traceEvents":[3,'), "damaged", id="event"
        ),
        pytest.param(lambda text: text.replace('"start_s":0.0', '"start_s":"0"'), "want a number", id="type"),
        pytest.param(lambda text: text.replace('"pid":0', '"pid":0.5'), "want a whole number", id="rank"),
        pytest.param(
            lambda text: text.replace('"plan_hash":"', '"plan_hash":5,"x":"'), "want text", id="hash"
        ),
    ],
)
def test_other_files_are_refused_in_one_line(damage, message, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(simulated(), path)
    text = damage(path.read_text())
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        read_trace(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(b"\x80PNG")
    with pytest.raises(ValueError, match="not UTF-8 text at byte 0"):
        read_trace(path)
