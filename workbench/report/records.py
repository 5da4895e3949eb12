"""Output of commands for machines, as data for one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workbench.metrics import step_metrics
from workbench.plan.plan import Plan
from workbench.report.packed_rows import content_of
from workbench.timing.provenance import (
    interval_of,
    intervals_by_executor,
    noise_of,
    unmeasured_costs,
    utilisation,
)
from workbench.trace import Trace


def simulated_record(plan: Plan, trace: Trace) -> dict[str, Any]:
    """Metrics of a predicted step (seconds, bytes, fractions, rates), and unmeasured costs."""
    header = {"plan_hash": trace.plan_hash, "strategy": plan.strategy}
    figures = asdict(step_metrics(trace)) | {"mfu": utilisation(trace)}
    figures |= content_of(plan.batch).rates(trace.iteration_s)
    uncertainty = {
        "interval_80": interval_record(trace),
        "interval_80_by_executor": [
            {"executor": one.executor, "low_s": one.interval.low_s, "high_s": one.interval.high_s}
            for one in intervals_by_executor(trace)
        ],
        "unmeasured": list(unmeasured_costs(trace)),
        "noise": list(noise_of(trace)),
    }
    return header | figures | uncertainty


def interval_record(trace: Trace) -> dict[str, Any] | None:
    """Ends of the 80 % interval, and the reasons for its width as deviations of the step's logarithm."""
    interval = interval_of(trace)
    if interval is None:
        return None
    doubts = {doubt.about: doubt.deviation for doubt in interval.doubts}
    return {"low_s": interval.low_s, "high_s": interval.high_s, "doubts": doubts}


def executed_record(plan: Plan, traces: Sequence[Trace], files: Sequence[Path]) -> dict[str, Any]:
    """Metrics and loss of every executed step, and the files of its traces."""
    return {
        "plan_hash": traces[0].plan_hash,
        "strategy": plan.strategy,
        "executor": traces[0].executor.value,
        "steps": [asdict(step_metrics(trace)) | {"loss": trace.loss} for trace in traces],
        "traces": [str(path) for path in files],
    }
