"""Tables for the terminal: a plan's stages, the comparison, unmeasured costs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from workbench.cost.profile import Profile
from workbench.drift import Drifted
from workbench.metrics import step_metrics
from workbench.model.trained import num_trained, num_weights
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.report.compare import ComparedRow, Comparison, Group
from workbench.report.figure import Figure
from workbench.report.table_rows import KeyedTable
from workbench.timing.provenance import interval_of, intervals_by_executor, utilisation
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
    """One line per stage: its layers, its ranks, and its share of the batch."""
    table = titled(f"{plan.model.name}, {plan.made_by}", STAGE_HEADERS, key="stages")
    for stage in plan.stages:
        table.add_row(*stage_cells(plan, stage))
    return table


def stage_cells(plan: Plan, stage: Stage) -> tuple[str, ...]:
    """Cells of one stage, in the order of `STAGE_HEADERS`."""
    layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
    trained = num_trained(layers)
    return (
        str(stage.id),
        stage.module,
        str(stage.replica),
        f"{stage.layers[0]}..{stage.layers[1] - 1}",
        rank_runs(stage.flat_ranks),
        f"{stage.cp} x {stage.tp}{stage.joint_words}",
        magnitude(num_weights(layers)),
        magnitude(trained),
        str(len(plan.microbatches_of.get((stage.module, stage.replica), ()))),
    )


def comparison_headers(comparison: Comparison) -> tuple[str, ...]:
    """Headers for the cells of `row_cells`, after the label's."""
    return "spans", "simulated", f"{comparison.executor} (median)", "error", "spread of the runs"


def comparison_table(comparison: Comparison, plan: Plan | None = None) -> Table:
    """Simulated beside executed; with a plan, stages are named by module and layers."""
    total = comparison.total
    repetitions = len(total.executed)
    runs = "run" if repetitions == 1 else "runs"
    title = f"plan {comparison.plan_hash[:12]}, {repetitions} {comparison.executor} {runs}"
    table = titled(title, ("", *comparison_headers(comparison)), key="comparison")
    for group in Group:
        rows = comparison.of(group)
        if rows:
            table.add_row(Text(TITLES[group], style="bold"))
        for row in rows:
            table.add_row(f"  {row_label(row, plan)}", *row_cells(row))
    table.caption = drift_text(comparison.drifted)
    table.caption_justify = "left"
    return table


def drift_text(drifted: Drifted | None) -> str:
    """Drift of the machine, and the error with and without it."""
    if drifted is None or drifted.drift is None or drifted.error_corrected is None:
        return "machine drift: not measured"
    speed = "slower" if drifted.drift > 0 else "faster"
    return (
        f"the machine ran {abs(drifted.drift):.1%} {speed} than when it was calibrated: "
        f"error {drifted.error:+.1%}, corrected {drifted.error_corrected:+.1%}"
    )


def metrics_table(plan: Plan, traces: Sequence[tuple[str, Trace]]) -> Table:
    """Metrics of named traces of one plan, one line each."""
    title = f"{plan.model.name}, {plan.made_by}, {len(plan.ranks)} ranks"
    figures_of = ("idle", "MFU", "imbalance", "exposed comm.", "peak memory", "loss")
    has_intervals = any(interval_of(trace) is not None for _, trace in traces)
    table = titled(
        title, ("", "iteration", *(("80 % within",) if has_intervals else ()), *figures_of), key="metrics"
    )
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
    """`12-15 ms`; a dash for an executed trace."""
    interval = interval_of(trace)
    return "-" if interval is None else span_text(interval.low_s, interval.high_s)


def executors_text(trace: Trace) -> str | None:
    """Intervals by who executes the plan, a line each; None where this machine's overheads were measured."""
    found = intervals_by_executor(trace)
    if not found:
        return None
    longest = max(len(one.executor) for one in found)
    lines = (
        f"  {one.executor:<{longest}}   {span_text(one.interval.low_s, one.interval.high_s)}" for one in found
    )
    return "\n".join(("80 % within, by who executes the plan:", *lines, ""))


def span_text(low_s: float, high_s: float) -> Figure:
    """`12-15 ms`."""
    text = f"{milliseconds(low_s).removesuffix(' ms')}-{milliseconds(high_s)}"
    return Figure(text, {"low_s": low_s, "high_s": high_s})


def held_text(simulated: Trace, executed_s: float) -> str | None:
    """Whether the predicted interval contains the executed time; None for a trace without one."""
    interval = interval_of(simulated)
    if interval is None:
        return None
    verdict = "holds" if interval.holds(executed_s) else "misses"
    return f"80 % interval {interval_text(simulated)} {verdict} the executed {milliseconds(executed_s)}"


def step_names(*, steps: int, warmup: int, repetitions: int) -> list[str]:
    """Names of the timed steps: optimizer steps count from 1, including the warm-up."""
    by_step = [f"step {warmup + index}" for index in range(1, steps + 1)]
    if repetitions == 1:
        return by_step
    return [f"repetition {number}, {name}" for number in range(1, repetitions + 1) for name in by_step]


def losses_text(losses: Sequence[float], warmup: int) -> str:
    """The loss of every optimizer step, in order."""
    texts = [
        f"{index}{' (warm-up)' if index <= warmup else ''}: {loss:.6f}"
        for index, loss in enumerate(losses, 1)
    ]
    return f"loss by step  {'   '.join(texts)}"


def titled(title: str, headers: Sequence[str], *, key: str | None = None) -> Table:
    """An empty table in the common style; numbers are right-aligned. `key`: for programs, as `KeyedTable`."""
    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = KeyedTable(title, key=key, pad_edge=False, **style)
    for header in headers:
        table.add_column(header, justify="left" if header in LEFT else "right", no_wrap=True)
    return table


_Row = TypeVar("_Row")


def listed(
    title: str,
    rows: Iterable[_Row],
    *columns: tuple[str, Callable[[_Row], str]],
    key: str | None = None,
) -> Table:
    """A table with one line per row; a column is its header and a function of the row; `key` as `titled`."""
    table = titled(title, [header for header, _ in columns], key=key)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def demo_table(record: Mapping[str, Any]) -> Table:
    """The demo's `as_json()`: every plan predicted and executed, and the errors over all of them.

    If the machine was calibrated again, the column `predicted again` says what later runs are compared with.
    """
    again = [row for row in record["plans"] if row["predicted_again_s"] is not None]
    later = [("predicted again", lambda row: _if_predicted(row["predicted_again_s"]))] if again else []
    table = listed(
        f"{len(record['plans'])} plans, {record['machine']}",
        record["plans"],
        ("", lambda row: row["plan"]),
        ("ranks", lambda row: str(row["num_ranks"])),
        ("predicted", lambda row: milliseconds(row["predicted_s"])),
        *later,
        ("executed", lambda row: milliseconds(row["executed_s"])),
        ("error", lambda row: percent(row["error"], signed=True)),
        ("drift", lambda row: percent(row["drift"], signed=True)),
        ("corrected", lambda row: percent(row["error_corrected"], signed=True)),
        ("spread of the runs", lambda row: percent(row["spread"], signed=False)),
        key="plans",
    )
    table.caption = (
        f"median |error| {record['median_abs_error']:.1%}, "
        f"corrected {percent(record['median_abs_error_corrected'], signed=False)}, "
        f"worst {record['worst_abs_error']:.1%}, "
        f"median spread of the runs {record['spread']:.1%}\n"
        f"drift {percent(record['drift'], signed=True)}, median error {record['error']:+.1%}, "
        f"corrected {percent(record['error_corrected'], signed=True)}; calibrated again "
        f"{record['recalibrated']} times"
        + (": each run's error is against the prediction of its own calibration" if again else "")
    )
    table.caption += "".join(f"\nthe same plan here: {', '.join(names)}" for names in _equal_plans(record))
    table.caption_justify = "left"
    return table


def _if_predicted(duration_s: float | None) -> Figure:
    return Figure("-", {"s": None}) if duration_s is None else milliseconds(duration_s)


def _equal_plans(record: Mapping[str, Any]) -> list[list[str]]:
    """Names of plans of one mix of samples with exactly equal time, on equally many ranks."""
    names_by_key: dict[tuple[str, int, float], list[str]] = {}
    for row in record["plans"]:
        names_by_key.setdefault((row["mix"], row["num_ranks"], row["predicted_s"]), []).append(row["plan"])
    return [names for names in names_by_key.values() if len(names) > 1]


def fits_table(profile: Profile) -> Table:
    """Leave-one-out errors of a profile's tables."""
    return listed(
        f"profile {profile.name}, leave-one-out error",
        profile.fits,
        ("", lambda fit: fit.table),
        ("points", lambda fit: str(fit.num_points)),
        ("median", lambda fit: percent(fit.median, signed=False)),
        ("90th percentile", lambda fit: percent(fit.p90, signed=False)),
        key="leave-one-out error",
    )


def noise_warning(noise: Sequence[str]) -> tuple[str, ...]:
    """The first line if a profile's measurement is unreliable; else nothing."""
    return (f"NOISY: {'; '.join(noise)}: calibrate again on a quiet machine",) if noise else ()


def row_label(row: ComparedRow, plan: Plan | None) -> str:
    """Label of a row, in terms of the plan if there is one."""
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
    """List of the prediction's unmeasured costs."""
    if not names:
        return "Every cost of this prediction was measured."
    return "\n".join(("Not measured, but scaled or sourced:", *(f"  - {name}" for name in names)))


def rests_on_text(unmeasured: Sequence[str], noise: Sequence[str]) -> str:
    """Reasons to doubt the prediction: noisy measurements and unmeasured costs."""
    if not noise:
        return unmeasured_text(unmeasured)
    lines = ["Measured, but unreliable:", *(f"  - {line}" for line in noise)]
    return "\n".join(lines + ([unmeasured_text(unmeasured)] if unmeasured else []))


def milliseconds(duration_s: float) -> Figure:
    """At least three significant digits."""
    value = ms(duration_s)
    return Figure(f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms", {"s": duration_s})


def mebibytes(num_bytes: float) -> Figure:
    whole = gib(num_bytes)
    return Figure(f"{whole:.3g} GiB" if whole >= 1 else f"{whole * 1024:.3g} MiB", {"bytes": num_bytes})


def percent(fraction: float | None, *, signed: bool) -> Figure:
    """A percentage; '-' for None."""
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
    table = titled(f"profile {profile.name}", ("fact", "value"), key="profile")
    table.add_row("device", profile.device + (f", after {profile.like}" if profile.like else ""))
    table.add_row("memory", f"{gib(profile.memory_bytes):.4g} GiB")
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
    for name, facts in tables:
        known = "measured" if facts.measured else "scaled"
        table.add_row(name, f"{len(facts.points)} points, {known}" if facts.points else "peak assumed")
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
