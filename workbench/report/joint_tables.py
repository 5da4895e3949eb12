"""Results of a joint search: records for scripts, tables for people."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from workbench.plan.recomputed_layers import recompute_text
from workbench.planner.stage_counts import OUT_OF_TIME
from workbench.report.records import simulated_record
from workbench.report.search_tables import asked_text, layout_record
from workbench.report.tables import milliseconds, titled
from workbench.schedule.sharded import ReshardAfter
from workbench.search.joint.ablation import Gain
from workbench.search.joint.move import Move
from workbench.search.joint.move_json import move_to_json
from workbench.search.joint.result import SearchResult
from workbench.search.joint.starts import Start
from workbench.search.objectives.objective import Objective
from workbench.trace import Trace

Record = Mapping[str, Any]


def joint_record(
    job: str,
    result: SearchResult,
    trace: Trace,
    replays: Sequence[tuple[float, float]],
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """The answer, its gap to the lower bound, how it was derived, and its starts.

    Args:
        trace: the answer's, by the engine.
        replays: of the other incumbents at the end of the search: value and the engine's seconds.
        asked: the objective and what determines it. Values are its own; of a step they are seconds.
    """
    best, unit = result.best_start, unit_of(asked)
    return {
        "job": job,
        "plan": simulated_record(result.plan, trace) | {"layout": layout_record(result.plan)},
        **asked,
        f"joint_{unit}": result.value,
        "best_single": best.name,
        f"best_single_{unit}": best.value,
        "gain": (best.value or 0.0) / result.value,
        f"lower_bound_{unit}": result.lower_bound,
        "gap": result.gap,
        "candidates": result.candidates,
        "seconds": result.seconds,
        "search_s": result.search_s,
        "candidates_per_s": result.candidates_per_s,
        "best_from": result.best_from,
        "path": [
            {
                "candidate": entry.index,
                "value": entry.value,
                "moves": [_move_record(move) for move in entry.moves],
            }
            for entry in result.path
        ],
        "starts": [_start_record(start, unit) for start in result.starts],
        "runners_up": [{"value": value, "replayed_s": seconds} for value, seconds in replays],
    }


def _start_record(start: Start, unit: str) -> dict[str, Any]:
    """A start; with "stopped" if its planner was, and this is its best plan so far."""
    if start.value is None:
        return {"strategy": start.name, "refusal": start.refusal}
    valued = {"strategy": start.name, "iteration_s" if unit == "s" else unit: start.value}
    return valued if start.stopped_at is None else valued | {"stopped": True}


def joint_table(record: Record) -> tuple[str | Table, ...]:
    """The result, how it was derived, the effort of the search, and which starts were not judged in full."""
    is_time = "joint_s" in record
    shown = milliseconds if is_time else "{:.6g}".format
    unit, better = ("s", "fast") if is_time else ("value", "good")
    what = "a step" if is_time else f"by {record['objective']}, lower is better"
    unjudged = tuple(_late_lines(record["starts"]))
    rival = "the best strategy" if not unjudged else "the best start judged in time"
    first = (
        f"{shown(record[f'joint_{unit}'])} {what}, {record['gain']:.3f} times as {better} as {rival}, "
        f"{record['best_single']} with {shown(record[f'best_single_{unit}'])}"
    )
    title = f"joint search of {record['job']}{asked_text(record)}, from {record['best_from']}"
    table = titled(title, ("candidate", "question"), key="changes")
    table.add_column("change", overflow="fold")
    table.add_column("step" if is_time else "value", justify="right")
    for entry in record["path"]:
        lines = list(described_moves(entry["moves"]))
        for question, words in lines[:-1]:
            table.add_row(str(entry["candidate"]), question, words, "")
        question, words = lines[-1]
        table.add_row(str(entry["candidate"]), question, words, shown(entry["value"]))
    if not record["path"]:
        table.add_row("", "", "none: no candidate is better", shown(record[f"joint_{unit}"]))
    least = f"lower bound {shown(record[f'lower_bound_{unit}'])}, gap {record['gap']:.1%}"
    bound = least if record[f"lower_bound_{unit}"] else "no lower bound is known"
    last_line = (
        f"{bound}; {record['candidates']} candidates in {record['search_s']:.1f} s after "
        f"{record['seconds'] - record['search_s']:.1f} s of starts, {record['candidates_per_s']:.3g} a second"
    )
    return first, table, last_line, *unjudged


def _late_lines(starts: Sequence[Record]) -> Iterator[str]:
    """Which planners ran out of time, and so how far the result is never worse than theirs."""
    stopped = [start["strategy"] for start in starts if start.get("stopped")]
    unjudged = [start["strategy"] for start in starts if start.get("refusal") == OUT_OF_TIME]
    if not stopped and not unjudged:
        return
    num_done = len(starts) - len(stopped) - len(unjudged)
    yield f"{num_done} of {len(starts)} starts planned in full; a larger --budget plans the others:"
    if stopped:
        yield f"  stopped, with their best plans so far: {'; '.join(stopped)}"
    if unjudged:
        yield f"  not judged, out of time: {'; '.join(unjudged)}"


def ablation_table(record: Record) -> Table:
    """One line for every question searched alone, and one for all of them."""
    is_time = "before_s" in record
    shown, unit = (milliseconds, "s") if is_time else ("{:.6g}".format, "value")
    before = shown(record[f"before_{unit}"])
    title = f"{record['job']}{asked_text(record)}: each question alone from {record['strategy']}, {before}"
    better = "fast" if is_time else "good"
    headers = ("searched", "step" if is_time else "value", f"times as {better}", "candidates")
    table = titled(title, headers, key="each question alone")
    for row in record["rows"]:
        name = row["open"][0] if len(row["open"]) == 1 else "all together"
        value = row["iteration_s" if is_time else "value"]
        table.add_row(name, shown(value), f"{row['gain']:.3f}", str(row["candidates"]))
    return table


def ablation_record(
    job: str, strategy: str, rows: Sequence[Gain], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """One row for every question searched alone, and one for all together; `asked` as in `joint_record`."""
    unit = unit_of(asked)
    return {
        "job": job,
        **asked,
        "strategy": strategy,
        f"before_{unit}": rows[0].before,
        "rows": [
            {
                "open": [question.value for question in row.open],
                "iteration_s" if unit == "s" else unit: row.found.value,
                "gain": row.factor,
                "candidates": row.found.candidates,
                f"lower_bound_{unit}": row.found.lower_bound,
            }
            for row in rows
        ],
    }


def unit_of(asked: Mapping[str, Any]) -> str:
    """Suffix of the names of a record's values."""
    return "s" if asked["objective"] == Objective.ITERATION else "value"


def move_text(move: Move) -> str:
    """One move in words."""
    return _line([_move_record(move)])[1]


def _move_record(move: Move) -> dict[str, Any]:
    return {"question": move.question.value, **move_to_json(move)}


DEGREES = ("dp", "pp", "tp", "cp", "ep")


def described_moves(moves: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Question and description of moves made at once; modules that change alike share a line."""
    pending: list[Record] = []
    for move in moves:
        if pending and not _alike(pending[-1], move):
            yield _line(pending)
            pending = []
        pending.append(move)
    if pending:
        yield _line(pending)


def _alike(first: Record, second: Record) -> bool:
    """Whether they are the same change of two modules."""
    return "module" in first and {**first, "module": second.get("module")} == second


def _line(moves: Sequence[Record]) -> tuple[str, str]:
    first = moves[0]
    merged = (
        {**first, "module": ", ".join(str(move["module"]) for move in moves)} if len(moves) > 1 else first
    )
    return first["question"], _DESCRIPTIONS[first["move"]](merged)


def _arrange(move: Record) -> str:
    arrangement = move["arrangement"]
    words = f"{arrangement['placement']}: {_degrees(arrangement['degrees'])}"
    pooled = zip(arrangement["degrees"], arrangement.get("first_ranks", ()), strict=False)
    words += "".join(f"; {each['module']} from rank {first}" for each, first in pooled if first is not None)
    return words if move["samples"] is None else f"{words}; {_samples(move['samples'])}"


def _replan(move: Record) -> str:
    words = [
        f"{move['strategy']}'s plan, {_samples(move['microbatch_samples'])}, {_schedule(move['schedule'])}"
    ]
    if move["layouts"]:
        words.append(_degrees([{"dp": move["replicas"], **_stated(each)} for each in move["layouts"]]))
    settings = [f"{each['module']} {_settings(each)}" for each in move["modules"]]
    return "; ".join([*words, *settings])


def _keep(move: Record) -> str:
    return f"{move['module'] or 'all modules'}: {_settings(move)}"


def _take(move: Record) -> str:
    return f"as in {move['start']}"


def _shift(move: Record) -> str:
    """Back, the stage behind the boundary gets a layer of the one in front."""
    ends = (move["place"], move["place"] + 1)
    source, target = ends if move["by"] < 0 else ends[::-1]
    return f"{move['module']}: a layer from its stage {source} to its stage {target}"


def _move_sample(move: Record) -> str:
    modules = "of the LLM alone " if move["deferred"] else ""
    return f"sample {move['sample']} {modules}to microbatch {move['index']} of replica {move['replica']}"


_DESCRIPTIONS: dict[str, Callable[[Record], str]] = {
    "Arrange": _arrange,
    "Replan": _replan,
    "Keep": _keep,
    "Reshard": lambda move: f"{move['module'] or 'all modules'}: reshard after {move['after']}",
    "Take": _take,
    "Reschedule": lambda move: _schedule(move["schedule"]),
    "CutStages": lambda move: f"stages that train in pieces, {move['pieces']} each",
    "ShiftLayer": _shift,
    "RunEncodersAhead": lambda move: f"encoders run {move['lead']} microbatches ahead",
    "Exchange": lambda move: f"samples {move['first']} and {move['second']} change places",
    "MoveSample": _move_sample,
    "Reorder": lambda move: f"microbatch {move['start']} of replica {move['replica']} at {move['end']}",
    "Resize": lambda move: _samples(move["samples"]),
    "Regroup": lambda move: str(move["way"]),
    "Distribute": lambda move: f"tokens {move['rule']}",
    "ExchangeKeys": lambda move: f"{move['module']}: keys by {move['way']}",
}


def _degrees(degrees: Sequence[Record]) -> str:
    return ", ".join(f"{each['module']} {_beyond_one(each)}" for each in degrees)


def _beyond_one(degrees: Record) -> str:
    """The degrees above one; dp counts each joint replica, as in a job file."""
    degrees = {**degrees, "dp": (degrees.get("dp") or 1) * degrees.get("joint_replicas", 1)}
    known = [f"{name} {degrees[name]}" for name in DEGREES if degrees.get(name) not in (None, 1)]
    return " ".join(known) or "one rank"


def _samples(number: int) -> str:
    return f"{number} sample{'s' if number > 1 else ''} a microbatch"


def _schedule(schedule: Record) -> str:
    usual = {"virtual_stages": 1, "run_ahead": 0}
    others = {k: v for k, v in _stated(schedule).items() if k != "kind" and v != usual.get(k)}
    return ", ".join([schedule["kind"], *(f"{key} {value}" for key, value in others.items())])


def _settings(move: Record) -> str:
    """Recomputation, sharding and related settings."""
    recompute = recompute_text(move["recompute"], move.get("recompute_layers"))
    words = [f"recompute {recompute}", f"sharding {move['sharding']}"]
    if move.get("instances", 1) > 1:
        words.append(f"in {move['instances']} instances")
    if move.get("reshard_after", ReshardAfter.PASS) != ReshardAfter.PASS:
        words.append(f"reshard after {move['reshard_after']}")
    if move.get("sequence_parallel"):
        words.append("sequence parallelism")
    return ", ".join(words)


def _stated(record: Record) -> dict[str, Any]:
    return {k: v for k, v in record.items() if v is not None and v is not False and v != []}
