"""Recordings in, traces out: torch.profiler compared with our traces, HTA and Chakra with our figures.

Setup:   the demo's model, a quarter of its batch, on gloo processes that torch.profiler records; and four
         strategies' simulated steps of the whole job on A40s, written for HolisticTraceAnalysis and Chakra.
Run:     python -m experiments.doors.ingest [--json]
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.demo_job import demo_job, local_cluster
from experiments.doors.trace_tools import read_with
from experiments.harness.command import Found, bench
from runtime.data.batches import DataSource, SyntheticSource
from runtime.launch import result_of
from runtime.rank_job import Build, run_rank
from runtime.rank_report import RankReport
from runtime.run_settings import RunSettings
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Place, Pool
from sim.predict import predict_within
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.job.job import Job
from workbench.metrics import Breakdown, temporal_breakdown
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import silent
from workbench.schedule.action import COMPUTE
from workbench.strategies import cornstarch
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.trace import Trace
from workbench.trace_files.chakra import Node, NodeType, nodes_of, write_chakra
from workbench.trace_files.hta import write_hta
from workbench.trace_files.ingest import files_of, ingest, read_ranks
from workbench.units import GIB, US_PER_S

NUM_SAMPLES = 2
STRATEGIES = ("cornstarch", "encoders-replicated", "megatron-colocated", "fsdp")
WIRE = Link(name="loopback", bytes_per_s=1e9, latency_s=1e-4)
MEMORY_BYTES = 64 * GIB
MOST_INGEST_ERROR, MOST_HTA_ERROR = 0.02, 0.01
TIMEOUT_S, WAIT_S = 900.0, 120.0


def keys() -> dict[str, Any]:
    """`kineto_ingest_error`, `hta_loads` and `chakra_valid`."""
    traces = simulated_steps()
    return {
        "kineto_ingest_error": asdict(kineto_ingest_error()),
        "hta_loads": hta_loads(traces),
        "chakra_valid": chakra_valid(traces),
    }


# In


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestError:
    """Relative errors of an ingested step against our own trace of the same run.

    Args:
        iteration_s: seconds of our own trace.
        total: error of the iteration.
        stages: errors of the passes of each stage.
        within: whether all errors are at most 2 %.
    """

    iteration_s: float
    total: float
    stages: Mapping[int, float]
    within: bool


def kineto_ingest_error() -> IngestError:
    """The error for one step recorded by torch.profiler and our runtime at once."""
    job = demo_job("projectors+llm", local_cluster(WIRE, MEMORY_BYTES))
    plan = cornstarch.plan(replace(job, batch=job.batch[:NUM_SAMPLES]), CostModel(ideal_profile()))
    with tempfile.TemporaryDirectory() as folder:
        own_trace = recorded_run(plan, Path(folder))
        ingested = ingest(read_ranks(files_of([Path(folder)])), plan=plan)[-1]
    return ingest_error(own_trace, ingested)


def ingest_error(own: Trace, ingested: Trace) -> IngestError:
    """The errors of an ingested trace against our own of the same step."""
    total = ingested.iteration_s / own.iteration_s - 1
    own_s, ingested_s = _stage_s(own), _stage_s(ingested)
    stages = {stage: ingested_s.get(stage, 0.0) / seconds - 1 for stage, seconds in own_s.items()}
    worst = max(map(abs, (total, *stages.values())))
    return IngestError(
        iteration_s=own.iteration_s, total=total, stages=stages, within=worst <= MOST_INGEST_ERROR
    )


def recorded_run(plan: Plan, folder: Path) -> Trace:
    """Run a second step, with each rank recorded into a file of the folder; returns our own trace."""
    lowered, settings = lower(plan), RunSettings(warmup=1, steps=1)
    size = len(plan.ranks)
    with Pool(size) as pool:
        reports = pool.run(
            recorded_rank,
            size,
            lowered,
            settings,
            SyntheticSource(settings.seed),
            build_stage_module,
            folder,
            timeout_s=TIMEOUT_S,
            wait_s=WAIT_S,
        )
    return result_of(lowered, reports, settings).trace


def recorded_rank(
    place: Place, lowered: Lowered, settings: RunSettings, source: DataSource, build: Build, folder: Path
) -> RankReport:
    """Run one rank under torch.profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
        report = run_rank(place, lowered, settings, source, build)
    recording.export_chrome_trace(str(folder / f"rank{place.process}.json.gz"))
    return report


def _stage_s(trace: Trace) -> dict[int, float]:
    seconds_of: dict[int, float] = {}
    for span in trace.spans:
        if span.action.stage is not None and span.action.kind in COMPUTE:
            seconds_of[span.action.stage] = seconds_of.get(span.action.stage, 0.0) + span.end_s - span.start_s
    return seconds_of


# Out


def simulated_steps() -> dict[str, Trace]:
    """Strategy -> one step of the demo's job, as if its ranks were A40s."""
    job: Job = demo_job("projectors+llm", local_cluster(WIRE, MEMORY_BYTES))
    cost = CostModel(load_profile("A40"))
    steps = {}
    for name in STRATEGIES:
        lowered, memory = accept(PLANNERS[name](job, cost, silent))
        steps[name] = predict_within(lowered, memory, cost)
    return steps


def hta_loads(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """The number of traces that HTA loads, and its errors against ours, relative to a rank's time."""
    worst = 0.0
    for trace in traces.values():
        with tempfile.TemporaryDirectory() as folder:
            write_hta(trace, Path(folder))
            hta_figures = read_with("hta_reader", Path(folder))
        worst = max(worst, hta_error(trace, hta_figures))
    return {"tried": len(traces), "worst_error": worst, "within": worst <= MOST_HTA_ERROR}


def hta_error(trace: Trace, hta_figures: Mapping[str, Any]) -> float:
    """The largest difference of compute, other, idle and whole time, and of overlap, as fractions."""
    ours = temporal_breakdown(trace)
    times = {row["rank"]: row for row in hta_figures["breakdown"]}
    overlap = {row["rank"]: row["comp_comm_overlap_pctg"] / 100 for row in hta_figures["overlap"]}
    if set(times) != set(ours):
        raise ValueError(f"hta: has ranks {sorted(times)}, want {sorted(ours)}")
    return max(
        error
        for rank, breakdown in ours.items()
        for error in _hta_errors(breakdown, times[rank], overlap[rank])
    )


def _hta_errors(ours: Breakdown, times: Mapping[str, float], overlap: float) -> list[float]:
    pairs = (
        (ours.compute_s, times["compute_time(us)"]),
        (ours.other_s, times["non_compute_time(us)"]),
        (ours.idle_s, times["idle_time(us)"]),
        (ours.total_s, times["kernel_time(us)"]),
    )
    errors = [abs(our_s - their_us / US_PER_S) / ours.total_s for our_s, their_us in pairs]
    return errors if ours.overlap_fraction is None else [*errors, abs(ours.overlap_fraction - overlap)]


def chakra_valid(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """The number of files that mlc-chakra's schema reads back unchanged, and of their nodes."""
    files = nodes = valid = 0
    for trace in traces.values():
        with tempfile.TemporaryDirectory() as folder:
            paths = write_chakra(trace, Path(folder))
            chakra_nodes = read_with("chakra_reader", Path(folder))
        for path in paths:
            rank = int(path.suffixes[0].removeprefix("."))
            written, read = nodes_of(trace, rank), chakra_nodes[path.name]
            files, nodes = files + 1, nodes + len(written)
            valid += read["rest_bytes"] == 0 and read["nodes"] == [as_schema(node) for node in written]
    return {"files": files, "nodes": nodes, "valid": valid}


_TYPES = {
    NodeType.MEM_LOAD: "MEM_LOAD_NODE",
    NodeType.MEM_STORE: "MEM_STORE_NODE",
    NodeType.COMPUTE: "COMP_NODE",
    NodeType.SEND: "COMM_SEND_NODE",
    NodeType.RECEIVE: "COMM_RECV_NODE",
    NodeType.COLLECTIVE: "COMM_COLL_NODE",
}


def as_schema(node: Node) -> dict[str, Any]:
    """A node in protobuf's JSON: 64-bit numbers are text, and zeros and empty lists are left out."""
    values: dict[str, Any] = {
        "id": str(node.id) if node.id else None,
        "name": node.name,
        "type": _TYPES[node.type],
        "ctrl_deps": [str(dependency) for dependency in node.after],
        "data_deps": [str(dependency) for dependency in node.needs],
        "start_time_micros": str(node.start_us) if node.start_us else None,
        "duration_micros": str(node.duration_us) if node.duration_us else None,
        "attr": [
            {"name": name, "bool_val": value}
            if isinstance(value, bool)
            else {"name": name, "int64_val": str(value)}
            for name, value in node.attributes
        ],
    }
    return {name: value for name, value in values.items() if value}


@bench()
def run() -> Found:
    """Print the three keys, which all have to hold."""
    results = keys()
    for name, value in results.items():
        print(f"{name}: {value}")
    chakra = results["chakra_valid"]
    ok = results["kineto_ingest_error"]["within"] and results["hta_loads"]["within"]
    return Found(results, holds=ok and chakra["valid"] == chakra["files"])
