"""Recordings of torch.profiler as traces: a job that ran as simulated comes back as it was."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.predict import predict_within
from tests.command_line import JOB, accept
from tests.kineto_files import Shows, document, write_recordings
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import job_from_spec
from workbench.job.job_file import parse_spec
from workbench.plan.codec import write_plan
from workbench.plan.plan import Plan
from workbench.report.compare import compare, lost_text, lost_time
from workbench.schedule.action import COMPUTE, Pass
from workbench.strategies.registry import BY_NAME
from workbench.timing.accept import accept as accept_plan
from workbench.trace import Executor, Lane, Span, Trace
from workbench.trace_files.exchanges import collective_of
from workbench.trace_files.ingest import files_of, ingest, read_ranks
from workbench.trace_files.kineto import MOST_SAMPLES, AllocatedBytes, Recording, recording_of, thinned
from workbench.trace_files.passes import find_passes, meaning_of
from workbench.trace_json import read_trace, write_trace

LENGTH_S = 0.25
NANOSECOND = 2e-9
REPLICATED = JOB.replace("samples: 4", "samples: 4\n  replicas: 2").replace("ranks: 4", "ranks: 8")
UNCUT = JOB.replace(
    "  vision: {pp: 1}\n  audio: {pp: 1}\n  llm: {pp: 2}",
    "  vision: {pp: 1}\n  audio: {pp: 1}\n  llm: {pp: 1}",
)
PLANS = {"cornstarch": JOB, "megatron-colocated": REPLICATED, "fsdp": UNCUT}


@cache
def planned(strategy: str) -> tuple[Plan, Trace]:
    """A plan and its simulated step, stretched to a quarter of a second."""
    job = job_from_spec(parse_spec(PLANS[strategy], where="job"), folder=Path())
    cost = CostModel(load_profile("H100"))
    plan = BY_NAME[strategy].planner(job, cost)
    lowered, memory = accept_plan(plan)
    return plan, stretched(predict_within(lowered, memory, cost), LENGTH_S)


def stretched(trace: Trace, length_s: float) -> Trace:
    by = length_s / trace.iteration_s
    return replace(
        trace,
        spans=tuple(s._replace(start_s=s.start_s * by, end_s=s.end_s * by) for s in trace.spans),
        messages=tuple(
            m._replace(ready_s=m.ready_s * by, start_s=m.start_s * by, end_s=m.end_s * by)
            for m in trace.messages
        ),
        memory=tuple(m._replace(time_s=m.time_s * by) for m in trace.memory),
    )


def recorded(trace: Trace, shows: Shows = Shows.ACTIONS, *, steps: int = 1) -> list[Recording]:
    ranks = sorted({span.rank for span in trace.spans})
    return [recording_of(document([trace] * steps, rank, shows), Path(f"rank{rank}.json")) for rank in ranks]


def computed(trace: Trace) -> list[Span]:
    kinds = (*COMPUTE, Pass.STEP)
    return sorted((s for s in trace.spans if s.action.kind in kinds), key=lambda s: (s.rank, str(s.action)))


def first_s(trace: Trace) -> float:
    """Ingested steps begin with their first pass, or the gather before it."""
    gathers = [span for span in trace.spans if span.action.kind is Pass.ALL_GATHER]
    return min(span.start_s for span in (*computed(trace), *gathers))


# A job that ran as simulated


@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize("shows", [Shows.ACTIONS, Shows.WORDS, Shows.MODULES])
def test_what_ran_as_simulated_comes_back(strategy, shows):
    """Passes to the nanosecond, whether they are named, numbered by their order, or shown as modules."""
    plan, simulated = planned(strategy)
    for step in ingest(recorded(simulated, shows, steps=2), plan=plan):
        assert step.plan_hash == simulated.plan_hash
        assert step.executor is Executor.EXECUTED
        want, got = computed(simulated), computed(step)
        assert [(s.rank, s.action) for s in got] == [(s.rank, s.action) for s in want]
        for one, other in zip(want, got, strict=True):
            assert other.start_s == pytest.approx(one.start_s - first_s(simulated), abs=NANOSECOND)
            assert other.end_s == pytest.approx(one.end_s - first_s(simulated), abs=NANOSECOND)


@pytest.mark.parametrize("strategy", PLANS)
def test_exchanges_and_messages_come_back_on_their_lanes(strategy):
    plan, simulated = planned(strategy)
    [step] = ingest(recorded(simulated), plan=plan)
    want = [s for s in simulated.spans if s.lane is Lane.REDUCE]
    got = [s for s in step.spans if s.lane is Lane.REDUCE]
    alone = [s for s in want if s.action.kind is not Pass.REDUCE_GRAD]
    assert Counter((s.rank, s.action.kind) for s in got if s.action.kind is not Pass.REDUCE_GRAD) == Counter(
        (s.rank, s.action.kind) for s in alone
    )
    for kind in (Pass.ALL_GATHER, Pass.REDUCE_SCATTER):
        sums = [sum(s.end_s - s.start_s for s in spans if s.action.kind is kind) for spans in (want, got)]
        assert sums[0] == pytest.approx(sums[1], abs=1e-7)
    assert {s.rank for s in got if s.action.kind is Pass.REDUCE_GRAD} == {
        s.rank for s in want if s.action.kind is Pass.REDUCE_GRAD
    }
    assert Counter((m.source_rank, m.destination_rank) for m in step.messages) == Counter(
        (m.source_rank, m.destination_rank) for m in simulated.messages
    )


def test_messages_come_back_with_bytes_and_times():
    """Between two ranks, they go one after the other here, as NCCL takes them."""
    plan, simulated = planned("cornstarch")
    [step] = ingest(recorded(simulated), plan=plan)
    zero_s = first_s(simulated)
    want = sorted((m.source_rank, m.destination_rank, m.ready_s - zero_s, m) for m in simulated.messages)
    got = sorted((m.source_rank, m.destination_rank, m.ready_s, m) for m in step.messages)
    for (*_, one), (*_, other) in zip(want, got, strict=True):
        assert one.num_bytes == other.num_bytes
        assert other.start_s == pytest.approx(one.start_s - zero_s, abs=NANOSECOND)
        assert other.end_s == pytest.approx(one.end_s - zero_s, abs=NANOSECOND)


def test_plans_of_these_tests_have_what_is_tested():
    kinds = {s.action.kind for name in PLANS for s in planned(name)[1].spans}
    assert {Pass.REDUCE_GRAD, Pass.ALL_GATHER, Pass.REDUCE_SCATTER} <= kinds
    assert planned("cornstarch")[1].messages


def test_memory_counts_where_it_was_recorded():
    plan, simulated = planned("cornstarch")
    [step] = ingest(recorded(simulated), plan=plan)
    for rank in plan.ranks:
        want = max(m.num_bytes for m in simulated.memory if m.rank == rank and m.time_s >= first_s(simulated))
        assert max(m.num_bytes for m in step.memory if m.rank == rank) == want


def test_compared_with_its_own_plan_nothing_is_lost_but_what_was_made_slower():
    plan, simulated = planned("cornstarch")
    late = replace(
        simulated,
        spans=tuple(
            s._replace(end_s=s.end_s + 0.4 * (s.end_s - s.start_s)) if s.action.stage == 2 else s
            for s in simulated.spans
        ),
    )
    runs = ingest(recorded(late), plan=plan)
    comparison = compare(replace(simulated, memory=()), [replace(run, memory=()) for run in runs])
    stages = {row.name: row.error_fraction for row in comparison.rows if row.group == "stage"}
    assert stages["2"] == pytest.approx(1 / 1.4 - 1, rel=1e-6)
    assert stages["3"] == pytest.approx(0, abs=1e-6)
    worst = next(each for each in lost_time(simulated, runs) if each.stage is not None)
    assert worst.stage == 2
    assert "stage 2" in lost_text(lost_time(simulated, runs))


def test_streams_alone_show_passes_between_sends_and_receives():
    """A middle stage: every pass begins with a receive and ends with a send."""
    plan, simulated = planned("cornstarch")
    middle = next(s.flat_ranks[0] for s in plan.stages if s.id == 2)
    found = find_passes(recorded(simulated, Shows.NOTHING)[middle])
    assert found.by == "stream order"
    want = Counter(a.kind for a in plan.program[middle] if a.kind in (*COMPUTE, Pass.STEP))
    got = Counter(part.kind for part in found.parts)
    assert got[Pass.B] == want[Pass.B]
    assert got[Pass.STEP] == want[Pass.STEP]


def test_without_a_plan_names_or_blocks_of_ranks_say_the_stage():
    _, simulated = planned("cornstarch")
    [named] = ingest(recorded(simulated))
    assert {(s.rank, s.action) for s in computed(named)} == {(s.rank, s.action) for s in computed(simulated)}
    assert named.plan_hash == ""
    [blocks] = ingest(recorded(simulated, Shows.WORDS), pp=2)
    assert {(s.rank, s.action.stage) for s in blocks.spans if s.action.stage is not None} == {
        (0, 0), (1, 0), (2, 1), (3, 1)
    }  # fmt: skip


# Names


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("PP:2F0", (Pass.F, 2, 0)),
        ("PP:13W7", (Pass.W, 13, 7)),
        ("Forward 3", (Pass.F, None, 3)),  # torch.distributed.pipelining
        ("backward-compute", (Pass.B, None, None)),  # Megatron-LM
        ("## backward ##", (Pass.B, None, None)),
        ("DistributedDataParallel.forward", (Pass.F, None, None)),
        ("Optimizer.step#AdamW.step", (Pass.STEP, None, None)),
        ("PP:STEP", (Pass.STEP, None, None)),
        ("PP:2SEND_F0", None),
        ("FSDP::pre_backward", None),
        ("ProfilerStep#2", None),
        ("2F99999999999999999999", None),
    ],
)
def test_names_of_passes(name, meaning):
    assert meaning_of(name) == meaning


@pytest.mark.parametrize(
    ("kernel", "collective"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "AllGather"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "AllReduce"),
        ("ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)", "SendRecv"),
        ("ampere_bf16_s16816gemm", None),
    ],
)
def test_names_of_nccl_kernels(kernel, collective):
    assert collective_of(kernel) == collective


@pytest.mark.parametrize(("group", "counts"), [("mesh_tp", False), ("data_parallel", True)])
def test_collectives_of_tensor_parallelism_are_parts_of_passes(group, counts):
    plan, simulated = planned("megatron-colocated")
    documents = [document([simulated], rank) for rank in plan.ranks]
    for one in documents:
        for event in one["traceEvents"]:
            if "Process Group Description" in event.get("args", {}):
                event["args"]["Process Group Description"] = group
    recordings = [recording_of(one, Path(f"rank{rank}.json")) for rank, one in enumerate(documents)]
    [step] = ingest(recordings, plan=plan)
    assert any(s.lane is Lane.REDUCE for s in step.spans) is counts


@given(st.lists(st.integers(0, 10**9), max_size=4 * MOST_SAMPLES))
def test_thinned_memory_keeps_the_peak_and_the_order(sizes):
    held = [AllocatedBytes(float(index), size) for index, size in enumerate(sizes)]
    kept = thinned(held)
    assert len(kept) <= MOST_SAMPLES
    assert max((k.num_bytes for k in kept), default=0) == max(sizes, default=0)
    assert kept == sorted(kept)
    assert set(kept) <= set(held)


# A public recording: one backward, launched by a thread of its own (facebookresearch/HolisticTraceAnalysis,
# tests/data/call_stack/backward_thread.json at c1235b4, MIT; events without times of interest left out).
PUBLIC = {
    "distributedInfo": {"rank": 0},
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#552", "pid": 3914, "tid": 3914,
         "ts": 1666149715033200, "dur": 413451},
        {"ph": "X", "cat": "user_annotation", "name": "## backward ##", "pid": 3914, "tid": 3914,
         "ts": 1666149715287655, "dur": 107988},
        {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "ts": 1666149715428509, "dur": 45,
         "name": "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>",
         "args": {"stream": 7, "correlation": 2131433}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 3914, "tid": 24922,
         "ts": 1666149715364374, "dur": 10, "args": {"cbid": 211, "correlation": 2131433}},
    ],
}  # fmt: skip


def test_a_public_recording_is_read():
    [step] = ingest([recording_of(PUBLIC, Path("backward_thread.json"))])
    [span] = step.spans
    assert span.action.kind is Pass.B
    assert span.end_s - span.start_s == pytest.approx(45e-6, abs=1e-9)


# Commands


def test_from_recordings_to_a_comparison(tmp_path):
    plan, simulated = planned("cornstarch")
    write_plan(plan, tmp_path / "plan.json")
    write_trace(simulated, tmp_path / "plan.sim.json")
    folder = tmp_path / "job"
    folder.mkdir()
    write_recordings([simulated] * 2, folder)
    told = accept("ingest", folder, "--plan", tmp_path / "plan.json", "-o", tmp_path / "job.run.json")
    assert "annotations" in told.stdout
    files = [tmp_path / f"job.{step}.run.json" for step in (1, 2)]
    assert all(read_trace(path).plan_hash == simulated.plan_hash for path in files)
    told = accept("compare", tmp_path / "plan.sim.json", *files, "--json")
    assert abs(json.loads(told.stdout)["error_fraction"]) < 0.01
    told = accept("compare", tmp_path / "plan.json", *files, "--profile", "H100")
    assert "largest losses of a rank against the prediction" in told.stdout
    assert "vision" in told.stdout  # stages are named without asking
    rows = accept("ingest", folder, "--format", "csv").stdout.splitlines()
    assert len(rows) == 3  # names of columns, and two steps
    told = accept("ingest", folder, "--json")
    assert [trace["messages"] for trace in json.loads(told.stdout)["traces"]] == [len(simulated.messages)] * 2


def test_files_of_folders(tmp_path):
    _, simulated = planned("cornstarch")
    write_recordings([simulated], tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    files = files_of([tmp_path])
    assert [path.name for path in files] == [f"host.{rank}.pt.trace.json.gz" for rank in range(4)]
    assert [each.rank for each in read_ranks(files)] == [0, 1, 2, 3]
