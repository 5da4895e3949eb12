"""The command `elastic`: training on local processes that stand for nodes, which are killed and join."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.console import warn
from workbench.cli.job_reading import read_job
from workbench.cli.options import ExecutionFile, Faults, JobFile, Json, Profile
from workbench.cost.hardware import Cluster
from workbench.cost.model import CostModel
from workbench.elastic.step_events import StepEvents
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.plan.plan import Sharding
from workbench.strategies.elastic_templates import ElasticTemplates, elastic_templates
from workbench.units import S_PER_DAY
from workbench.whole_file import check_writable

if TYPE_CHECKING:
    from runtime.elastic.job import ElasticJob
    from runtime.elastic.local_nodes import Shape
    from runtime.elastic.progress import Progress
    from runtime.elastic.run import Saving
    from runtime.elastic.step_data import StepData
    from workbench.cli.elastic_training import Task


Steps = Annotated[
    int | None, typer.Option(help="total steps, resumed ones included; default: the trace's, or 20")
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", help="largest number of nodes; default: the job's ranks, or the trace's nodes"),
]
RanksPerNode = Annotated[int, typer.Option("--ranks-per-node", help="processes per node")]
RanksPerStage = Annotated[
    int, typer.Option("--ranks-per-stage", help="ranks per stage, which split the samples of a microbatch")
]
ShardedBy = Annotated[
    Sharding, typer.Option(help="state that these ranks shard: none, or parameters with optimizer state")
]
Events = Annotated[
    list[str] | None,
    typer.Option(
        help="STEP:kill|join|warn:NODE after this many steps; recovery:kill:NODE during the recovery from "
        "the kill listed before; nodes are node0, node1, ...",
        metavar="STEP:WHAT:NODE",
    ),
]
TraceFile = Annotated[
    Path | None, typer.Option(help="trace of nodes: CSV with the columns t_s, event, node; replaces --event")
]
StepSeconds = Annotated[float | None, typer.Option("--step-s", help="seconds of the trace per step")]
NoticeSeconds = Annotated[
    float, typer.Option(help="seconds of warning before a node of the trace leaves; 0: it is killed")
]
SaveFolder = Annotated[Path | None, typer.Option(help="folder to save to when training ends or has to stop")]
SaveEvery = Annotated[int | None, typer.Option(help="also save every this many steps")]
ResumeFolder = Annotated[
    Path | None, typer.Option(help="continue from the latest intact save in a --checkpoint folder")
]
DataFolder = Annotated[Path | None, typer.Option(help="data folder, read repeatedly; default: random data")]
Seed = Annotated[int, typer.Option(help="random seed of weights and data")]
Timeout = Annotated[float, typer.Option(help="limit of every single wait in seconds")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="folder for predictions, results and plot")]


def elastic_command(
    job: JobFile,
    steps: Steps = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = 1,
    ranks_per_stage: RanksPerStage = 1,
    sharding: ShardedBy = Sharding.NONE,
    faults: Faults = 1,
    event: Events = None,
    trace: TraceFile = None,
    step_s: StepSeconds = None,
    notice_s: NoticeSeconds = 0.0,
    checkpoint: SaveFolder = None,
    checkpoint_every: SaveEvery = None,
    resume: ResumeFolder = None,
    data: DataFolder = None,
    seed: Seed = 0,
    timeout: Timeout = 30.0,
    out: OutFolder = None,
    profile: Profile = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Train on this machine while nodes are killed, warned or join; predict every layout first."""
    from runtime.elastic.local_nodes import Shape, events_of, last_step, parsed_trace
    from runtime.elastic.run import latest_progress

    _check_flags(timeout, checkpoint, checkpoint_every)
    _check_outputs(out, checkpoint)
    node_trace = parsed_trace(trace, step_s, event, notice_s)
    shape = Shape(
        job=read_job(job),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        ranks_per_stage=ranks_per_stage,
        trace=None if node_trace is None else node_trace.trace,
    )
    cost = cost_of(shape.job, profile, execution)
    step_data = _step_data(shape.on_nodes(), data, seed)
    planned_training = _plan(
        shape, cost, step_data, faults=faults, sharding=sharding, seed=seed, wait_s=timeout
    )
    start = None if resume is None else latest_progress(planned_training.job, resume, warn)
    end_step = last_step(steps, node_trace, start)
    first_step = 0 if start is None else start.step
    events = events_of(event or (), node_trace, shape, first=first_step, steps=end_step, warn=warn)
    task = _forecast(planned_training, events, end_step)
    saving = None if checkpoint is None else _saving(planned_training.job, checkpoint, checkpoint_every)
    _train(task, start, saving, out, as_json=as_json)


def _check_flags(timeout: float, checkpoint: Path | None, checkpoint_every: int | None) -> None:
    """Raise ValueError for flags that contradict each other, or an invalid --timeout."""
    if checkpoint_every is not None and checkpoint is None:
        raise ValueError("elastic: --checkpoint-every wants --checkpoint FOLDER")
    if not 0 < timeout <= S_PER_DAY:
        raise ValueError(f"elastic: want --timeout > 0 and at most {S_PER_DAY:g} s, got {timeout}")


def _check_outputs(out: Path | None, checkpoint: Path | None) -> None:
    """Raise ValueError unless files can be written to the folders, which need not exist yet."""
    from workbench.cli.elastic_training import PLOT, PREDICTIONS, RECORD

    outputs = [] if out is None else [out / name for name in (RECORD, PREDICTIONS, PLOT)]
    save_paths = [] if checkpoint is None else [checkpoint / "progress"]  # any file name there
    for path in (*outputs, *save_paths):
        check_writable(path)


def _step_data(job: Job, folder: Path | None, seed: int) -> "StepData":
    """Samples of a data folder, or random ones without one."""
    from runtime.elastic.step_data import drawn, read_folder

    return drawn(job, seed) if folder is None else read_folder(job, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedTraining:
    """A training, its templates, and what its step times are predicted with.

    Args:
        cluster: the machine whose processes stand for all nodes.
        cost: cost model of that machine.
        num_predicted_steps: number of steps to predict per layout, of which the mean is taken.
    """

    templates: ElasticTemplates
    job: "ElasticJob"
    cluster: Cluster
    cost: CostModel
    num_predicted_steps: int


def _plan(
    shape: "Shape",
    cost: CostModel,
    step_data: "StepData",
    *,
    faults: int,
    sharding: Sharding,
    seed: int,
    wait_s: float,
) -> _PlannedTraining:
    """Plan templates for all numbers of nodes, and describe the training on them."""
    from runtime.elastic.run import elastic_job

    templates = elastic_templates(
        step_data.job,
        cost,
        num_nodes=shape.num_nodes,
        num_faults=faults,
        sharing=shape.ranks_per_stage,
        sharding=sharding,
    )
    job = elastic_job(templates, step_data, seed=seed, wait_s=wait_s, num_cores=shape.num_cores)
    return _PlannedTraining(
        templates=templates,
        job=job,
        cluster=shape.job.cluster,
        cost=cost,
        num_predicted_steps=step_data.looks,
    )


def _forecast(training: _PlannedTraining, events: StepEvents, steps: int) -> "Task":
    """Predict all layouts and their step times; ValueError if a step takes longer than --timeout."""
    from runtime.elastic.forecast import check_waits, forecast_layouts, predict_steps
    from sim.predict import predict
    from workbench.cli.elastic_training import Task

    templates, job = training.templates, training.job
    forecast = forecast_layouts(job, events, steps)
    simulate = partial(predict, cost=training.cost)
    predictions = predict_steps(
        templates, job, forecast, training.cluster, simulate, training.num_predicted_steps
    )
    check_waits(predictions.values(), job.wait_s)
    return Task(
        templates=templates, job=job, events=events, steps=steps, forecast=forecast, predictions=predictions
    )


def _saving(job: "ElasticJob", folder: Path, every: int | None) -> "Saving":
    """Settings of saves; ValueError if the folder cannot be written or its disk is too full."""
    from runtime.elastic.run import NUM_SAVES, Saving
    from runtime.state.save_folder import check_folder, check_space

    saving = Saving(folder=folder, every=every)
    check_folder(folder)
    check_space(folder, NUM_SAVES * sum(job.layer_bytes()))
    return saving


def _train(
    task: "Task", start: "Progress | None", saving: "Saving | None", out: Path | None, *, as_json: bool
) -> None:
    """Print the prediction, train, and print the outcome."""
    from workbench.cli.elastic_training import finish, print_forecast, print_outcome, run_task

    print_forecast(task, out, quiet=as_json)
    result = run_task(task, start, saving, quiet=as_json)
    print_outcome(task, result, out, as_json=as_json)
    finish(result)
