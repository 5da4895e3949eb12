"""The plans of an output folder, and the traces that belong to them by hash."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.bounded_file import read_bounded
from workbench.job.job import Job
from workbench.plan.codec import FORMAT, is_hash_of, plan_hash, read_plan
from workbench.plan.plan import Plan
from workbench.report.search_points import points_of
from workbench.search.objectives.pareto import Point
from workbench.trace import Executor, Trace
from workbench.trace_json import read_trace

TRACE_KEY = "traceEvents"
SEARCH_KEYS = {"candidates", "front", "objective"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One plan with its traces; `simulated` and `emulated` are the last ones by file name."""

    path: Path
    plan: Plan
    plan_hash: str
    simulated: Trace | None
    executed: tuple[Trace, ...]
    emulated: Trace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of a search, as `workbench search --json` prints it: a point for each plan."""

    path: Path
    objective: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Plans and searches by file name; `left_out` says why every other JSON file is not shown."""

    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]
    searches: tuple[Search, ...] = ()


def read_folder(folder: Path) -> Folder:
    """Read every plan and trace in a folder; files are identified by content, not by name.

    Equal plans are one entry. Traces of plans outside the folder are left out, with a note.

    Raises:
        ValueError: a file that is no JSON, a corrupt plan, trace or search, or no plan at all.
        OSError: the folder cannot be read.
    """
    plans: dict[str, tuple[Path, Plan]] = {}
    traces: list[tuple[Path, Trace]] = []
    left_out: list[str] = []
    searches: list[Search] = []
    for path in sorted(folder.iterdir()):
        if path.suffix != ".json" or path.name.startswith("."):
            continue
        document = _read_json(path)
        if document.get("format") == FORMAT:
            plan = read_plan(path)
            plans.setdefault(plan_hash(plan), (path, plan))
        elif TRACE_KEY in document:
            traces.append((path, read_trace(path)))
        elif document.keys() >= SEARCH_KEYS:
            searches.append(_search(path, document))
        else:
            left_out.append(f"{path.name}: neither a plan, a trace nor a search")
    if not plans:
        raise ValueError(f"{folder}: want at least one plan file, got none among {_count(folder)} files")
    left_out += [
        f"{path.name}: a trace of plan {trace.plan_hash[:12]}, which is not in the folder"
        for path, trace in traces
        if not any(is_hash_of(trace.plan_hash, plan) for _, plan in plans.values())
    ]
    entries = tuple(
        Entry(
            path=path,
            plan=plan,
            plan_hash=digest,
            simulated=_last(traces, plan, Executor.SIMULATED),
            emulated=_last(traces, plan, Executor.EMULATED),
            executed=tuple(
                trace
                for _, trace in traces
                if is_hash_of(trace.plan_hash, plan) and trace.executor is Executor.EXECUTED
            ),
        )
        for digest, (path, plan) in plans.items()
    )
    return Folder(entries=entries, left_out=tuple(left_out), searches=tuple(searches))


def _search(path: Path, document: dict[str, Any]) -> Search:
    try:
        points = points_of(document["candidates"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: a search whose candidates lack what `search --json` prints: {error}"
        ) from None
    return Search(path=path, objective=str(document["objective"]), points=points)


def is_plan(path: Path) -> bool:
    """Whether a JSON file is a plan, by its content; ValueError or OSError if it cannot be read."""
    return bool(_read_json(path).get("format") == FORMAT)


def fastest_of(folder: Folder, job: Job) -> Entry:
    """The entry of a job with the shortest simulated step; ValueError if no plan is of that job."""
    entries = [e for e in folder.entries if (e.plan.model, e.plan.batch) == (job.model, job.batch)]
    if not entries:
        raise ValueError(f"no plan in the folder is of job {job.name!r}: other models or other samples")
    return min(entries, key=lambda e: float("inf") if e.simulated is None else e.simulated.iteration_s)


def repetition_paths(path: Path, repetitions: int) -> tuple[Path, ...]:
    """One trace file per repetition: `a.run.json` becomes `a.1.run.json`, `a.2.run.json`, ..."""
    if repetitions == 1:
        return (path,)
    stem, dot, rest = path.name.partition(".")
    return tuple(path.with_name(f"{stem}.{index}{dot}{rest}") for index in range(1, repetitions + 1))


def _read_json(path: Path) -> dict[str, Any]:
    text = read_bounded(path)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON (truncated?): {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    return document if isinstance(document, dict) else {}


def _last(traces: list[tuple[Path, Trace]], plan: Plan, executor: Executor) -> Trace | None:
    matching = [
        trace for _, trace in traces if is_hash_of(trace.plan_hash, plan) and trace.executor is executor
    ]
    return matching[-1] if matching else None


def _count(folder: Path) -> int:
    return sum(path.is_file() for path in folder.iterdir())
