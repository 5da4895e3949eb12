"""Our traces as files of other tools: what HTA and Chakra's schema find in them is what we wrote."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.doors.ingest import chakra_valid, hta_error, hta_loads, ingest_error
from experiments.doors.trace_tools import tools_folder
from tests.command_line import accept, refuse
from tests.test_ingest import PLANS, planned
from workbench.metrics import temporal_breakdown
from workbench.schedule.action import parse_action
from workbench.trace import Executor, Lane, Message, Span, Trace
from workbench.trace_files.chakra import NodeType, _varint, nodes_of, write_chakra
from workbench.trace_files.hta import write_hta
from workbench.trace_json import write_trace

TICK_S = 1e-3


@pytest.fixture(scope="module")
def tools() -> Path:
    """HTA and mlc-chakra; filled from the package index when first used."""
    try:
        return tools_folder()
    except ValueError as error:
        pytest.skip(str(error))


def test_hta_finds_our_breakdown_and_overlap(tools):
    """Within 1 %: pipelines with messages, reductions beside passes, sharded weights."""
    found = hta_loads({name: planned(name)[1] for name in PLANS})
    assert found["tried"] == len(PLANS)
    assert found["worst_error"] < 0.01
    assert found["within"]


def test_chakras_schema_reads_every_file_back(tools):
    found = chakra_valid({name: planned(name)[1] for name in PLANS})
    assert found["files"] == sum(len(planned(name)[0].ranks) for name in PLANS)
    assert found["valid"] == found["files"]


# Figures


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Spans and messages at whole ticks, which may overlap as they like."""

    def times(most: int) -> tuple[float, float]:
        start = draw(st.integers(0, 30))
        return start * TICK_S, (start + draw(st.integers(1, most))) * TICK_S

    spans = [
        Span(0, lane, parse_action(name), *times(8))
        for lane, names in ((Lane.COMPUTE, ("0F0", "0B0", "STEP")), (Lane.REDUCE, ("0REDUCE_GRAD",)))
        for name in draw(st.lists(st.sampled_from(names), min_size=lane is Lane.COMPUTE, max_size=6))
    ]
    messages = [
        Message(row, "llm", *draw(st.sampled_from([(0, 1), (1, 0)])), 8, start_s, start_s, end_s)
        for row, (start_s, end_s) in enumerate(times(5) for _ in range(draw(st.integers(0, 4))))
    ]
    return Trace(plan_hash="x", executor=Executor.SIMULATED, spans=tuple(spans), messages=tuple(messages))


@given(traces())
def test_a_breakdown_counts_ticks(trace):
    """Against an oracle that looks at every tick by itself."""
    found = temporal_breakdown(trace)[0]
    compute, communicate = set[int](), set[int]()
    for span in trace.spans:
        ticks = range(round(span.start_s / TICK_S), round(span.end_s / TICK_S))
        (communicate if span.lane is Lane.REDUCE else compute).update(ticks)
    for message in trace.messages:
        communicate.update(range(round(message.start_s / TICK_S), round(message.end_s / TICK_S)))
    every = compute | communicate
    assert found.compute_s == pytest.approx(len(compute) * TICK_S)
    assert found.other_s == pytest.approx(len(every - compute) * TICK_S)
    assert found.idle_s == pytest.approx((max(every) + 1 - min(every) - len(every)) * TICK_S)
    if communicate:
        assert found.overlap_fraction == pytest.approx(len(compute & communicate) / len(communicate))
    else:
        assert found.overlap_fraction is None


def test_an_error_of_hta_is_seen():
    _, trace = planned("cornstarch")
    ours = temporal_breakdown(trace)
    said = {
        "breakdown": [
            {
                "rank": rank,
                "compute_time(us)": mine.compute_s * 1e6,
                "non_compute_time(us)": mine.other_s * 1e6,
                "idle_time(us)": (mine.idle_s + 0.03 * mine.total_s) * 1e6,
                "kernel_time(us)": mine.total_s * 1e6,
            }
            for rank, mine in ours.items()
        ],
        "overlap": [
            {"rank": rank, "comp_comm_overlap_pctg": 100 * (mine.overlap_fraction or 0.0)}
            for rank, mine in ours.items()
        ],
    }
    assert hta_error(trace, said) == pytest.approx(0.03)
    with pytest.raises(ValueError, match="hta: has ranks"):
        hta_error(trace, said | {"breakdown": said["breakdown"][1:]})


def test_an_error_of_ingestion_is_seen():
    """A stage that came out 5 % longer is 5 % off."""
    _, trace = planned("cornstarch")
    spans = tuple(
        s._replace(end_s=s.start_s + 1.05 * (s.end_s - s.start_s)) if s.action.stage == 0 else s
        for s in trace.spans
    )
    found = ingest_error(trace, Trace(plan_hash="x", executor=Executor.EXECUTED, spans=spans))
    assert found.stages[0] == pytest.approx(0.05)
    assert not found.within
    assert ingest_error(trace, trace).within


# Chakra


@pytest.mark.parametrize("strategy", PLANS)
def test_nodes_wait_for_what_ended_before_them(strategy):
    """Each span and message of a rank is a node, and all that a node waits for was over when it began."""
    plan, trace = planned(strategy)
    for rank in plan.ranks:
        nodes = nodes_of(trace, rank)
        own = [m for m in trace.messages if rank in (m.source_rank, m.destination_rank)]
        assert len(nodes) == len(own) + sum(span.rank == rank for span in trace.spans)
        assert [node.id for node in nodes] == list(range(len(nodes)))
        ends_us = [node.start_us + node.duration_us for node in nodes]
        for node in nodes:
            assert all(ends_us[other] <= node.start_us + 1 for other in node.needs)
        sends = [n for n in nodes if n.type is NodeType.SEND]
        assert all(nodes[need].type is NodeType.COMPUTE for n in sends for need in n.needs)
        lane = [node for node in nodes if node.type is NodeType.COMPUTE]
        assert all(one.id in other.after for one, other in pairwise(lane))


@given(st.integers(0, 2**63 - 1))
def test_numbers_are_written_as_protobuf_does(value):
    """Seven bits a byte, lowest first, the top bit on all but the last."""
    written = _varint(value)
    assert sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(written)) == value
    assert [byte >> 7 for byte in written] == [1] * (len(written) - 1) + [0]
    assert len(written) == max(1, -(-value.bit_length() // 7))


# Commands


def test_commands_write_a_file_a_rank(tmp_path):
    plan, trace = planned("cornstarch")
    write_trace(trace, tmp_path / "a.sim.json")
    accept("trace", tmp_path / "a.sim.json", "--to", "hta", "-o", tmp_path / "hta")
    told = accept("trace", tmp_path / "a.sim.json", "--to", "chakra", "-o", tmp_path / "et", "--json")
    assert len(json.loads(told.stdout)["files"]) == len(plan.ranks)
    for rank in plan.ranks:
        content = json.loads((tmp_path / "hta" / f"rank{rank}.json").read_text())
        assert content["distributedInfo"]["rank"] == rank
        assert (tmp_path / "et" / f"trace.{rank}.et").stat().st_size > 0


def test_what_cannot_be_written_is_refused(tmp_path):
    empty = Trace(plan_hash="x", executor=Executor.SIMULATED, spans=())
    for write in (write_hta, write_chakra):
        with pytest.raises(ValueError, match="want a trace with spans"):
            write(empty, tmp_path)
    write_trace(empty, tmp_path / "a.json")
    for words, target in (
        ("want a trace with spans", "hta"),
        ("'chacra' is not one of 'hta', 'chakra'. Did you mean 'chakra'?", "chacra"),
    ):
        arguments = ("trace", tmp_path / "a.json", "--to", target, "-o", tmp_path / "out")
        refuse(*arguments, words=words, folder=tmp_path)
