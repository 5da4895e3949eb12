"""Commands that measure this machine and run experiments: calibrate, report, reproduce, demo."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import Mixing, read_measurement
from workbench.cli.console import print_result, show
from workbench.cli.job_reading import read_job
from workbench.cli.options import Json
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import MachineLink, ideal_profile, write_profile
from workbench.drift import drift_warning
from workbench.job.device import Device
from workbench.job.job import Job
from workbench.job.job_file import read_spec
from workbench.job.matching import profile_name_anywhere, profile_names_beside
from workbench.plan.plan import Plan
from workbench.report.folder import fastest_of, read_folder
from workbench.report.progress import ticking
from workbench.report.tables import (
    demo_table,
    fits_table,
    noise_warning,
    unmeasured_text,
)
from workbench.report.what_if import WhatIf, what_if
from workbench.strategies import cornstarch
from workbench.timing.accept import accept
from workbench.whole_file import check_writable, write_text

DEMO_WHAT_IF_S = 10.0


def calibrate_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="profile file to write")],
    jobs: Annotated[
        list[Path] | None,
        typer.Argument(help="jobs whose layers to measure; default: the demo's", metavar="[JOB]..."),
    ] = None,
    device: Annotated[Device, typer.Option(help="device to measure")] = Device.CPU,
    name: Annotated[
        str | None, typer.Option(help="name of the profile; default: the name of the file")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="file of measured rows; an existing one is continued")
    ] = None,
    extra_rows: Annotated[
        list[Path] | None,
        typer.Option(
            "--with", help="further rows of this machine, such as those of runtime.measure.microbench"
        ),
    ] = None,
    mix_versions: Annotated[
        bool, typer.Option("--mix-versions", help="allow rows measured with different software versions")
    ] = False,
    visits: Annotated[int, typer.Option(help="number of separate measurements per layer", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Measure this machine and write its profile."""
    from runtime.measure.plans import BenchSettings, measure
    from runtime.world.device import device_of
    from runtime.world.pool import Pool

    bench_device = device_of(device)
    check_writable(output, rows, *jobs or (), *extra_rows or ())
    if rows is not None:
        check_writable(rows, *jobs or (), *extra_rows or ())
    other_measurements = [read_measurement(path) for path in extra_rows or ()]
    plans = [calibration_plan(job) for job in ([read_job(path) for path in jobs] if jobs else _demo_jobs())]
    concurrency = min(len(plans[0].ranks), plans[0].cluster.nodes[0].num_cores or 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    workers = max(2, concurrency, *(len(plan.ranks) for plan in plans))
    processes = Pool(workers) if device is Device.CPU else nullcontext()  # a GPU is measured in this process
    with processes as pool, ticking(f"measuring {bench_device}", None, quiet=as_json) as ticker:
        settings = BenchSettings(concurrency=concurrency, visits=visits, device=bench_device)
        measurement = measure(plans, pool, settings=settings, path=rows, progress=ticker.at)
    mixing = Mixing.ALLOWED if mix_versions else Mixing.REFUSED
    profile = fit(name or output.name.removesuffix(".json"), [measurement, *other_measurements], mixing)
    write_profile(profile, output)
    record = {
        "profile": profile.name,
        "rows": len(measurement.rows),
        "unmeasured": profile.unmeasured,
        "noise": profile.noise,
        "fits": [asdict(layer_fit) for layer_fit in profile.fits],
    }
    warning, unmeasured = noise_warning(profile.noise), unmeasured_text(profile.unmeasured)
    print_result(record, *warning, fits_table(profile), unmeasured, f"written to {output}", as_json=as_json)


def report_command(
    folder: Annotated[Path, typer.Argument(help="folder with plans and traces", metavar="FOLDER")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write; default: FOLDER/report.html")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="job file of the plans; adds what-if sliders for variants of the job")
    ] = None,
    what_if_s: Annotated[
        float, typer.Option("--what-if", help="seconds for simulating the variants", min=0)
    ] = 20.0,
    profile: Annotated[
        str | None,
        typer.Option(help="with --job: profile name or file; default: that of the fastest plan"),
    ] = None,
) -> None:
    """Write a self-contained HTML page about a folder of plans and traces."""
    from workbench.report.html import report_html

    path = output or folder / "report.html"
    if path.suffix == ".json":
        raise ValueError(f"{path}: plans and traces have this ending; want a page, such as report.html")
    if profile is not None and job is None:
        raise ValueError(f"report: --profile {profile} is for the variants of a job; want --job FILE, too")
    check_writable(path, job)
    contents = read_folder(folder)
    variants = None
    if job is not None:
        fastest = fastest_of(contents, read_job(job))
        named = (
            _only(profile_names_beside(fastest.path)) if profile is None else profile_name_anywhere(profile)
        )
        variants = _what_if(job, fastest.plan.strategy, named, what_if_s)
    write_text(report_html(contents, what_if=variants), path)
    show(f"written to {path}")


def _only(names: Sequence[str]) -> str | None:
    """The profile of a plan; None where it has none, or pools with several, which the job names too."""
    return names[0] if len(names) == 1 else None


def _what_if(job: Path, strategy: str, profile: str | None, seconds: float) -> WhatIf:
    """Simulate variants of a job, planned by one strategy; a given profile replaces that of the job."""
    from sim.predict import predict_within

    began_s, spec = perf_counter(), read_spec(job)
    if profile is not None:
        spec = spec.model_copy(update={"profile": profile})
    with ticking("simulating neighbours of the job", None, quiet=False) as ticker:
        return what_if(
            spec,
            strategy,
            lambda plan, cost: predict_within(*accept(plan), cost),
            folder=job.parent,
            seconds=seconds,
            spent_s=lambda: perf_counter() - began_s,
            progress=lambda done, total: ticker.at(done, total, ""),
        )


def reproduce_command(
    names: Annotated[list[str], typer.Argument(help="all, PAPER or PAPER/SCRIPT", metavar="NAME...")],
    out: Annotated[Path, typer.Option("--out", help="folder for result files and plots")] = Path("results"),
    use_stored: Annotated[
        bool, typer.Option("--stored", help="run nothing; count the results stored in the checkout")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(help="with --stored: also what changed since this commit", metavar="COMMIT"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rerun experiments and compare them with the numbers in the papers."""
    from experiments.harness.record import results_in, stored_records
    from experiments.harness.script import reproduce, scripts, stored
    from experiments.harness.tally import changes, changes_text, counts_text, records_at

    selected = () if "all" in names else names
    if since is not None and not use_stored:
        raise ValueError("--since compares stored results; want --stored with it")
    if use_stored:
        summary = stored(selected)
        texts = [counts_text(paper, counts) for paper, counts in summary["papers"].items()]
        texts.append(counts_text("all", summary["all"]))
        if since is not None:
            summary["changes"] = changes(records_at(since), stored_records())
            texts += [changes_text(paper, differences) for paper, differences in summary["changes"].items()]
    else:
        check_writable(out / "results.json")
        with ticking("reproducing", len(scripts()), quiet=as_json) as ticker, results_in(out):
            texts = []

            def show_table(table: str) -> None:
                texts.append(table)
                ticker.step(table.splitlines()[-1])

            summary = reproduce(selected, show=show_table)
        texts += [counts_text("all", summary["all"]), f"result files and plots are in {out}"]
    print_result(summary, *texts, as_json=as_json)
    if summary["all"]["failing"]:
        raise typer.Exit(1)


def demo_command(
    out: Annotated[Path, typer.Option("--out", help="folder to write to")] = Path("out"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file to write the results to")
    ] = None,
    burn: Annotated[
        float | None, typer.Option(help="load on one core while plans are timed, as a share")
    ] = None,
) -> None:
    """Run the whole workflow on this machine: calibrate, plan, predict, run, compare, report."""
    from experiments.demo import JOB_FILE, run_demo
    from experiments.fidelity.burner import burner_of
    from workbench.report.html import report_html

    for path in (out / "report.html", *(() if json_file is None else (json_file,))):
        check_writable(path)
    load = nullcontext if burn is None else burner_of(burn)
    with ticking("demo", None, quiet=False) as ticker:
        result = run_demo(out, ticker.at, load)
    variants = _what_if(out / JOB_FILE, result.fastest, None, DEMO_WHAT_IF_S)
    write_text(report_html(read_folder(out), what_if=variants), out / "report.html")
    record = result.as_json()
    if json_file is not None:
        write_text(json.dumps(record, indent=1) + "\n", json_file)
    warning = drift_warning(result.drift)
    show(*([] if warning is None else [warning]), *noise_warning(result.noise))
    show(demo_table(record), f"report: {out / 'report.html'}")


def calibration_plan(job: Job) -> Plan:
    """Any plan of the job: calibration depends only on its layers."""
    links = tuple(
        MachineLink(scope=scope, measured=False, source="the job", **asdict(link))
        for scope, link in (("intra", job.cluster.intra), ("inter", job.cluster.inter))
    )
    return cornstarch.plan(job, CostModel(replace(ideal_profile(), links=links)))


def _demo_jobs() -> list[Job]:
    from experiments.demo_job import MIXES, demo_job, local_cluster

    cluster = local_cluster(Link(name="not measured yet", bytes_per_s=1e9, latency_s=1e-4), 2**40)
    return [demo_job(mix, cluster, {"vision": 1, "audio": 1, "llm": 2}) for mix in MIXES]
