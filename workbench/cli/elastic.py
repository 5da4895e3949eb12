"""The command that trains on nodes that come and go: real processes of this machine, killed as told."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import warn
from workbench.cli.job_reading import read_job
from workbench.cli.options import ExecutionFile, Faults, JobFile, Json, Profile
from workbench.job.machines import cost_of
from workbench.plan.plan import Sharding
from workbench.strategies.elastic_templates import elastic_templates
from workbench.units import S_PER_DAY
from workbench.whole_file import check_writable


def elastic_command(
    job: JobFile,
    steps: Annotated[
        int | None, typer.Option(help="in all, since the seed; default: the trace's, or 20")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="at most; default: the job's ranks, or the trace's nodes")
    ] = None,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="processes of a node")] = 1,
    ranks_per_stage: Annotated[
        int, typer.Option("--ranks-per-stage", help="that split the samples of every microbatch")
    ] = 1,
    sharding: Annotated[
        Sharding,
        typer.Option(help="what else these shard: none, or parameters and their optimizer state"),
    ] = Sharding.NONE,
    faults: Faults = 1,
    event: Annotated[
        list[str] | None,
        typer.Option(
            help="STEP:kill|join|warn:NODE when so many steps were taken; recovery:kill:NODE while the "
            "kill listed before is recovered from; nodes are node0, node1, ...",
            metavar="STEP:WHAT:NODE",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="instead of events: CSV with the columns t_s, event, node")
    ] = None,
    step_s: Annotated[
        float | None, typer.Option("--step-s", help="seconds of the trace that a step stands for")
    ] = None,
    notice_s: Annotated[
        float, typer.Option(help="warning in the trace's seconds before a node leaves; 0: it is killed")
    ] = 0.0,
    checkpoint: Annotated[
        Path | None, typer.Option(help="folder that progress is saved in when training ends or must stop")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps; also save meanwhile")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="go on from the furthest save in a --checkpoint folder")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="data folder, read over and over; default: random data")
    ] = None,
    seed: Annotated[int, typer.Option(help="of weights and random data")] = 0,
    timeout: Annotated[float, typer.Option(help="seconds, of any single wait")] = 30.0,
    out: Annotated[Path | None, typer.Option("--out", help="folder for predictions, record and plot")] = None,
    profile: Profile = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Train for real on nodes that are killed, warned and join, and say before what a step will take."""
    from runtime.elastic.forecast import check_waits, forecast_layouts, predict_steps
    from runtime.elastic.local_nodes import Shape, events_of, last_step, parsed_trace
    from runtime.elastic.run import NUM_SAVES, Saving, elastic_job, latest_progress
    from runtime.elastic.step_data import drawn, read_folder
    from runtime.state.save_folder import check_folder
    from sim.predict import predict
    from workbench.cli.elastic_training import (
        PLOT,
        PREDICTIONS,
        RECORD,
        Task,
        end,
        print_forecast,
        print_outcome,
        run_task,
    )

    if checkpoint_every is not None and checkpoint is None:
        raise ValueError("elastic: --checkpoint-every wants --checkpoint FOLDER")
    if not 0 < timeout <= S_PER_DAY:
        raise ValueError(f"elastic: want --timeout > 0 and at most {S_PER_DAY:g} s, got {timeout}")
    for path in (
        *((out / name for name in (RECORD, PREDICTIONS, PLOT)) if out else ()),
        *_inside(checkpoint),
    ):
        check_writable(path)
    happens = parsed_trace(trace, step_s, event, notice_s)
    shape = Shape(
        job=read_job(job),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        ranks_per_stage=ranks_per_stage,
        trace=None if happens is None else happens.trace,
    )
    cost = cost_of(shape.job, profile, execution)
    whole = shape.on_nodes()
    reads = drawn(whole, seed) if data is None else read_folder(whole, data)
    found = elastic_templates(
        reads.job,
        cost,
        num_nodes=shape.num_nodes,
        num_faults=faults,
        sharing=ranks_per_stage,
        sharding=sharding,
    )
    trained = elastic_job(found, reads, seed=seed, wait_s=timeout, num_cores=shape.num_cores)
    start = None if resume is None else latest_progress(trained, resume, warn)
    until = last_step(steps, happens, start)
    begun = 0 if start is None else start.step
    events = events_of(event or (), happens, shape, first=begun, steps=until, warn=warn)
    forecast = forecast_layouts(trained, events, until)
    simulated = partial(predict, cost=cost)
    predictions = predict_steps(found, trained, forecast, shape.job.cluster, simulated, reads.looks)
    check_waits(predictions.values(), timeout)
    task = Task(
        found=found, job=trained, events=events, steps=until, forecast=forecast, predictions=predictions
    )
    saving = None if checkpoint is None else Saving(folder=checkpoint, every=checkpoint_every)
    if saving is not None:
        check_folder(saving.folder, NUM_SAVES * sum(trained.layer_bytes()))
    print_forecast(task, out, quiet=as_json)
    ran = run_task(task, start, saving, quiet=as_json)
    print_outcome(task, ran, out, as_json=as_json)
    end(ran)


def _inside(folder: Path | None) -> tuple[Path, ...]:
    """A file that could be written in a folder that is to be made."""
    return () if folder is None else (folder / "progress",)
