"""What a joint search found: records for scripts, tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from workbench.report.move_words import told_moves
from workbench.report.records import simulated_record
from workbench.report.search_columns import asked_text
from workbench.report.search_tables import layout_record
from workbench.report.tables import milliseconds, titled
from workbench.search.joint.ablation import Gain
from workbench.search.joint.found import Found
from workbench.search.joint.starts import Start
from workbench.search.joint.written import written
from workbench.search.objectives.objective import Objective
from workbench.trace import Trace

Record = Mapping[str, Any]


def joint_record(
    job: str,
    found: Found,
    trace: Trace,
    replays: Sequence[tuple[float, float]],
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """The answer, how far it may be from the best, where it came from, and what it began with.

    Args:
        trace: the answer's, by the engine.
        replays: of the other plans that the search held at its end: value and the engine's seconds.
        asked: the objective and what decides it. Values are its own; of a step they are seconds.
    """
    best, unit = found.best_start, "s" if asked["objective"] == Objective.ITERATION else "value"
    return {
        "job": job,
        "plan": simulated_record(found.plan, trace) | {"layout": layout_record(found.plan)},
        **asked,
        f"joint_{unit}": found.value,
        "best_single": best.name,
        f"best_single_{unit}": best.value,
        "gain": (best.value or 0.0) / found.value,
        "lower_bound_s": found.lower_bound,
        "gap": found.gap,
        "candidates": found.candidates,
        "seconds": found.seconds,
        "candidates_per_s": found.candidates_per_s,
        "best_from": found.best_from,
        "path": [
            {
                "candidate": entry.index,
                "value": entry.value,
                "moves": [{"question": move.question.value, **written(move)} for move in entry.moves],
            }
            for entry in found.path
        ],
        "starts": [_start_record(start, unit) for start in found.starts],
        "runners_up": [{"value": value, "replayed_s": seconds} for value, seconds in replays],
    }


def _start_record(start: Start, unit: str) -> dict[str, Any]:
    if start.value is None:
        return {"strategy": start.name, "refusal": start.refusal}
    return {"strategy": start.name, "iteration_s" if unit == "s" else unit: start.value}


def joint_table(record: Record) -> tuple[str, Table, str]:
    """What was found, the way to it from a strategy's plan, and how hard it was looked for."""
    is_time = "joint_s" in record
    shown = milliseconds if is_time else "{:.6g}".format
    unit, better = ("s", "fast") if is_time else ("value", "good")
    what = "a step" if is_time else f"by {record['objective']}, where less is better"
    first = (
        f"{shown(record[f'joint_{unit}'])} {what}, {record['gain']:.3f} times as {better} as the best "
        f"strategy, {record['best_single']} with {shown(record[f'best_single_{unit}'])}"
    )
    title = f"joint search of {record['job']}{asked_text(record)}, from {record['best_from']}"
    table = titled(title, ("candidate", "question"))
    table.add_column("change", overflow="fold")
    table.add_column("step" if is_time else "value", justify="right")
    for entry in record["path"]:
        lines = list(told_moves(entry["moves"]))
        for question, words in lines[:-1]:
            table.add_row(str(entry["candidate"]), question, words, "")
        question, words = lines[-1]
        table.add_row(str(entry["candidate"]), question, words, shown(entry["value"]))
    least = f"no plan is faster than {milliseconds(record['lower_bound_s'])}, gap {record['gap']:.1%}"
    bound = least if record["lower_bound_s"] else "no lower bound is known"
    last_line = (
        f"{bound}; {record['candidates']} candidates in {record['seconds']:.1f} s, "
        f"{record['candidates_per_s']:.3g} a second"
    )
    return first, table, last_line


def ablation_table(record: Record) -> Table:
    """A line for every question searched alone, and one for all of them."""
    title = f"{record['job']}: each question alone from {record['strategy']}, "
    table = titled(
        f"{title}{milliseconds(record['before_s'])}", ("searched", "step", "times as fast", "candidates")
    )
    for row in record["rows"]:
        name = row["open"][0] if len(row["open"]) == 1 else "all together"
        table.add_row(name, milliseconds(row["iteration_s"]), f"{row['gain']:.3f}", str(row["candidates"]))
    return table


def ablation_record(job: str, strategy: str, rows: Sequence[Gain]) -> dict[str, Any]:
    """A row for every question searched alone, and one for all together."""
    return {
        "job": job,
        "strategy": strategy,
        "before_s": rows[0].before,
        "rows": [
            {
                "open": [question.value for question in row.open],
                "iteration_s": row.found.value,
                "gain": row.factor,
                "candidates": row.found.candidates,
                "lower_bound_s": row.found.lower_bound,
            }
            for row in rows
        ],
    }
