"""Plan files and traces of every version, torch's schedule files, and folders for a report."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.writing import CORPUS, JSON, Form, folder_in, json_bytes, reading
from workbench.cli.executing import compare_command, simulate_command
from workbench.cli.planning import plan_command
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.plan import codec
from workbench.plan.codec import read_plan
from workbench.plan.plan import Plan
from workbench.report.folder import read_folder
from workbench.schedule.action import SPELLINGS
from workbench.strategies.registry import BY_NAME
from workbench.trace_json import read_trace

STRATEGIES = ("cornstarch", "fsdp", "encoders-replicated")


def planned(strategy: str) -> Plan:
    """The plan of the corpus's job."""
    job = load_job(CORPUS / "job.yaml")
    return BY_NAME[strategy].planner(job, cost_of(job, None, None), lambda done, total, best_s: None)


def _plans(version: int) -> list[Any]:
    trees = []
    for strategy in STRATEGIES:
        with suppress(ValueError):  # a strategy may have no plan for so small a job
            trees.append(json.loads(codec.dumps(planned(strategy), version)))
    return trees


def _sealed(tree: Any) -> bytes:
    """The file with the right hash of its plan, so that more than the hash is checked."""
    if isinstance(tree, dict) and isinstance(tree.get("plan"), dict):
        with suppress(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            tree = tree | {"hash": _hash_of(tree)}
    return json_bytes(tree)


def _hash_of(tree: dict[str, Any]) -> str:
    return codec.hash_of_version(codec._plan_of(tree), tree["schema_version"])


SEALED = Form(_sealed, json.loads)


def _plan(version: int, folder: Path) -> Ready:
    out = folder_in(folder)

    def read(path: Path) -> Path:
        read_plan(path)
        codec.planned_with(path)
        return path

    def use(path: Path) -> None:
        simulate_command(path, out / "trace.json", "H100", as_json=True)

    return reading(SEALED, folder / "plan.json", _plans(version), read, use, out=out)


def _traces(folder: Path) -> tuple[Path, Path]:
    """A plan and its trace."""
    job, plan, trace = CORPUS / "job.yaml", folder / "good-plan.json", folder / "good-trace.json"
    plan_command(job=job, output=plan, as_json=True)
    simulate_command(plan, trace, "H100", as_json=True)
    return plan, trace


def _in_spelling(document: Any, version: int) -> Any:
    """A trace file in the spelling of an earlier version."""
    spelling, newest = SPELLINGS[version], SPELLINGS[max(SPELLINGS)]
    for event in document["traceEvents"]:
        if event.get("cat") in newest.names and "action" in event["args"]:
            action = newest.read(event["args"]["action"])
            event["args"]["action"] = event["name"] = spelling.write(action)
            event["cat"] = spelling.write(action).strip("0123456789")
    document["otherData"] |= {"schema_version": version, "executor": "executed"}
    return document


def _trace(version: int, folder: Path) -> Ready:
    (_, trace), path = _traces(folder), folder / "trace.json"

    def use(parsed: object) -> None:
        del parsed
        compare_command(trace, [path], as_json=True)

    return reading(JSON, path, [_in_spelling(json.loads(trace.read_bytes()), version)], read_trace, use)


def _report(folder: Path) -> Ready:
    plan, trace = _traces(folder)
    report_folder = folder_in(folder, "held")
    for path in (plan, trace):
        (report_folder / path.name).write_bytes(path.read_bytes())

    seeds = [json.loads(plan.read_bytes()), json.loads(trace.read_bytes())]
    return reading(SEALED, report_folder / "other.json", seeds, lambda path: read_folder(path.parent))


TARGETS = (
    *(
        Target(
            name=f"plan-v{version}",
            make=partial(_plan, version),
            readers=(
                "workbench.plan.codec:read_plan",
                "workbench.plan.codec:_document",
                "workbench.plan.codec:planned_with",
            ),
        )
        for version in SPELLINGS
    ),
    *(
        Target(
            name=f"trace-v{version}",
            make=partial(_trace, version),
            readers=("workbench.trace_json:read_trace", "workbench.trace_json:loads"),
        )
        for version in SPELLINGS
    ),
    Target(name="report-folder", make=_report, readers=("workbench.report.folder:_read_json",)),
)
