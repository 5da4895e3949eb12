"""The commands. Names become objects here, and only here are simulator and runtime imported."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from workbench.calibrate.fit import fit
from workbench.console import OneLineErrors, emit_json, show, ticking
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, ideal_profile, load_profile, write_profile
from workbench.job import Job, load_job
from workbench.matching import check_job, profile_for
from workbench.plan.accept import accept
from workbench.plan.codec import plan_hash, read_plan, write_plan
from workbench.plan.lowered import Lowered
from workbench.plan.memory import MemoryTable
from workbench.plan.plan import Plan
from workbench.plan.price import price
from workbench.plan.provenance import unmeasured_costs, with_provenance
from workbench.report.compare import compare
from workbench.report.folder import read_folder, repetition_paths
from workbench.report.records import candidate_record, executed_record, simulated_record
from workbench.report.tables import (
    comparison_table,
    demo_table,
    fits_table,
    losses_text,
    metrics_table,
    milliseconds,
    plan_table,
    rank_runs,
    search_table,
    step_names,
    titled,
    unmeasured_text,
)
from workbench.search.drive import Objective, Planner, search
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.trace import Trace
from workbench.trace_json import read_trace, write_trace
from workbench.whole_file import check_writable, write_text

app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan multimodal training, simulate the plan, run it, and hold one against the other.",
)

PlanFile = Annotated[Path, typer.Argument(help="plan file", metavar="PLAN")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


class Strategy(StrEnum):
    """Strategies by the names users type."""

    CORNSTARCH = "cornstarch"
    CORNSTARCH_FROZEN_UNAWARE = "cornstarch-frozen-unaware"
    ENCODERS_COLOCATED = "encoders-colocated"
    ENCODERS_COLOCATED_FROZEN_AWARE = "encoders-colocated-frozen-aware"
    ENCODERS_REPLICATED = "encoders-replicated"


PLANNERS: dict[str, Planner] = {
    Strategy.CORNSTARCH: cornstarch.plan,
    Strategy.CORNSTARCH_FROZEN_UNAWARE: cornstarch.plan_frozen_unaware,
    Strategy.ENCODERS_COLOCATED: encoders_colocated.plan,
    Strategy.ENCODERS_COLOCATED_FROZEN_AWARE: encoders_colocated.plan_frozen_aware,
    Strategy.ENCODERS_REPLICATED: encoders_replicated.plan,
}


class Device(StrEnum):
    """What `calibrate` can measure."""

    CPU = "cpu"


@app.command("plan")
def plan_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[Path, typer.Option("-o", "--output", help="plan file to write")],
    strategy: Annotated[Strategy, typer.Option(help="how to parallelise")] = Strategy.CORNSTARCH,
    profile: Annotated[str | None, typer.Option(help="profile name or file instead of the job's")] = None,
    data: Annotated[Path | None, typer.Option(help="data folder whose samples are the batch")] = None,
    as_json: Json = False,
) -> None:
    """Turn a job into a plan."""
    check_writable(output)
    wanted = load_job(job)
    facts = load_profile(profile or wanted.profile)
    if data is not None:
        from runtime.dataset import with_data

        wanted = with_data(wanted, data)
    with ticking(f"planning {strategy}", None, quiet=as_json) as ticker:

        def progress(done: int, total: int, best_s: float) -> None:
            ticker.at(done, total, f"best so far {milliseconds(best_s)}" if best_s < float("inf") else "")

        made = PLANNERS[strategy](wanted, CostModel(facts), progress)
    accept(made)
    write_plan(made, output)
    if as_json:
        emit_json({"plan": str(output), "plan_hash": plan_hash(made), "strategy": made.strategy})
    else:
        show(plan_table(made), f"written to {output}, hash {plan_hash(made)[:12]}")


@app.command("search")
def search_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="plan file of the best")] = None,
    objective: Annotated[Objective, typer.Option(help="what is best")] = Objective.ITERATION,
    profile: Annotated[str | None, typer.Option(help="profile name or file instead of the job's")] = None,
    as_json: Json = False,
) -> None:
    """Plan a job with every strategy, simulate all plans and rank them."""
    wanted = load_job(job)
    facts = load_profile(profile or wanted.profile)
    with ticking("searching", len(PLANNERS), quiet=as_json) as ticker:
        found = search(
            wanted,
            CostModel(facts),
            PLANNERS,
            lambda plan: predict(*accept(plan), facts),
            ticker.at,
            objective,
        )
    if found[0].plan is None:
        raise ValueError(f"no strategy has a plan for job {wanted.name!r}; {found[0].refusal}")
    if output is not None:
        write_plan(found[0].plan, output)
    written = () if output is None else (f"best plan written to {output}",)
    if as_json:
        emit_json({"job": wanted.name, "candidates": [candidate_record(c) for c in found]})
    else:
        show(search_table(wanted.name, found), *written)


@app.command("check")
def check_command(
    plan: PlanFile,
    job: Annotated[Path | None, typer.Option(help="job file whose model and cluster it must be for")] = None,
) -> None:
    """Say whether a plan is sound, fits and cannot deadlock; show its stages and programs."""
    found = read_plan(plan)
    if job is not None:
        check_job(found, load_job(job), plan)
    accept(found)
    programs = titled("programs", ("ranks",))
    programs.add_column("actions", overflow="fold")
    for program in found.programs:
        programs.add_row(rank_runs(program.ranks), " ".join(map(str, program.actions)))
    show(
        plan_table(found), programs, f"accepted: sound, fits, free of deadlock; hash {plan_hash(found)[:12]}"
    )


@app.command("simulate")
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


@app.command("run")
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


@app.command("compare")
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


@app.command("calibrate")
def calibrate_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="profile file to write")],
    jobs: Annotated[
        list[Path] | None,
        typer.Argument(help="whose layers to measure; default: the demo's", metavar="[JOB]..."),
    ] = None,
    device: Annotated[Device, typer.Option(help="what to measure")] = Device.CPU,
    name: Annotated[str | None, typer.Option(help="of the profile; default: the file's")] = None,
    rows: Annotated[Path | None, typer.Option(help="file of measured rows, to continue and to keep")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine and write its profile."""
    from runtime.microbench import BenchSettings, measure
    from runtime.pool import Pool

    for place in (output, rows):
        if place is not None:
            check_writable(place)
    plans = [_any_plan(job) for job in ([load_job(path) for path in jobs] if jobs else _demo_jobs())]
    concurrency = min(len(plans[0].ranks), plans[0].cluster.nodes[0].num_cores or 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    workers = max(2, concurrency, *(len(plan.ranks) for plan in plans))
    with Pool(workers) as pool, ticking(f"measuring {device}", None, quiet=as_json) as ticker:
        settings = BenchSettings(concurrency=concurrency)
        measurement = measure(plans, pool, settings=settings, path=rows, progress=ticker.at)
    profile = fit(name or output.name.removesuffix(".json"), [measurement])
    write_profile(profile, output)
    if as_json:
        emit_json({"profile": profile.name, "rows": len(measurement.rows), "unmeasured": profile.unmeasured})
    else:
        show(fits_table(profile), unmeasured_text(profile.unmeasured), f"written to {output}")


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(help="folder with plans and traces", metavar="FOLDER")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="default: FOLDER/report.html")] = None,
) -> None:
    """Write one self-contained HTML page about a folder of plans and traces."""
    from workbench.report.html import report_html

    path = output or folder / "report.html"
    write_text(report_html(read_folder(folder)), path)
    show(f"written to {path}")


@app.command("reproduce")
def reproduce_command(
    names: Annotated[list[str], typer.Argument(help="all, PAPER or PAPER/SCRIPT", metavar="NAME...")],
    as_json: Json = False,
) -> None:
    """Rerun experiments and hold them against what the papers printed."""
    from experiments.paper import reproduce, scripts

    with ticking("reproducing", len(scripts()), quiet=as_json) as ticker:
        done: list[str] = []

        def tell(table: str) -> None:
            done.append(table)
            ticker.step(table.splitlines()[-1])

        summary = reproduce(() if "all" in names else names, show=tell)
    if as_json:
        emit_json(summary)
    else:
        show(*done)
    if any(row["verdict"] in ("OFF", "MISSING") for row in summary.values()):
        raise typer.Exit(1)


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option("--out", help="folder to write to")] = Path("out"),
    json_file: Annotated[Path | None, typer.Option("--json", help="file to write the figures to")] = None,
) -> None:
    """Do the main job on this machine: calibrate, plan, predict, run, compare, report."""
    from experiments.demo import run_demo
    from workbench.report.html import report_html

    with ticking("demo", None, quiet=False) as ticker:
        result = run_demo(out, ticker.at)
    write_text(report_html(read_folder(out)), out / "report.html")
    record = result.as_json()
    if json_file is not None:
        write_text(json.dumps(record, indent=1) + "\n", json_file)
    show(demo_table(record), f"report: {out / 'report.html'}")


def predict(lowered: Lowered, memory: MemoryTable, profile: Profile) -> Trace:
    """Simulate a plan with the prices of a profile; what was not measured stands in the details.

    On a GPU, attention of token shards is simulated tile by tile.

    Raises:
        ValueError: a plan that the profile cannot price, or that deadlocks.
    """
    from sim.attention_price import attention_of
    from sim.deadlock import DeadlockError
    from sim.engine import simulate

    cost = CostModel(profile)
    prices = price(lowered, cost, attention=attention_of(lowered.plan, cost))
    try:
        trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=memory)
    except DeadlockError as error:
        raise ValueError(str(error)) from error
    return with_provenance(trace, lowered.plan, profile, prices)


def _any_plan(job: Job) -> Plan:
    """A plan of the job, whichever: calibration asks only what it is made of."""
    return cornstarch.plan(job, CostModel(ideal_profile()))


def _demo_jobs() -> list[Job]:
    from experiments.demo_job import MIXES, demo_job, local_cluster

    cluster = local_cluster(Link(name="not measured yet", bytes_per_s=1e9, latency_s=1e-4), 2**40)
    return [demo_job(mix, cluster, {"vision": 1, "audio": 1, "llm": 2}) for mix in MIXES]


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="workbench")
