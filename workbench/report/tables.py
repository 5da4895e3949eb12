"""Tables for the terminal: a plan's stages, the comparison, what was not measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from workbench.cost.profile import Profile
from workbench.drift import Drifted
from workbench.metrics import step_metrics
from workbench.model.layer import num_weights
from workbench.plan.plan import Plan, Stage
from workbench.report.compare import ComparedRow, Comparison, Group
from workbench.report.figure import Figure
from workbench.timing.provenance import interval_of, utilisation
from workbench.trace import Trace
from workbench.units import GB, gib, ms

TITLES = {
    Group.KIND: "per action kind",
    Group.STAGE: "per stage",
    Group.MEMORY: "peak memory, per rank",
    Group.TOTAL: "in total",
}


LEFT = ("", "module", "of", "ranks", "strategy")  # headers of left-aligned columns

STAGE_HEADERS = (
    "stage",
    "module",
    "replica",
    "layers",
    "ranks",
    "cp x tp",
    "weights",
    "trainable",
    "microbatches",
)


def plan_table(plan: Plan) -> Table:
    """One line per stage: what it holds, where, and how much of the batch passes through it."""
    table = titled(f"{plan.model.name}, strategy {plan.strategy}", STAGE_HEADERS)
    for stage in plan.stages:
        table.add_row(*stage_cells(plan, stage))
    return table


def stage_cells(plan: Plan, stage: Stage) -> tuple[str, ...]:
    """One stage as printed, in the order of `STAGE_HEADERS`."""
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    trained = num_weights(layer for layer in layers if layer.trainable)
    return (
        str(stage.id),
        stage.module,
        str(stage.replica),
        f"{stage.layers[0]}..{stage.layers[1] - 1}",
        rank_runs(stage.flat_ranks),
        f"{stage.cp} x {stage.tp}" + (f", ep {stage.ep}" if stage.ep > 1 else ""),
        magnitude(num_weights(layers)),
        magnitude(trained),
        str(len(plan.microbatches_of.get((stage.module, stage.replica), ()))),
    )


def comparison_headers(comparison: Comparison) -> tuple[str, ...]:
    """Of a table of rows as `row_cells` gives them, after their labels."""
    return "spans", "simulated", f"{comparison.executor} (median)", "error", "spread of the runs"


def comparison_table(comparison: Comparison, plan: Plan | None = None) -> Table:
    """Simulated beside executed; with a plan, stages are named by module and layers."""
    total = comparison.total
    repetitions = len(total.executed)
    runs = "run" if repetitions == 1 else "runs"
    title = f"plan {comparison.plan_hash[:12]}, {repetitions} {comparison.executor} {runs}"
    table = titled(title, ("", *comparison_headers(comparison)))
    for group in Group:
        rows = comparison.of(group)
        if rows:
            table.add_row(Text(TITLES[group], style="bold"))
        for row in rows:
            table.add_row(f"  {row_label(row, plan)}", *row_cells(row))
    table.caption = drift_text(comparison.drifted)
    table.caption_justify = "left"
    return table


def drift_text(found: Drifted | None) -> str:
    """Drift, and the error with and without it."""
    if found is None or found.drift is None or found.error_corrected is None:
        return "machine drift: not measured"
    speed = "slower" if found.drift > 0 else "faster"
    return (
        f"the machine ran {abs(found.drift):.1%} {speed} than when it was calibrated: "
        f"error {found.error:+.1%}, corrected {found.error_corrected:+.1%}"
    )


def metrics_table(plan: Plan, traces: Sequence[tuple[str, Trace]]) -> Table:
    """The figures of named traces of one plan, a line each."""
    title = f"{plan.model.name}, strategy {plan.strategy}, {len(plan.ranks)} ranks"
    figures_of = ("idle", "MFU", "imbalance", "exposed comm.", "peak memory", "loss")
    has_intervals = any(interval_of(trace) is not None for _, trace in traces)
    table = titled(title, ("", "iteration", *(("80 % within",) if has_intervals else ()), *figures_of))
    for name, trace in traces:
        figures = step_metrics(trace)
        table.add_row(
            name,
            milliseconds(figures.iteration_s),
            *((interval_text(trace),) if has_intervals else ()),
            percent(figures.bubble_fraction, signed=False),
            percent(utilisation(trace), signed=False),
            f"{figures.imbalance:.2f}",
            milliseconds(figures.exposed_communication_s),
            "-" if figures.peak_bytes is None else mebibytes(figures.peak_bytes),
            "-" if trace.loss is None else f"{trace.loss:.6f}",
        )
    return table


def interval_text(trace: Trace) -> str:
    """`12-15 ms`; a dash for what was executed."""
    found = interval_of(trace)
    return "-" if found is None else span_text(found.low_s, found.high_s)


def span_text(low_s: float, high_s: float) -> Figure:
    """`12-15 ms`."""
    text = f"{milliseconds(low_s).removesuffix(' ms')}-{milliseconds(high_s)}"
    return Figure(text, {"low_s": low_s, "high_s": high_s})


def held_text(simulated: Trace, executed_s: float) -> str | None:
    """Whether the predicted interval holds what was executed; None for a trace without one."""
    found = interval_of(simulated)
    if found is None:
        return None
    verdict = "holds" if found.holds(executed_s) else "misses"
    return f"80 % interval {interval_text(simulated)} {verdict} the executed {milliseconds(executed_s)}"


def step_names(*, steps: int, warmup: int, repetitions: int) -> list[str]:
    """What to call the timed steps: optimizer steps count from 1, those of the warm-up included."""
    by_step = [f"step {warmup + index}" for index in range(1, steps + 1)]
    if repetitions == 1:
        return by_step
    return [f"repetition {number}, {name}" for number in range(1, repetitions + 1) for name in by_step]


def losses_text(losses: Sequence[float], warmup: int) -> str:
    """The loss of every optimizer step, in order."""
    told = [
        f"{index}{' (warm-up)' if index <= warmup else ''}: {loss:.6f}"
        for index, loss in enumerate(losses, 1)
    ]
    return f"loss by step  {'   '.join(told)}"


def titled(title: str, headers: Sequence[str]) -> Table:
    """An empty table in the one style of all commands; numbers stand to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in LEFT else "right", no_wrap=True)
    return table


_Row = TypeVar("_Row")


def listed(title: str, rows: Iterable[_Row], *columns: tuple[str, Callable[[_Row], str]]) -> Table:
    """A table with a line for each row; a column is its header and what it shows of a row."""
    table = titled(title, [header for header, _ in columns])
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def demo_table(record: Mapping[str, Any]) -> Table:
    """The demo's `as_json()`: every plan predicted and executed, and the errors over all of them."""
    table = listed(
        f"{len(record['plans'])} plans, {record['machine']}",
        record["plans"],
        ("", lambda row: row["plan"]),
        ("ranks", lambda row: str(row["num_ranks"])),
        ("predicted", lambda row: milliseconds(row["predicted_s"])),
        ("executed", lambda row: milliseconds(row["executed_s"])),
        ("error", lambda row: percent(row["error"], signed=True)),
        ("drift", lambda row: percent(row["drift"], signed=True)),
        ("corrected", lambda row: percent(row["error_corrected"], signed=True)),
        ("spread of the runs", lambda row: percent(row["spread"], signed=False)),
    )
    table.caption = (
        f"median |error| {record['median_abs_error']:.1%}, "
        f"corrected {percent(record['median_abs_error_corrected'], signed=False)}, "
        f"worst {record['worst_abs_error']:.1%}, "
        f"median spread of the runs {record['spread']:.1%}\n"
        f"drift {percent(record['drift'], signed=True)}, median error {record['error']:+.1%}, "
        f"corrected {percent(record['error_corrected'], signed=True)}; calibrated again "
        f"{record['recalibrated']} times"
    )
    table.caption += "".join(f"\nthe same plan here: {', '.join(names)}" for names in _equal_plans(record))
    table.caption_justify = "left"
    return table


def _equal_plans(record: Mapping[str, Any]) -> list[list[str]]:
    """Names of plans of one mix of samples that take the same time to the last bit, on as many ranks."""
    found: dict[tuple[str, int, float], list[str]] = {}
    for row in record["plans"]:
        found.setdefault((row["mix"], row["num_ranks"], row["predicted_s"]), []).append(row["plan"])
    return [names for names in found.values() if len(names) > 1]


def fits_table(profile: Profile) -> Table:
    """How well each table of a profile predicts the points left out of it, one at a time."""
    return listed(
        f"profile {profile.name}, leave-one-out error",
        profile.fits,
        ("", lambda found: found.table),
        ("points", lambda found: str(found.num_points)),
        ("median", lambda found: percent(found.median, signed=False)),
        ("90th percentile", lambda found: percent(found.p90, signed=False)),
    )


def noise_warning(noise: Sequence[str]) -> tuple[str, ...]:
    """What stands first where a profile's measurement is not to be trusted; nothing where it is."""
    return (f"NOISY: {'; '.join(noise)}: calibrate again on a quiet machine",) if noise else ()


def row_label(row: ComparedRow, plan: Plan | None) -> str:
    """What the row is about, in the plan's words where there is one."""
    if row.group is Group.MEMORY:
        return f"rank {row.name}"
    if row.group is Group.STAGE:
        stage = plan.stage.get(int(row.name)) if plan is not None else None
        return f"stage {row.name}" if stage is None else stage_label(stage)
    return row.name


def row_cells(row: ComparedRow) -> tuple[str, str, str, str, str]:
    """Count, simulated, executed, error, spread, as printed."""
    unit = mebibytes if row.group is Group.MEMORY else milliseconds
    return (
        str(row.count),
        unit(row.simulated),
        unit(row.executed_median),
        percent(row.error_fraction, signed=True),
        percent(row.spread_fraction, signed=False),
    )


def stage_label(stage: Stage) -> str:
    replica = f", replica {stage.replica}" if stage.replica else ""
    return f"stage {stage.id}: {stage.module} {stage.layers[0]}..{stage.layers[1] - 1}{replica}"


def unmeasured_text(names: Sequence[str]) -> str:
    """A list of what the prediction rests on without a measurement."""
    if not names:
        return "Every cost of this prediction was measured."
    return "\n".join(("Not measured, but scaled or sourced:", *(f"  - {name}" for name in names)))


def rests_on_text(unmeasured: Sequence[str], noise: Sequence[str]) -> str:
    """What the prediction rests on: without a measurement, or on one that is not to be trusted."""
    if not noise:
        return unmeasured_text(unmeasured)
    found = ["Measured, but unreliable:", *(f"  - {line}" for line in noise)]
    return "\n".join(found + ([unmeasured_text(unmeasured)] if unmeasured else []))


def milliseconds(duration_s: float) -> Figure:
    """At least three significant digits."""
    value = ms(duration_s)
    return Figure(f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms", {"s": duration_s})


def mebibytes(num_bytes: float) -> Figure:
    whole = gib(num_bytes)
    return Figure(f"{whole:.3g} GiB" if whole >= 1 else f"{whole * 1024:.3g} MiB", {"bytes": num_bytes})


def percent(fraction: float | None, *, signed: bool) -> Figure:
    """'-' where there is nothing to divide by."""
    if fraction is None:
        return Figure("-", {"": None})
    return Figure(f"{fraction:+.1%}" if signed else f"{fraction:.1%}", {"": fraction})


def magnitude(count: int) -> Figure:
    """A parameter count in M or B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return Figure(f"{count / size:.3g} {unit}", {"": count})
    return Figure(str(count), {"": count})


def rank_runs(ranks: Sequence[int]) -> str:
    """Ascending runs of ranks: (0, 1, 2, 5) as '0-2, 5'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


_TERA = 1e12


def facts_table(profile: Profile) -> Table:
    """Peaks, memory, links and tables of a device, each with whether it was measured."""
    table = titled(f"profile {profile.name}", ("fact", "value"))
    table.add_row("device", profile.device + (f", after {profile.like}" if profile.like else ""))
    table.add_row("memory", f"{profile.memory_bytes / GB:.4g} GB")
    if profile.peak_bytes_per_s is not None:
        table.add_row("memory bandwidth", f"{profile.peak_bytes_per_s / GB:.4g} GB/s")
    for precision, rate in profile.peak_flop_per_s:
        table.add_row(f"peak {precision}", f"{rate / _TERA:.4g} TFLOP/s")
    for link in profile.links:
        known = "measured" if link.measured else "not measured"
        table.add_row(f"{link.scope} link", f"{link.name}, {link.bytes_per_s / GB:.4g} GB/s, {known}")
    if profile.node_ranks is not None:
        table.add_row("devices joined", str(profile.node_ranks))
    tables = (("matmul", profile.matmul), ("attention", profile.attention), ("pointwise", profile.pointwise))
    for name, found in tables:
        known = "measured" if found.measured else "scaled"
        table.add_row(name, f"{len(found.points)} points, {known}" if found.points else "peak assumed")
    return table


def profile_record(profile: Profile) -> dict[str, Any]:
    """The same as data, SI units."""
    return {
        "profile": profile.name,
        "device": profile.device,
        "like": profile.like,
        "memory_bytes": profile.memory_bytes,
        "memory_bytes_per_s": profile.peak_bytes_per_s,
        "peak_flop_per_s": dict(profile.peak_flop_per_s),
        "links": {link.scope: link.bytes_per_s for link in profile.links},
        "node_ranks": profile.node_ranks,
        "presumed": list(profile.presumed),
        "unmeasured": list(profile.unmeasured),
        "fits": [asdict(fit) for fit in profile.fits],
    }
