"""Commands for clusters whose nodes fail and return: templates, failures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from workbench.bounded_file import read_bounded
from workbench.cli.console import print_result, warn
from workbench.cli.job_reading import read_job
from workbench.cli.options import ExecutionFile, Faults, JobFile, Json, Profile, RanksPerNode, with_flags_of
from workbench.elastic.availability import Availability, Change, Rates, parse_trace, random_trace, warned
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.job.process_nodes import is_local, num_process_nodes, on_process_nodes
from workbench.job.run_options import asked
from workbench.report.tables import listed, milliseconds, percent
from workbench.strategies.elastic_templates import ElasticTemplates, elastic_templates
from workbench.units import GB, duration_s, gib

if TYPE_CHECKING:
    from sim.failures.recovery import Recovery
    from sim.failures.run import FailureRun

HOUR_S = 3600.0
DRAWN_HOURS = 24.0  # of a drawn trace, unless --hours says otherwise

NumNodes = Annotated[
    int | None, typer.Option("--nodes", help="largest number of nodes; default: the job's, or the trace's")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """Flags of the trace of nodes that leave and join: one of `trace`, `mtbf` and `leaves`."""

    trace: Path | None = field(
        default=None,
        metadata=asked("trace of nodes: CSV with the columns t_s, event (add or remove), node"),
    )
    leaves: float | None = field(
        default=None,
        metadata=asked("rate at which a node leaves; replaces --trace", flag="--leaves-per-node-hour"),
    )
    mtbf: str | None = field(
        default=None,
        metadata=asked("mean time between node failures in the whole cluster, such as 6h; replaces --trace"),
    )
    joins: float = field(
        default=0.0,
        metadata=asked("rate at which a missing node is replaced", flag="--joins-per-missing-hour"),
    )
    hours: float | None = field(
        default=None,
        metadata=asked("simulated hours; default: the length of the trace, or 24 of a drawn one"),
    )
    seed: int = field(default=0, metadata=asked("random seed of the trace"))
    notice_s: float = field(default=0.0, metadata=asked("seconds of warning before a node leaves"))

    def availability(self, num_nodes: int) -> Availability:
        """Read or draw the trace.

        Args:
            num_nodes: of a drawn trace.

        Raises:
            ValueError: not one of the three is given, a bad trace or rate, or hours that are not above 0.
        """
        if sum(given is not None for given in (self.trace, self.leaves, self.mtbf)) != 1:
            raise ValueError("failures: want one of --trace, --mtbf and --leaves-per-node-hour")
        if self.hours is not None and not 0 < self.hours < float("inf"):
            raise ValueError(f"failures: --hours must be > 0, got {self.hours}")
        if self.trace is not None:
            availability = parse_trace(self.trace.name, read_bounded(self.trace))
            if not availability.events:
                raise ValueError(
                    f"{self.trace}: no node joins; want an add event at t_s 0 for each initial node"
                )
            return availability
        if self.mtbf is not None:
            rates = Rates.of_losses(duration_s(self.mtbf, "--mtbf"), num_nodes, self.joins)
        else:
            assert self.leaves is not None, "one of the three is given"
            rates = Rates(leaves_per_node_h=self.leaves, joins_per_missing_h=self.joins)
        return random_trace(num_nodes, rates, (self.hours or DRAWN_HOURS) * HOUR_S, self.seed)

    def simulated_s(self, availability: Availability) -> float | None:
        """Simulated seconds; None: to the end of a trace in which no node leaves or joins later.

        A drawn trace goes on behind its last loss, as training does.
        """
        if self.hours is not None or self.trace is None:
            return (self.hours or DRAWN_HOURS) * HOUR_S
        return availability.end_s or None


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
    templates = _elastic_templates(
        _job_on_nodes(job, nodes, ranks_per_node), nodes, faults, profile, execution
    )
    counts = range(templates.planned.specification.threshold, templates.planned.specification.num_nodes + 1)
    specification = templates.planned.specification
    print_result(
        _template_record(templates, counts),
        template_table(templates),
        _count_table(templates, counts),
        f"training needs at least {_counted(specification.threshold, 'node')}: "
        f"{_counted(faults + 1, 'pipeline')} of at least {_counted(specification.smallest, 'node')}, to "
        f"tolerate {_counted(faults, 'simultaneous failure')}",
        as_json=as_json,
    )


@with_flags_of(TraceFlags)
def failures_command(
    job: JobFile,
    changes: TraceFlags = TraceFlags(),
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
        float | None,
        typer.Option(
            "--dollars-per-node-hour",
            help="price of a node, for the cost per sample; default: by cluster.dollars_per_gpu_hour",
        ),
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
    base_job = _job_on_nodes(job, nodes, ranks_per_node)
    dollars = _node_dollars(base_job) if dollars is None else dollars
    availability = changes.availability(nodes or len(base_job.cluster.nodes))
    max_nodes = max((count for _, count in availability.num_nodes()), default=0)
    templates = _elastic_templates(base_job, nodes or max_nodes, faults, profile, execution)
    if max_nodes > templates.planned.specification.num_nodes:
        warn(f"{availability.name} has up to {max_nodes} nodes; nodes beyond {nodes} are not used")
    settings = Recovery(
        recover_s=recover_s,
        restart_s=restart_s,
        checkpoint_every=checkpoint_every,
        storage_bytes_per_s=storage_gb_per_s * 1e9,
    )
    window_s = changes.simulated_s(availability)
    told = warned(availability, changes.notice_s) if changes.notice_s else availability
    runs = [simulate_failures(system, told, window_s) for system in settings.systems(templates)]
    record = {"trace": availability.name, "systems": {run.system: _run_record(run, dollars) for run in runs}}
    saves = _saves_text(settings, templates.checkpoint_bytes)
    table = _run_table(f"{templates.job.name} on {availability.name}", runs, dollars)
    print_result(record, table, _changes_text(availability, window_s), saves, as_json=as_json)


def _changes_text(availability: Availability, window_s: float | None) -> str:
    """How many nodes leave and join in the window, and how many are there at its ends."""
    shown = [event for event in availability.events if window_s is None or event.time_s <= window_s]
    first = sum(event.time_s == 0 and event.change is Change.JOIN for event in shown)
    left = sum(event.change is Change.LEAVE for event in shown)
    joined = len(shown) - first - left
    return (
        f"nodes: {first} at first, {left} left, {joined or 'none'} joined, {first - left + joined} at the end"
    )


def _node_dollars(job: Job) -> float | None:
    """Dollars an hour of a node at the job's price of its GPUs; None where it has none."""
    price = job.dollars_per_rank_hour
    return None if price is None else price * job.cluster.nodes[0].num_ranks


def _saves_text(settings: "Recovery", saved_bytes: float) -> str:
    """Cost of the checkpoints of the job that restarts."""
    rate = settings.storage_bytes_per_s
    return (
        f"restarts: training stops every {settings.checkpoint_every} steps for {saved_bytes / rate:.3g} s, "
        f"until a checkpoint of {gib(saved_bytes):.3g} GiB is written at {rate / GB:g} GB/s"
    )


def _elastic_templates(
    job: Job, nodes: int | None, faults: int, profile: str | None, execution: Path | None
) -> ElasticTemplates:
    count = len(job.cluster.nodes) if nodes is None else nodes
    return elastic_templates(job, cost_of(job, profile, execution), num_nodes=count, num_faults=faults)


def _job_on_nodes(path: Path, nodes: int | None, ranks_per_node: int | None) -> Job:
    """Read a job; ranks of a `local` cluster are grouped into nodes as in `elastic`."""
    job = read_job(path)
    if not is_local(job):
        if ranks_per_node is not None:
            raise ValueError(
                f"--ranks-per-node makes nodes of cluster.local; those of job {job.name!r} have "
                f"{job.cluster.nodes[0].num_ranks}"
            )
        return job
    width = ranks_per_node or 1
    num_job_nodes = num_process_nodes(job, width)
    if num_job_nodes < 1:
        raise ValueError(
            f"job {job.name!r} has {job.cluster.num_ranks} ranks: want --ranks-per-node at most that, "
            f"got {width}"
        )
    return on_process_nodes(job, num_nodes=nodes or num_job_nodes, ranks_per_node=width)


def template_table(templates: ElasticTemplates) -> Table:
    """Table of the templates, one row per number of nodes of a pipeline."""
    return listed(
        f"{templates.job.name}, templates",
        templates.planned.templates,
        ("nodes", lambda template: str(template.num_nodes)),
        ("stages", lambda template: str(len(template.stages))),
        ("GPUs a stage", lambda template: str(template.stages[0].num_gpus)),
        ("layers of the stages", lambda template: " ".join(str(s.end - s.first) for s in template.stages)),
        ("microbatch", lambda template: milliseconds(template.microbatch_s)),
        ("samples of it, at most", lambda template: str(min(templates.microbatch_capacity(template)))),
        key="templates",
    )


def _count_table(templates: ElasticTemplates, counts: range) -> Table:
    return listed(
        "throughput by number of nodes",
        reversed(counts),
        ("nodes", str),
        ("pipelines of", lambda count: " + ".join(map(str, templates.at(count).sizes))),
        ("iteration", lambda count: milliseconds(len(templates.job.batch) / templates.samples_per_s(count))),
        ("samples/s", lambda count: f"{templates.samples_per_s(count):.4g}"),
        ("a grid, samples/s", lambda count: f"{templates.grid_samples_per_s(count):.4g}"),
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _template_record(templates: ElasticTemplates, counts: range) -> dict[str, Any]:
    return {
        "threshold": templates.planned.specification.threshold,
        "templates": {
            template.num_nodes: [[s.first, s.end, s.num_gpus] for s in template.stages]
            for template in templates.planned.templates
        },
        "microbatch_capacity": {
            template.num_nodes: list(templates.microbatch_capacity(template))
            for template in templates.planned.templates
        },
        "samples_per_s": {count: templates.samples_per_s(count) for count in counts},
        "grid_samples_per_s": {count: templates.grid_samples_per_s(count) for count in counts},
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

    kinds = (Spent.EFFECTIVE, Spent.RECOVERY, Spent.LOST, Spent.CHECKPOINT, Spent.WAITING)
    prices = () if dollars is None else (dollars,)
    return listed(
        f"{title}, {runs[0].window_s / HOUR_S:.4g} h",
        runs,
        ("", lambda run: run.system),
        ("samples", lambda run: f"{run.samples:,.0f}"),
        ("samples/s", lambda run: f"{run.samples_per_s:.4g}"),
        ("recoveries", lambda run: str(run.num_recoveries)),
        *((kind.value, lambda run, kind=kind: percent(run.fraction(kind), signed=False)) for kind in kinds),
        *(("dollars/million", lambda run, d=d: f"{run.dollars_per_sample(d) * 1e6:,.2f}") for d in prices),
        key="systems",
    )
