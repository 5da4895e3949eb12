"""Commands that give a plan times: simulate, run, compare."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.commands.emulation import check_collectives, compose
from workbench.commands.machines import under
from workbench.commands.options import ExecutionFile, Json, PlanFile
from workbench.commands.prediction import predict
from workbench.console import Ticker, emit_json, show, ticking
from workbench.cost.profile import load_profile
from workbench.matching import cost_for
from workbench.plan.accept import accept
from workbench.plan.codec import plan_hash, read_plan
from workbench.plan.lowered import Lowered
from workbench.plan.provenance import unmeasured_costs
from workbench.report.compare import compare
from workbench.report.folder import repetition_paths
from workbench.report.records import executed_record, simulated_record
from workbench.report.tables import (
    comparison_table,
    losses_text,
    metrics_table,
    step_names,
    unmeasured_text,
)
from workbench.trace import Trace
from workbench.trace_json import read_trace, write_trace
from workbench.whole_file import check_writable

if TYPE_CHECKING:
    from runtime.batches import DataSource
    from runtime.rank_job import RunSettings

EMULATED_REPETITIONS = 3


def simulate_command(
    plan: PlanFile,
    trace: Annotated[Path | None, typer.Option(help="trace file to write (Perfetto opens it)")] = None,
    profile: Annotated[str | None, typer.Option(help="profile name or file; default: by device")] = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Predict what one step of a plan takes."""
    if trace is not None:
        check_writable(trace)
    found = read_plan(plan)
    lowered, memory = accept(found)
    cost = under(cost_for(found, load_profile(profile) if profile else None), execution)
    simulated = predict(lowered, memory, cost)
    if trace is not None:
        write_trace(simulated, trace)
    if as_json:
        emit_json(simulated_record(found, simulated))
    else:
        show(metrics_table(found, [("simulated", simulated)]), unmeasured_text(unmeasured_costs(simulated)))


def run_command(
    plan: PlanFile,
    local: Annotated[
        bool, typer.Option("--local", help="run its ranks as processes of this machine")
    ] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="run all ranks here, one action at a time, each timed alone")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="trace file to write; one per repetition")] = None,
    steps: Annotated[int, typer.Option(help="timed steps, one after the other")] = 1,
    repetitions: Annotated[
        int | None, typer.Option(help="how often, each time from fresh weights; 1, emulated 3")
    ] = None,
    warmup: Annotated[int, typer.Option(help="untimed steps before the timed ones")] = 1,
    seed: Annotated[int, typer.Option(help="of weights and data")] = 0,
    weights: Annotated[Path | None, typer.Option(help="folder with a Hugging Face folder per module")] = None,
    export: Annotated[
        Path | None, typer.Option(help="new folder for the trained weights, as --weights reads them")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="data folder, or tcp://HOST:PORT of `preprocess serve`; default: random data"),
    ] = None,
    data_keys: Annotated[
        Path | None, typer.Option(help="client's keys for a preprocessing server, see `preprocess keys`")
    ] = None,
    next_samples: Annotated[
        bool, typer.Option("--next-samples", help="every step takes the next samples of the data")
    ] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="folder to save to while it runs")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="steps")] = 10,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the latest whole checkpoint of the folder, if any")
    ] = False,
    timeout: Annotated[float, typer.Option(help="seconds, of any single wait")] = 60.0,
    profile: Annotated[
        str | None, typer.Option(help="of collectives, when emulated: profile name or file")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run steps of a plan for real."""
    if local and emulate:
        raise ValueError("run: --local and --emulate exclude each other: processes, or one after the other")
    if not local and not emulate:
        raise ValueError(
            "run: want --local or --emulate; on a cluster start "
            "torchrun --nproc-per-node RANKS -m runtime.launch PLAN"
        )
    if profile is not None and not emulate:
        raise ValueError("run: --profile gives an emulation its links; processes of this machine have theirs")
    if next_samples and (data is None or not local):
        raise ValueError("run: --next-samples takes them from a data folder; want --local and --data FOLDER")
    if (resume or checkpoint is not None) and (checkpoint is None or not local):
        raise ValueError("run: checkpoints are of processes: want --local and --checkpoint FOLDER")
    from runtime.checkpoint import Begin, checkpoints_in
    from runtime.checkpoint_files import identity_of
    from runtime.preprocess.source import following_of, source_of
    from runtime.rank_job import RunSettings

    found = read_plan(plan)
    lowered, _ = accept(found)
    source = source_of(data, data_keys, timeout_s=timeout)
    if trace is not None:
        check_writable(trace)
    settings = RunSettings(
        steps=steps,
        repetitions=repetitions if repetitions is not None else EMULATED_REPETITIONS if emulate else 1,
        warmup=warmup,
        seed=seed,
        weights=weights,
        export=export,
        timeout_s=timeout,
        following=following_of(source if next_samples else None, found),
    )
    if checkpoint is not None:
        begin = Begin.LATEST if resume else Begin.ANEW
        identity = identity_of(found, settings.dtype(found), seed)
        settings = replace(
            settings, checkpoints=checkpoints_in(checkpoint, checkpoint_every, begin, identity)
        )
    run = _emulated if emulate else _executed
    names, traces, losses = run(lowered, settings, source, profile, quiet=as_json)
    files = repetition_paths(trace, len(traces)) if trace else ()
    for path, made in zip(files, traces, strict=False):
        write_trace(made, path)
    if as_json:
        emit_json(executed_record(found, traces, files) | {"losses": list(losses)})
        return
    written = (*files, *((export,) if export is not None else ()))
    show(
        metrics_table(found, list(zip(names, traces, strict=True))),
        losses_text(losses, warmup),
        *((unmeasured_text(unmeasured_costs(traces[0])),) if emulate else ()),
        *(f"written to {path}" for path in written),
    )


Ran = tuple[list[str], tuple[Trace, ...], tuple[float, ...]]  # names of traces, traces, losses


def _executed(
    lowered: Lowered,
    settings: "RunSettings",
    source: "DataSource | None",
    profile: str | None,
    *,
    quiet: bool,
) -> Ran:
    from runtime.launch import run_lowered

    del profile
    with ticking(f"running on {len(lowered.plan.ranks)} ranks", None, quiet=quiet) as ticker:
        result = run_lowered(lowered, settings, source=source, progress=_telling(ticker))
    names = step_names(steps=settings.steps, warmup=settings.warmup, repetitions=settings.repetitions)
    return names[-len(result.traces) :], result.traces, result.losses  # a resumed run took the last ones


def _emulated(
    lowered: Lowered,
    settings: "RunSettings",
    source: "DataSource | None",
    profile: str | None,
    *,
    quiet: bool,
) -> Ran:
    from runtime.emulate import emulate
    from runtime.failure import RankError

    facts = load_profile(profile) if profile is not None else None
    check_collectives(lowered, facts)
    title = f"emulating {len(lowered.plan.ranks)} ranks"
    try:
        with ticking(title, None, quiet=quiet) as ticker:
            result = emulate(lowered, settings, source=source, progress=_telling(ticker))
    except RankError as error:
        raise ValueError(str(error)) from error
    name = f"emulated, median of {result.num_timed} steps"
    return [name], (compose(lowered, result, facts),), result.losses


def _telling(ticker: Ticker) -> Callable[[int, int, float], None]:
    return lambda done, total, loss: ticker.at(done, total, f"loss {loss:.6f}")


def compare_command(
    simulated: Annotated[Path, typer.Argument(help="simulated trace", metavar="SIMULATED")],
    executed: Annotated[list[Path], typer.Argument(help="executed traces", metavar="EXECUTED...")],
    plan: Annotated[Path | None, typer.Option(help="plan file, to name the stages")] = None,
    as_json: Json = False,
) -> None:
    """Hold a simulated trace against the executed ones of the same plan."""
    comparison = compare(read_trace(simulated), [read_trace(path) for path in executed])
    named = read_plan(plan) if plan is not None else None
    if named is not None and plan_hash(named) != comparison.plan_hash:
        raise ValueError(
            f"{plan}: the traces are of plan {comparison.plan_hash:.16}, this is {plan_hash(named):.16}"
        )
    if as_json:
        emit_json(comparison.as_json())
    else:
        show(comparison_table(comparison, named))
