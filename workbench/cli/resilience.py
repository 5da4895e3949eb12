"""Commands for nodes that come and go: what a job does on fewer of them, and how far it gets on a trace."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from workbench.bounded_file import read_bounded
from workbench.cli.console import print_result, warn
from workbench.cli.job_reading import read_job
from workbench.cli.options import ExecutionFile, Faults, JobFile, Json, Profile, RanksPerNode
from workbench.elastic.availability import Availability, Rates, parse_trace, random_trace, warned
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.job.process_nodes import is_local, num_process_nodes, on_process_nodes
from workbench.report.tables import listed, milliseconds, percent
from workbench.strategies.elastic_templates import ElasticTemplates, elastic_templates

if TYPE_CHECKING:
    from sim.failures.run import FailureRun

HOUR_S = 3600.0

NumNodes = Annotated[
    int | None, typer.Option("--nodes", help="largest number of nodes; default: the job's, or the trace's")
]


def templates_command(
    job: JobFile,
    nodes: NumNodes = None,
    ranks_per_node: RanksPerNode = None,
    faults: Faults = 1,
    profile: Profile = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Show pipeline templates of a job, and its throughput for each number of nodes."""
    found = _templates(_on_nodes(job, nodes, ranks_per_node), nodes, faults, profile, execution)
    counts = range(found.planned.specification.threshold, found.planned.specification.num_nodes + 1)
    specification = found.planned.specification
    print_result(
        _templates_record(found, counts),
        template_table(found),
        _count_table(found, counts),
        f"training needs at least {_num(specification.threshold, 'node')}: "
        f"{_num(faults + 1, 'pipeline')} of at least {_num(specification.smallest, 'node')}, to "
        f"tolerate {_num(faults, 'simultaneous failure')}",
        as_json=as_json,
    )


def failures_command(
    job: JobFile,
    trace: Annotated[
        Path | None,
        typer.Option(help="trace of nodes: CSV with the columns t_s, event (add or remove), node"),
    ] = None,
    leaves: Annotated[
        float | None,
        typer.Option("--leaves-per-node-hour", help="rate at which a node leaves; replaces --trace"),
    ] = None,
    joins: Annotated[
        float, typer.Option("--joins-per-missing-hour", help="rate at which a missing node is replaced")
    ] = 0.0,
    hours: Annotated[
        float | None, typer.Option(help="simulated hours; default: the length of the trace, or 24")
    ] = None,
    seed: Annotated[int, typer.Option(help="random seed of the trace")] = 0,
    notice_s: Annotated[float, typer.Option(help="seconds of warning before a node leaves")] = 0.0,
    nodes: NumNodes = None,
    ranks_per_node: RanksPerNode = None,
    faults: Faults = 1,
    recover_s: Annotated[
        float, typer.Option(help="seconds to detect a change, plan and connect; copying is added")
    ] = 2.0,
    restart_s: Annotated[
        float, typer.Option(help="seconds to restart from a checkpoint; loading is added")
    ] = 60.0,
    checkpoint_every: Annotated[
        int, typer.Option(help="steps between checkpoints of the job that restarts")
    ] = 100,
    storage_gb_per_s: Annotated[float, typer.Option(help="bandwidth of checkpoint storage in GB/s")] = 1.0,
    dollars: Annotated[
        float | None, typer.Option("--dollars-per-node-hour", help="price of a node, for the cost per sample")
    ] = None,
    profile: Profile = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Predict training progress while nodes fail and return: pipeline templates against restarts."""
    from sim.failures.recovery import Recovery
    from sim.failures.simulate import simulate_failures

    if dollars is not None and dollars < 0:
        raise ValueError(f"failures: --dollars-per-node-hour must be >= 0, got {dollars}")
    wanted = _on_nodes(job, nodes, ranks_per_node)
    happens = _availability(wanted, trace, leaves, joins, hours, seed, nodes)
    most = max((count for _, count in happens.num_nodes()), default=0)
    found = _templates(wanted, nodes or most, faults, profile, execution)
    if most > found.planned.specification.num_nodes:
        warn(f"{happens.name} has up to {most} nodes; nodes beyond {nodes} are not used")
    settings = Recovery(
        recover_s=recover_s,
        restart_s=restart_s,
        checkpoint_every=checkpoint_every,
        storage_bytes_per_s=storage_gb_per_s * 1e9,
    )
    until_s = (happens.end_s or None) if hours is None else hours * HOUR_S
    runs = [
        simulate_failures(system, warned(happens, notice_s) if notice_s else happens, until_s)
        for system in settings.systems(found)
    ]
    record = {"trace": happens.name, "systems": {r.system: _run_record(r, dollars) for r in runs}}
    print_result(record, _run_table(f"{found.job.name} on {happens.name}", runs, dollars), as_json=as_json)


def _availability(
    job: Job,
    trace: Path | None,
    leaves: float | None,
    joins: float,
    hours: float | None,
    seed: int,
    nodes: int | None,
) -> Availability:
    if (trace is None) == (leaves is None):
        raise ValueError("failures: want one of --trace and --leaves-per-node-hour")
    if hours is not None and not 0 < hours < float("inf"):
        raise ValueError(f"failures: --hours must be > 0, got {hours}")
    if trace is not None:
        found = parse_trace(trace.name, read_bounded(trace))
        if not found.events:
            raise ValueError(f"{trace}: no node joins; want an add event at t_s 0 for each initial node")
        return found
    assert leaves is not None, "one of the two is given"
    count = nodes or len(job.cluster.nodes)
    rates = Rates(leaves_per_node_h=leaves, joins_per_missing_h=joins)
    return random_trace(count, rates, (hours or 24.0) * HOUR_S, seed)


def _templates(
    job: Job, nodes: int | None, faults: int, profile: str | None, execution: Path | None
) -> ElasticTemplates:
    count = len(job.cluster.nodes) if nodes is None else nodes
    return elastic_templates(job, cost_of(job, profile, execution), num_nodes=count, num_faults=faults)


def _on_nodes(path: Path, nodes: int | None, ranks_per_node: int | None) -> Job:
    """The job; processes of this machine are nodes as `elastic` makes them."""
    job = read_job(path)
    if not is_local(job):
        if ranks_per_node is not None:
            raise ValueError(
                f"--ranks-per-node makes nodes of cluster.local; those of job {job.name!r} have "
                f"{job.cluster.nodes[0].num_ranks}"
            )
        return job
    width = ranks_per_node or 1
    natural = num_process_nodes(job, width)
    if natural < 1:
        raise ValueError(
            f"job {job.name!r} has {job.cluster.num_ranks} ranks: want --ranks-per-node at most that, "
            f"got {width}"
        )
    return on_process_nodes(job, num_nodes=nodes or natural, ranks_per_node=width)


def template_table(found: ElasticTemplates) -> Table:
    """One line per size of a pipeline."""
    return listed(
        f"{found.job.name}, templates",
        found.planned.templates,
        ("nodes", lambda template: str(template.num_nodes)),
        ("stages", lambda template: str(len(template.stages))),
        ("GPUs a stage", lambda template: str(template.stages[0].num_gpus)),
        ("layers of the stages", lambda template: " ".join(str(s.end - s.first) for s in template.stages)),
        ("microbatch", lambda template: milliseconds(template.microbatch_s)),
        ("samples of it, at most", lambda template: str(min(found.microbatch_capacity(template)))),
    )


def _count_table(found: ElasticTemplates, counts: range) -> Table:
    return listed(
        "throughput by number of nodes",
        reversed(counts),
        ("nodes", str),
        ("pipelines of", lambda count: " + ".join(map(str, found.at(count).sizes))),
        ("iteration", lambda count: milliseconds(len(found.job.batch) / found.samples_per_s(count))),
        ("samples/s", lambda count: f"{found.samples_per_s(count):.4g}"),
        ("a grid, samples/s", lambda count: f"{found.grid_samples_per_s(count):.4g}"),
    )


def _num(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _templates_record(found: ElasticTemplates, counts: range) -> dict[str, Any]:
    return {
        "threshold": found.planned.specification.threshold,
        "templates": {
            template.num_nodes: [[s.first, s.end, s.num_gpus] for s in template.stages]
            for template in found.planned.templates
        },
        "microbatch_capacity": {
            template.num_nodes: list(found.microbatch_capacity(template))
            for template in found.planned.templates
        },
        "samples_per_s": {count: found.samples_per_s(count) for count in counts},
        "grid_samples_per_s": {count: found.grid_samples_per_s(count) for count in counts},
    }


def _run_record(run: "FailureRun", dollars: float | None) -> Mapping[str, float]:
    from sim.failures.run import Spent

    record = {
        "samples": run.samples,
        "samples_per_s": run.samples_per_s,
        "recoveries": float(run.num_recoveries),
        "window_s": run.window_s,
        **{kind.value.replace(" ", "_"): run.fraction(kind) for kind in Spent},
    }
    if dollars is not None:
        record["dollars_per_sample"] = run.dollars_per_sample(dollars)
    return record


def _run_table(title: str, runs: "list[FailureRun]", dollars: float | None) -> Table:
    from sim.failures.run import Spent

    shown = (Spent.EFFECTIVE, Spent.RECOVERY, Spent.LOST, Spent.CHECKPOINT, Spent.WAITING)
    hourly = () if dollars is None else (dollars,)
    return listed(
        f"{title}, {runs[0].window_s / HOUR_S:.4g} h",
        runs,
        ("", lambda run: run.system),
        ("samples", lambda run: f"{run.samples:,.0f}"),
        ("samples/s", lambda run: f"{run.samples_per_s:.4g}"),
        ("recoveries", lambda run: str(run.num_recoveries)),
        *((kind.value, lambda run, kind=kind: percent(run.fraction(kind), signed=False)) for kind in shown),
        *(("dollars/million", lambda run, d=d: f"{run.dollars_per_sample(d) * 1e6:,.2f}") for d in hourly),
    )
