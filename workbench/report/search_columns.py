"""Columns that a search's objective adds to its table, and how the objective is called there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.report.figure import Figure
from workbench.report.tables import milliseconds, percent
from workbench.search.objectives.objective import Objective
from workbench.units import S_PER_HOUR, duration_text

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A header, and what stands below it for a candidate's record."""

    header: str
    cell: Callable[[Record], str]


def asked_text(found: Record) -> str:
    """`, by goodput over ..., seed 0`; empty where the objective is the step on the job's own batch."""
    parts = [] if found["objective"] == Objective.ITERATION else [f"by {found['objective']}"]
    if "batches" in found:
        many = f"{found['over']} of {found['batches']} batches" if found["batches"] > 1 else "1 batch"
        parts.append(f"{many}, planning {found['planning']}")
    if "mtbf_s" in found:
        parts.append(f"a loss every {duration_text(found['mtbf_s'])}, {found['traces']} traces")
    if "steps" in found:
        limit = "" if found["deadline_s"] is None else f" in {duration_text(found['deadline_s'])}"
        parts.append(f"{found['steps']:,} steps{limit}")
    if "seed" in found:
        parts.append(f"seed {found['seed']}")
    return f", {', '.join(parts)}" if parts else ""


def objective_columns(found: Record) -> list[Column]:
    """Those of what was asked."""
    columns = []
    if "batches" in found:
        if found["over"] != "mean":
            columns.append(Column(found["over"], lambda record: milliseconds(record["step_s"])))
        columns += [Column("mean of batches", _mean), Column("planning", _planning)]
    if found["objective"] == Objective.TRAINING:
        columns += [Column("training", _training), Column("dollars", _dollars), Column("idle\nGPUs", _idle)]
    if found["objective"] == Objective.GOODPUT:
        columns += [Column("useful\nsamples/s", _goodput), Column("of its speed", _useful)]
        columns += [Column("goes on from", _recovery), Column("spare\nnodes", _spare)]
    return columns


def _mean(record: Record) -> Figure:
    error = record["standard_error_s"]
    text = milliseconds(record["mean_s"])
    within = "" if error is None else f" +- {milliseconds(error)}"
    return Figure(f"{text}{within}", {"mean_s": record["mean_s"], "standard_error_s": error})


def _planning(record: Record) -> Figure:
    late = f", late {record['late_plans']}" if record["late_plans"] else ""
    seconds = record["planning_s"]
    return Figure(f"{milliseconds(seconds)}{late}", {"s": seconds, "late": record["late_plans"]})


def _training(record: Record) -> Figure:
    seconds = record["training_s"]
    return Figure(duration_text(seconds), {"h": seconds / S_PER_HOUR})


def _dollars(record: Record) -> Figure:
    return Figure(f"{record['dollars']:,.2f}", {"": record["dollars"]})


def _idle(record: Record) -> str:
    return str(record["idle_gpus"])


def _goodput(record: Record) -> Figure:
    rate, error = record["useful_samples_per_s"], record["useful_standard_error"]
    within = "" if error is None else f" +- {error:.2g}"
    return Figure(f"{rate:.4g}{within}", {"": rate, "standard_error": error})


def _useful(record: Record) -> str:
    return percent(record["useful_share"], signed=False)


def _recovery(record: Record) -> str:
    every = record["checkpoint_every"]
    return f"{record['recovery']}" if every is None else f"{record['recovery']}, every {every:,} steps"


def _spare(record: Record) -> str:
    return str(record["spare_nodes"])
