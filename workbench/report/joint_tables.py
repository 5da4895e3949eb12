"""What a joint search found: records for scripts, tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from workbench.report.records import simulated_record
from workbench.report.search_tables import layout_record
from workbench.report.tables import milliseconds, titled
from workbench.search.joint.ablation import Gain
from workbench.search.joint.found import Found
from workbench.search.joint.starts import Start
from workbench.search.joint.written import written
from workbench.trace import Trace

Record = Mapping[str, Any]


def joint_record(
    job: str, found: Found, trace: Trace, replays: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """The answer, how far it may be from the best, where it came from, and what it began with.

    Args:
        trace: the answer's, by the engine.
        replays: of the other plans that the search held at its end: value and the engine's seconds.
    """
    best = found.best_start
    return {
        "job": job,
        "plan": simulated_record(found.plan, trace) | {"layout": layout_record(found.plan)},
        "objective": "iteration",
        "joint_s": found.value,
        "best_single": best.name,
        "best_single_s": best.value,
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
        "starts": [_start_record(start) for start in found.starts],
        "runners_up": [{"value": value, "replayed_s": seconds} for value, seconds in replays],
    }


def _start_record(start: Start) -> dict[str, Any]:
    if start.value is None:
        return {"strategy": start.name, "refusal": start.refusal}
    return {"strategy": start.name, "iteration_s": start.value}


def joint_table(record: Record) -> tuple[str, Table, str]:
    """What was found, the way to it from a strategy's plan, and how hard it was looked for."""
    first = (
        f"{milliseconds(record['joint_s'])} a step, {record['gain']:.3f} times as fast as the best strategy, "
        f"{record['best_single']} with {milliseconds(record['best_single_s'])}"
    )
    table = titled(f"joint search of {record['job']}, from {record['best_from']}", ("", "question"))
    table.add_column("move", overflow="fold")
    table.add_column("step", justify="right")
    for entry in record["path"]:
        for number, move in enumerate(entry["moves"]):
            last = number == len(entry["moves"]) - 1
            seconds = milliseconds(entry["value"]) if last else ""
            table.add_row(str(entry["candidate"]), move["question"], _told(move), seconds)
    last_line = (
        f"no plan is faster than {milliseconds(record['lower_bound_s'])}, gap {record['gap']:.1%}; "
        f"{record['candidates']} candidates in {record['seconds']:.1f} s, "
        f"{record['candidates_per_s']:.3g} a second"
    )
    return first, table, last_line


def _told(move: Record) -> str:
    """`Exchange first 3, second 5`."""
    fields = {key: value for key, value in move.items() if key not in ("move", "question")}
    return f"{move['move']} {', '.join(f'{key} {_plain(value)}' for key, value in fields.items())}"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(_plain(each) for each in value.values())
    if isinstance(value, list):
        return "; ".join(_plain(each) for each in value)
    return str(value)


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
