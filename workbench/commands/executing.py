"""Commands that give a plan times: simulate, run, compare."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.commands.options import Json, PlanFile
from workbench.commands.prediction import predict
from workbench.console import emit_json, show, ticking
from workbench.cost.profile import load_profile
from workbench.matching import profile_for
from workbench.plan.accept import accept
from workbench.plan.codec import plan_hash, read_plan
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
from workbench.trace_json import read_trace, write_trace
from workbench.whole_file import check_writable


def simulate_command(
    plan: PlanFile,
    trace: Annotated[Path | None, typer.Option(help="trace file to write (Perfetto opens it)")] = None,
    profile: Annotated[str | None, typer.Option(help="profile name or file; default: by device")] = None,
    as_json: Json = False,
) -> None:
    """Predict what one step of a plan takes."""
    if trace is not None:
        check_writable(trace)
    found = read_plan(plan)
    lowered, memory = accept(found)
    facts = load_profile(profile) if profile else profile_for(found)
    simulated = predict(lowered, memory, facts)
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
    trace: Annotated[Path | None, typer.Option(help="trace file to write; one per repetition")] = None,
    steps: Annotated[int, typer.Option(help="timed steps, one after the other")] = 1,
    repetitions: Annotated[int, typer.Option(help="how often, each time from fresh weights")] = 1,
    warmup: Annotated[int, typer.Option(help="untimed steps before the timed ones")] = 1,
    seed: Annotated[int, typer.Option(help="of weights and data")] = 0,
    weights: Annotated[Path | None, typer.Option(help="folder with a Hugging Face folder per module")] = None,
    export: Annotated[
        Path | None, typer.Option(help="new folder for the trained weights, as --weights reads them")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="data folder; default: random data")] = None,
    timeout: Annotated[float, typer.Option(help="seconds, of any single wait")] = 60.0,
    as_json: Json = False,
) -> None:
    """Run steps of a plan for real."""
    if not local:
        raise ValueError(
            "run: want --local; on a cluster start torchrun --nproc-per-node RANKS -m runtime.launch PLAN"
        )
    from runtime.dataset import FolderSource
    from runtime.launch import run_local

    found = read_plan(plan)
    accept(found)
    source = FolderSource(data) if data is not None else None
    if trace is not None:
        check_writable(trace)
    with ticking(f"running on {len(found.ranks)} ranks", None, quiet=as_json) as ticker:
        result = run_local(
            found,
            steps=steps,
            repetitions=repetitions,
            warmup=warmup,
            seed=seed,
            weights=weights,
            export=export,
            timeout_s=timeout,
            source=source,
            progress=lambda done, total, loss: ticker.at(done, total, f"loss {loss:.6f}"),
        )
    files = repetition_paths(trace, len(result.traces)) if trace else ()
    for path, executed in zip(files, result.traces, strict=False):
        write_trace(executed, path)
    if as_json:
        emit_json(executed_record(found, result.traces, files) | {"losses": list(result.losses)})
    else:
        names = step_names(steps=steps, warmup=warmup, repetitions=repetitions)
        named = list(zip(names, result.traces, strict=True))
        written = (*files, *((export,) if export is not None else ()))
        show(
            metrics_table(found, named),
            losses_text(result.losses, warmup),
            *(f"written to {path}" for path in written),
        )


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
