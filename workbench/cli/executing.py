"""Commands that predict or measure the step time of a plan: simulate, run, compare."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from workbench.cli.console import print_result, warn
from workbench.cli.options import ExecutionFile, Json, PlanFile, PlanProfile, with_flags_of
from workbench.cost.profile import load_profile
from workbench.drift import drift_warning
from workbench.job.device import Device
from workbench.job.machines import under
from workbench.job.matching import check_profile, cost_of_file
from workbench.job.run_options import RunOptions
from workbench.model.checkpoint import check_weights
from workbench.model.expert_load import stated_loads
from workbench.plan.codec import is_hash_of, plan_hash, read_plan
from workbench.plan.lowered import Lowered
from workbench.report.compare import compare, lost_text, lost_time, timed
from workbench.report.devices import check_devices
from workbench.report.expert_loads import compared_loads, loads_record, loads_text
from workbench.report.folder import is_plan, repetition_paths
from workbench.report.packed_rows import rates_line
from workbench.report.progress import Ticker, ticking
from workbench.report.records import executed_record, interval_record, simulated_record
from workbench.report.tables import (
    comparison_table,
    executors_text,
    held_text,
    losses_text,
    metrics_table,
    rests_on_text,
    step_names,
    unmeasured_text,
)
from workbench.termination import Ended
from workbench.timing.accept import accept
from workbench.timing.provenance import expert_loads, noise_of, unmeasured_costs
from workbench.trace import Trace
from workbench.trace_json import read_trace, write_trace
from workbench.units import gib
from workbench.whole_file import check_writable

if TYPE_CHECKING:
    from runtime.data.batches import DataSource
    from runtime.emulation.peak_memory import PeakMemory
    from runtime.run_settings import RunSettings
    from runtime.state.checkpoint import Checkpoints

EMULATED_REPETITIONS = 3


def simulate_command(
    plan: PlanFile,
    trace: Annotated[Path | None, typer.Option(help="trace file to write (Perfetto opens it)")] = None,
    profile: PlanProfile = None,
    execution: ExecutionFile = None,
    as_json: Json = False,
) -> None:
    """Predict the step time and memory of a plan."""
    from sim.predict import predict_within

    if trace is not None:
        check_writable(trace, plan, profile, execution)
    parsed_plan = read_plan(plan)
    lowered, memory = accept(parsed_plan)
    cost = under(cost_of_file(plan, parsed_plan, profile), execution)
    simulated_trace = predict_within(lowered, memory, cost)
    if trace is not None:
        write_trace(simulated_trace, trace)
    print_result(
        simulated_record(parsed_plan, simulated_trace),
        metrics_table(parsed_plan, [("simulated", simulated_trace)]),
        *_optional_line(rates_line(parsed_plan.batch, simulated_trace.iteration_s)),
        *_optional_line(executors_text(simulated_trace)),
        rests_on_text(unmeasured_costs(simulated_trace), noise_of(simulated_trace)),
        as_json=as_json,
    )


@with_flags_of(
    RunOptions, warmup=1, repetitions=lambda flags: EMULATED_REPETITIONS if flags["emulate"] else 1
)
def run_command(
    plan: PlanFile,
    local: Annotated[
        bool, typer.Option("--local", help="run each rank as a process on this machine")
    ] = False,
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate", help="run all ranks in one process, one action at a time, and time each alone"
        ),
    ] = False,
    *,
    options: RunOptions,
    profile: Annotated[
        str | None, typer.Option(help="with --emulate: profile name or file for collectives")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run steps of a plan on this machine."""
    runner = _runner(local, emulate, options.device, profile)
    if options.next_samples and (options.data is None or not local):
        raise ValueError("run: --next-samples reads a data folder; want --local and --data FOLDER")
    if (options.resume or options.checkpoint is not None) and (options.checkpoint is None or not local):
        raise ValueError("run: checkpoints need processes; want --local and --checkpoint FOLDER")
    parsed_plan = read_plan(plan)
    if options.weights is not None:
        check_weights(options.weights, [module.name for module in parsed_plan.model.modules])
    from runtime.launch import prepare

    lowered, _ = accept(parsed_plan)
    if options.trace is not None:
        check_writable(options.trace, plan, profile)
    settings, source = prepare(options, parsed_plan)
    if settings.checkpoints is not None and settings.checkpoints.warning is not None:
        warn(settings.checkpoints.warning)
    result = runner(lowered, settings, source, quiet=as_json)
    files = repetition_paths(options.trace, len(result.traces)) if options.trace else ()
    loads = compared_loads(result.traces, stated_loads(parsed_plan.model))
    for path, step_trace in zip(files, result.traces, strict=False):
        write_trace(step_trace, path)
    output_files = (*files, *((options.export,) if options.export is not None else ()))
    print_result(
        executed_record(parsed_plan, result.traces, files)
        | {"losses": list(result.losses), "expert_loads": loads_record(loads)}
        | result.peak_record,
        metrics_table(parsed_plan, list(zip(result.names, result.traces, strict=True))),
        losses_text(result.losses, options.warmup),
        *loads_text(loads),
        *((unmeasured_text(unmeasured_costs(result.traces[0])),) if emulate else ()),
        *result.peak_texts,
        *(f"written to {path}" for path in output_files),
        as_json=as_json,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run: traces and their names, losses, and peak memory if it was measured."""

    names: list[str]
    traces: tuple[Trace, ...]
    losses: tuple[float, ...]
    peak: "PeakMemory | None" = None

    @property
    def peak_record(self) -> dict[str, Any]:
        if self.peak is None:
            return {}
        return {"peak_memory": asdict(self.peak) | {"error": self.peak.error}}

    @property
    def peak_texts(self) -> tuple[str, ...]:
        if self.peak is None:
            return ()
        predicted, measured = gib(self.peak.predicted_bytes), gib(self.peak.measured_bytes)
        return (
            f"peak memory: predicted {predicted:.4g} GiB, measured {measured:.4g} GiB, "
            f"error {self.peak.error:+.2%}",
        )


class Runner(Protocol):
    """One way to run a plan."""

    def __call__(
        self, lowered: Lowered, settings: "RunSettings", source: "DataSource | None", *, quiet: bool
    ) -> RunResult: ...


def _runner(local: bool, emulate: bool, device: Device | None, profile: str | None) -> Runner:
    """The way to run a plan that the flags select; ValueError for flags that exclude each other."""
    if local and emulate:
        raise ValueError("run: --local and --emulate exclude each other; want one of them")
    if not local and not emulate:
        raise ValueError(
            "run: want --local or --emulate; on a cluster start "
            "torchrun --nproc-per-node RANKS -m runtime.launch PLAN"
        )
    if emulate:
        return partial(_run_emulated, device=device, profile=profile)
    if profile is not None:
        raise ValueError("run: --profile is only for --emulate; want --emulate, or no --profile")
    if device is Device.CUDA:
        raise ValueError(
            "run: --local starts processes on the CPU; want --emulate --device cuda, or torchrun"
        )
    return _run_local


def _run_local(
    lowered: Lowered, settings: "RunSettings", source: "DataSource | None", *, quiet: bool
) -> RunResult:
    from runtime.launch import run_lowered
    from runtime.world.failure import WorldFailed

    report = _InterruptReport(settings.checkpoints)
    try:
        with ticking(f"running on {len(lowered.plan.ranks)} ranks", None, quiet=quiet) as ticker, report:
            result = run_lowered(
                lowered, settings, source=source, progress=report.recording(_update_progress(ticker))
            )
    except WorldFailed as error:
        raise WorldFailed(f"{error}{report.next_try}", error.cause) from error
    names = step_names(steps=settings.steps, warmup=settings.warmup, repetitions=settings.repetitions)
    names = names[-len(result.traces) :]  # a resumed run took the last ones
    return RunResult(names=names, traces=result.traces, losses=result.losses)


def _run_emulated(
    lowered: Lowered,
    settings: "RunSettings",
    source: "DataSource | None",
    *,
    device: Device | None,
    profile: str | None,
    quiet: bool,
) -> RunResult:
    from runtime.emulation.compose import check_collectives, compose
    from runtime.emulation.emulate import emulate
    from runtime.emulation.peak_memory import peak_memory
    from runtime.world.device import device_of, kind_of_device
    from runtime.world.failure import RankError
    from sim.step.engine import simulate

    emulation_device = device_of(device)
    device_profile = load_profile(profile) if profile is not None else None
    if device_profile is not None:
        check_profile(device_profile, kind_of_device(emulation_device))
    check_collectives(lowered, device_profile)
    title = f"emulating {len(lowered.plan.ranks)} ranks on {emulation_device}"
    is_alone = len(lowered.plan.ranks) == 1
    try:
        with ticking(title, None, quiet=quiet) as ticker:
            result = emulate(
                lowered, settings, device=emulation_device, source=source, progress=_update_progress(ticker)
            )
            peak = (
                peak_memory(lowered, settings, device=emulation_device, source=source) if is_alone else None
            )
    except RankError as error:
        raise ValueError(str(error)) from error
    name = f"emulated, median of {result.num_timed} steps"
    traces = (compose(lowered, result, simulate, device_profile),)
    return RunResult(names=[name], traces=traces, losses=result.losses, peak=peak)


class _InterruptReport:
    """Context that reports on stderr how far a run came if a signal ends it, and how it goes on."""

    def __init__(self, checkpoints: "Checkpoints | None") -> None:
        self._checkpoints = checkpoints
        self._progress = "before the end of its first step"

    @property
    def next_try(self) -> str:
        return "" if self._checkpoints is None else f"; {self._checkpoints.next_try}"

    def recording(self, progress: Callable[[int, int, float], None]) -> Callable[[int, int, float], None]:
        """A progress callback that also records the last step for the report."""

        def note(done: int, total: int, loss: float) -> None:
            self._progress = f"after {done} of {total} steps, loss {loss:.6f}"
            progress(done, total, loss)

        return note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Ended | KeyboardInterrupt):
            sys.stderr.write(f"workbench: run ended {self._progress}{self.next_try}\n")


def _update_progress(ticker: Ticker) -> Callable[[int, int, float], None]:
    return lambda done, total, loss: ticker.at(done, total, f"loss {loss:.6f}")


def compare_command(
    simulated: Annotated[
        Path, typer.Argument(help="simulated trace, or a plan to simulate", metavar="SIMULATED")
    ],
    executed: Annotated[list[Path], typer.Argument(help="executed traces", metavar="EXECUTED...")],
    plan: Annotated[Path | None, typer.Option(help="plan file, for the names of stages")] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="with a plan to simulate: profile name or file; default: that of the plan's job"),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="require that all traces are from this device; default: any")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a simulated trace with executed traces of the same plan."""
    traces = [(simulated, _prediction(simulated, profile)), *((path, read_trace(path)) for path in executed)]
    if device is not None:
        check_devices(traces, wanted=device)
    prediction, *runs = (trace for _, trace in traces)
    comparison = compare(prediction, runs)
    plan_file = plan or (simulated if is_plan(simulated) else None)
    named_plan = read_plan(plan_file) if plan_file is not None else None
    if named_plan is not None and not is_hash_of(comparison.plan_hash, named_plan):
        raise ValueError(
            f"{plan_file}: the traces are of plan {comparison.plan_hash:.16}, "
            f"this is {plan_hash(named_plan):.16}"
        )
    lost_times = lost_time(prediction, timed(runs))
    loads = compared_loads(timed(runs), expert_loads(prediction))
    extra = {
        "interval_80": interval_record(prediction),
        "lost": [asdict(lost) for lost in lost_times],
        "expert_loads": loads_record(loads),
    }
    print_result(
        comparison.as_json() | extra,
        *_optional_line(drift_warning(comparison.drift)),
        comparison_table(comparison, named_plan),
        *_optional_line(held_text(prediction, comparison.total.executed_median)),
        lost_text(lost_times),
        *loads_text(loads),
        as_json=as_json,
    )


def _prediction(path: Path, profile: str | None) -> Trace:
    """The simulated trace in a file, or of the plan in it."""
    if not is_plan(path):
        if profile is not None:
            raise ValueError(
                f"compare: --profile is for a plan to simulate, and {path} is a trace; want no --profile"
            )
        return read_trace(path)
    from sim.predict import predict_within

    plan = read_plan(path)
    lowered, memory = accept(plan)
    return predict_within(lowered, memory, cost_of_file(path, plan, profile))


def _optional_line(line: str | None) -> tuple[str, ...]:
    return () if line is None else (line,)
