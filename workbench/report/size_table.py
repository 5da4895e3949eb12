"""Trainings on growing clusters, as a table and as records."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from workbench.report.figure import Figure
from workbench.report.search_tables import PER_MODULE, per_module
from workbench.report.tables import listed, mebibytes, milliseconds
from workbench.search.sizing import Goal, Training
from workbench.units import S_PER_DAY, S_PER_HOUR


def size_table(job: str, goal: Goal, trainings: Sequence[Training]) -> Table:
    """One line for each number of GPUs."""
    table = listed(
        f"job {job}, {_length(goal)}",
        [(training, training.record) for training in trainings if training.record is not None],
        ("GPUs", lambda row: str(row[0].gpus)),
        ("strategy", lambda row: row[1]["strategy"]),
        ("used", lambda row: str(row[1]["ranks"])),
        *((name, lambda row, name=name: per_module(row[1]["layout"], name)) for name in PER_MODULE),
        ("memory", lambda row: _memory(row[1])),
        ("iteration", lambda row: milliseconds(row[1]["iteration_s"])),
        ("training", lambda row: duration_text(row[0].seconds)),
        ("80 % within", lambda row: "-" if row[0].interval_s is None else _span(*row[0].interval_s)),
        ("dollars", lambda row: dollars_text(row[0].dollars)),
        ("meets", lambda row: "yes" if row[0].meets(goal) else "no"),
        key="trainings",
    )
    refusals = (
        f"{training.gpus} GPUs: {training.refusal}" for training in trainings if training.record is None
    )
    table.caption = "\n".join(refusals) or None
    table.caption_justify = "left"
    return table


def _memory(record: Mapping[str, Any]) -> str:
    """Of the fullest GPU; `-` where no simulation counted it."""
    return "-" if record["peak_bytes"] is None else mebibytes(record["peak_bytes"])


def training_record(training: Training, goal: Goal) -> dict[str, Any]:
    """One training as data: seconds, dollars, and its plan's record."""
    if training.record is None:
        return {"gpus": training.gpus, "refusal": training.refusal, "meets": False}
    return {
        "gpus": training.gpus,
        "steps": training.steps,
        "training_s": training.seconds,
        "interval_80_s": training.interval_s,
        "dollars": training.dollars,
        "meets": training.meets(goal),
        "plan": dict(training.record),
    }


def answer_text(chosen: Training | None, goal: Goal, trainings: Sequence[Training]) -> str:
    """The answer in one line: number of GPUs and plan, or how close the nearest one comes."""
    if chosen is not None and chosen.record is not None:
        return f"{chosen.record['ranks']} GPUs: {_summary(chosen)}{_doubt(chosen, goal)}"
    planned = [training for training in trainings if training.record is not None]
    if not planned:
        return f"no plan on up to {trainings[-1].gpus} GPUs: {trainings[-1].refusal}"
    nearest = min(
        planned,
        key=lambda training: training.seconds if goal.deadline_s is not None else training.dollars or 0.0,
    )
    tried = ", ".join(str(training.gpus) for training in trainings)
    return f"no number of GPUs tried ({tried}) is enough; nearest: {nearest.gpus} GPUs, {_summary(nearest)}"


def duration_text(seconds: float) -> Figure:
    """Days, or hours below two days."""
    days = seconds / S_PER_DAY
    text = f"{days:.3g} days" if days >= 2 else f"{seconds / S_PER_HOUR:.3g} h"
    return Figure(text, {"s": seconds})


def dollars_text(dollars: float | None) -> Figure:
    return Figure("-" if dollars is None else f"{dollars:,.0f}", {"": dollars})


def _length(goal: Goal) -> str:
    return f"{goal.tokens:.4g} tokens" if goal.samples is None else f"{goal.samples:,} samples"


def _summary(training: Training) -> str:
    assert training.record is not None
    paid = "" if training.dollars is None else f", {dollars_text(training.dollars)} dollars"
    return f"strategy {training.record['strategy']}, {duration_text(training.seconds)}{paid}"


def _doubt(training: Training, goal: Goal) -> str:
    interval = training.interval_s
    if goal.deadline_s is None or interval is None or interval[1] <= goal.deadline_s:
        return ""
    return f"; not certain: the 80 % interval ends at {duration_text(interval[1])}"


def _span(low_s: float, high_s: float) -> Figure:
    return Figure(f"{duration_text(low_s)} - {duration_text(high_s)}", {"low_s": low_s, "high_s": high_s})
