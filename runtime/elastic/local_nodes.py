"""A job's ranks on this machine grouped into nodes, as the options of `elastic` say, and their events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.elastic.progress import Progress
from workbench.bounded_file import read_bounded
from workbench.elastic.availability import Availability, parse_trace
from workbench.elastic.step_events import StepEvents, told_events, traced_events
from workbench.job.job import Job
from workbench.job.process_nodes import is_local, num_process_nodes, on_process_nodes
from workbench.plan.optimizer import Optimizer
from workbench.schedule.choice import ScheduleKind

STEPS = 20
MOST_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Happens:
    """A trace, and how its time maps to steps."""

    trace: Availability
    step_s: float
    notice_s: float

    @property
    def num_steps(self) -> int:
        """Number of steps until its last event has happened."""
        return int((self.trace.end_s - self.trace.events[0].time_s) // self.step_s) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A job on this machine's ranks, grouped into nodes.

    Raises:
        ValueError: what elastic training does not support; the message names it.
    """

    job: Job
    nodes: int | None
    ranks_per_node: int
    trace: Availability | None
    ranks_per_stage: int = 1

    def __post_init__(self) -> None:
        _check_job(self.job)
        width = self.ranks_per_node
        if width < 1:
            raise ValueError(f"elastic: want --ranks-per-node 1 or more, got {width}")
        if self.ranks_per_stage < 1 or width % self.ranks_per_stage:
            raise ValueError(
                f"elastic: a stage lies in one node, whose {width} ranks cannot be assigned to stages of "
                f"{self.ranks_per_stage}; want --ranks-per-node a multiple of --ranks-per-stage"
            )
        if self.num_nodes < 1:
            raise ValueError(f"elastic: want 1 node or more, got {self.num_nodes} of {width} ranks")
        if self.num_nodes * width > MOST_PROCESSES:
            raise ValueError(
                f"elastic: {self.num_nodes} nodes of {width} ranks are {self.num_nodes * width} processes of "
                f"this machine: want at most {MOST_PROCESSES}; nearest: --nodes "
                f"{max(1, MOST_PROCESSES // width)}"
            )

    @property
    def num_nodes(self) -> int:
        """Maximum number of nodes."""
        if self.nodes is not None:
            return self.nodes
        if self.trace is not None:
            return max(count for _, count in self.trace.num_nodes())
        return num_process_nodes(self.job, self.ranks_per_node)

    @property
    def num_cores(self) -> int:
        return self.job.cluster.nodes[0].num_cores or 1

    def on_nodes(self) -> Job:
        """The job on a cluster of such nodes; each has its ranks' share of the machine's memory."""
        return on_process_nodes(self.job, num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node)


def _check_job(job: Job) -> None:
    """Raise ValueError for settings of a job that elastic training does not support."""
    where = f"elastic: job {job.name!r}"
    if not is_local(job):
        raise ValueError(f"{where}: nodes are processes of this machine; want cluster.local: ranks and cores")
    for layout in job.layouts:
        if (layout.tp, layout.cp, layout.ep) != (1, 1, 1):
            raise ValueError(
                f"{where}: a stage has one rank, {layout.module!r} has tp {layout.tp}, cp {layout.cp}, "
                f"ep {layout.ep}; want 1"
            )
    if job.settings.modules:
        raise ValueError(
            f"{where}: recompute, instances, reshard_after, key_exchange, sequence_parallel and products are "
            "not supported in elastic training, --sharding applies to all modules; "
            f"{job.settings.modules[0].module!r} sets one"
        )
    wide = job.settings.optimizer_precision
    if wide not in (None, job.settings.precision):
        raise ValueError(f"{where}: want optimizer_precision as precision, got {wide.value!r}")
    if job.settings.optimizer is not Optimizer.ADAMW:
        raise ValueError(
            f"{where}: want optimizer {Optimizer.ADAMW.value!r}, got {job.settings.optimizer.value!r}"
        )
    if job.schedule.kind is not ScheduleKind.ONE_F_ONE_B:
        raise ValueError(f"{where}: want schedule 1f1b, got {job.schedule.kind}")
    if job.replicas != 1:
        raise ValueError(
            f"{where}: templates set the number of pipelines; want replicas 1, got {job.replicas}"
        )


def parsed_trace(
    trace: Path | None, step_s: float | None, event: list[str] | None, notice_s: float
) -> Happens | None:
    """The trace that the options name; None if they name none.

    Raises:
        ValueError: options that exclude each other, invalid seconds per step, an empty trace.
    """
    if trace is None:
        if step_s is not None or notice_s:
            raise ValueError("elastic: --step-s and --notice-s belong to --trace")
        return None
    if event:
        raise ValueError("elastic: --trace and --event exclude each other")
    if step_s is None:
        raise ValueError("elastic: --trace needs --step-s, its seconds per step")
    availability = parse_trace(trace.name, read_bounded(trace))
    if not availability.events:
        raise ValueError(f"{trace}: no node ever joins; those of its first instant are there at the start")
    if not 0 < step_s < float("inf") or not 0 <= notice_s < float("inf"):
        raise ValueError(f"elastic: want --step-s > 0 and --notice-s >= 0, got {step_s} and {notice_s}")
    return Happens(trace=availability, step_s=step_s, notice_s=notice_s)


def last_step(steps: int | None, happens: Happens | None, start: Progress | None) -> int:
    """Total number of steps; ValueError where they are taken already."""
    until = steps if steps is not None else STEPS if happens is None else happens.num_steps
    begun = 0 if start is None else start.step
    if until <= begun:
        suffix = f", {begun} are taken already" if begun else ""
        raise ValueError(f"elastic: want --steps {begun + 1} or more, got {until}{suffix}")
    return until


def events_of(
    event: Sequence[str],
    happens: Happens | None,
    shape: Shape,
    *,
    first: int,
    steps: int,
    warn: Callable[[str], None],
) -> StepEvents:
    """Events of the nodes, from the options or the trace.

    Args:
        warn: called for events that come too late, and for too many nodes.

    Raises:
        ValueError: as `told_events` and `traced_events`, or more nodes at the start than `--nodes`.
    """
    num_nodes = shape.num_nodes
    if happens is None:
        events = told_events(event, num_nodes, first=first, steps=steps)
    else:
        events, num_late = traced_events(
            happens.trace, happens.step_s, happens.notice_s, first=first, steps=steps
        )
        if num_late:
            warn(f"{happens.trace.name}: {num_late} events come after {steps} steps, and are ignored")
    if len(events.start) > num_nodes:
        raise ValueError(
            f"elastic: {len(events.start)} nodes are present at the start, "
            f"templates are planned for {num_nodes}: want --nodes {len(events.start)}"
        )
    if events.most_nodes > num_nodes:
        warn(
            f"up to {events.most_nodes} nodes are present; those beyond {num_nodes} wait for room, "
            "see --nodes"
        )
    return events
