"""A search's log as lines of JSON: its scope, every candidate and the answer; and its replay."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from workbench.cost.model import CostModel
from workbench.frozen_json import parse_json
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.evaluate import Judge, changed, plan_of
from workbench.search.joint.fewer_ranks import fewer_ranks
from workbench.search.joint.move import Move, Space
from workbench.search.joint.move_json import move_from_json, move_to_json
from workbench.search.joint.question import Question
from workbench.search.joint.result import Entry, SearchResult, path_of
from workbench.search.joint.starts import start_of, start_tasks
from workbench.search.joint.take import Take, take_moves
from workbench.search.joint.terms import Scope

AS_LOGGED = "want the job, the profile, the objective and the version of the log"


def log_lines(job: Job, scope: Scope, result: SearchResult) -> Iterator[str]:
    """Everything that a replay needs, and why each candidate was rejected."""
    fixed = {question.value: name for question, name in scope.fixed.items()}
    stopped = {start.name: start.stopped_at for start in result.starts if start.stopped_at is not None}
    yield json.dumps({"job": job.name, "seed": scope.seed, "fixed": fixed, "stopped": stopped})
    for entry in result.log:
        yield json.dumps(entry_record(entry))
    answer = result.path[-1].index if result.path else result.best_from
    yield json.dumps({"answer": answer, "value": result.value})


def entry_record(entry: Entry) -> dict[str, Any]:
    """One candidate as JSON data."""
    return {
        "candidate": entry.index,
        "base": entry.base,
        "moves": [move_to_json(move) for move in entry.moves],
        "value": entry.value,
        "refusal": entry.refusal,
        "accepted": entry.accepted,
    }


class _Logged(NamedTuple):
    """The parts of a log that a replay needs: fixed questions, path to the answer, its start, and its value;
    and for planners that were stopped, the number of reports at which they were.
    """

    fixed: Mapping[Question, str]
    path: tuple[Entry, ...]
    start: str
    value: float
    stopped: Mapping[str, int]


def replayed(
    job: Job,
    cost: CostModel,
    judge: Judge,
    planners: Mapping[str, Planner],
    lines: Iterable[str],
    *,
    is_timed: bool = False,
) -> tuple[Plan, float]:
    """Rebuild the answer of a logged search from the strategies it was derived from, and return it with its
    value.

    Args:
        is_timed: whether the judge measures time on this machine, so that values are not reproducible.

    Raises:
        ValueError: no log of this job, a strategy without a plan, or another value than was logged.

    Complexity: the plans of the strategies that contributed to the answer.
    """
    logged = _read(job, list(lines))
    path_moves: list[Move] = [move for entry in logged.path for move in entry.moves]
    names = {logged.start, *logged.fixed.values(), *(m.start for m in path_moves if isinstance(m, Take))}
    space, plans = Space(job, cost, {}, planners), {}
    for task in start_tasks(job, planners, fewer_ranks(job, cost, judge)):
        if task.name in names:
            start = start_of(task._replace(reports=logged.stopped.get(task.name, inf)), cost, judge)
            if start.choice is not None:
                space.starts[start.name], plans[start.name] = start.choice, start.plan
    if logged.start not in space.starts:
        raise ValueError(f"replay: strategy {logged.start!r} has no plan of job {job.name!r}; {AS_LOGGED}")
    try:
        moves = (*take_moves(space, logged.fixed), *path_moves)
        plan = plans[logged.start]
        if moves or plan is None:
            plan = plan_of(space, changed(space, space.starts[logged.start], moves))
        value = judge.value(plan)
    except ValueError as error:
        raise ValueError(f"replay: {error}") from None
    if value != logged.value and not is_timed:
        raise ValueError(
            f"replay: the answer has a value of {value!r}, logged was {logged.value!r}; {AS_LOGGED}"
        )
    return plan, value


def _read(job: Job, lines: Sequence[str]) -> _Logged:
    try:
        if len(lines) < 2:
            raise KeyError("answer")
        head, *entries, end = (parse_json(line, "replay: a line") for line in lines)
        if head["job"] != job.name:
            raise ValueError(f"replay: the log is of job {head['job']!r:.60}, not {job.name!r}")
        log = [_entry(data) for data in entries]
        if [entry.index for entry in log] != list(range(1, len(log) + 1)):
            raise ValueError("replay: candidates are missing from the log")
        path = path_of(log, end["answer"])
        fixed = {Question(name): str(strategy) for name, strategy in head["fixed"].items()}
        start = path[0].base if path else end["answer"]
        stopped = {str(name): int(reports) for name, reports in head.get("stopped", {}).items()}
        return _Logged(fixed, path, str(start), float(end["value"]), stopped)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"replay: no log of a joint search: {error!r:.100}") from None
    except ValueError as error:
        text = str(error).removeprefix("replay: ")
        raise ValueError(f"replay: {text if text.isprintable() else repr(text):.250}") from None


def _entry(data: Mapping[str, Any]) -> Entry:
    index, base = data["candidate"], data["base"]
    if isinstance(base, int) and not 0 < base < index:
        raise ValueError(f"replay: candidate {index} has a base {base} that is not in front of it")
    return Entry(
        index=index,
        base=base,
        moves=tuple(move_from_json(move) for move in data["moves"]),
        value=data["value"],
        refusal=data["refusal"],
        accepted=data["accepted"],
    )
