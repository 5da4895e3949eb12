"""Figures from stored rows of a GPU day, whatever commit measured them, and from the shipped profile before.

Run:     python -m experiments.gpu_day.report [DIR] [--json]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.bench.kernel_bars import least_ratios
from experiments.bench.kernel_rows import KernelRow
from experiments.fidelity.score import Timed
from experiments.gpu_day.campaign import PARTS
from experiments.gpu_day.predictions import JUDGED, PREDICTED, REHEARSAL, read_predictions
from experiments.gpu_day.profile import HEADER, OPERATORS, values_in
from experiments.gpu_day.store import StoredRow, rows_in
from experiments.gpu_day.summary import figures, judged_plans
from experiments.harness.command import run_main
from experiments.harness.record import RESULTS
from workbench.calibrate.measurement import CopyRow, MatmulRow, Row, row_of
from workbench.calibrate.sustained_rows import SustainedMatmulRow
from workbench.cost.model import CostModel
from workbench.cost.profile import Direction, known_profiles, load_profile
from workbench.cost.roofline import Gemm
from workbench.float_sum import float_sum
from workbench.schedule.action import COMPUTE
from workbench.trace_json import loads

STORED = RESULTS / "gpu_day" / "h100"
OURS = "OURS"
SUMS = "add"  # the memory-bound operator whose rate the shipped profile has
PASSES = {"forward": 1.0, "backward": 2.5}  # FLOP of a pass over those of a forward


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One contender's pass on one mask.

    Args:
        ratio: of its time over that of our kernels in the same turns.
    """

    mask: str
    length: int
    who: str
    direction: str
    seconds: float
    spread: float
    flop_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """One kind of pass of one stage, over all microbatches and steps of a plan.

    Args:
        simulated_s: median over microbatches, before the plan ran; None where the row does not say.
    """

    plan: str
    stage: int
    kind: str
    simulated_s: float | None
    fastest_s: float
    median_s: float
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Rows beside what a profile says of them that was there before they were measured."""

    what: str
    count: int
    mean_error: float
    worst_error: float


def report(folder: Path) -> dict[str, Any]:
    """All of it, as JSON has it.

    Raises:
        ValueError: the folder has no rows, or damaged ones.
    """
    rows = {part.name: rows_in(folder, part.name) for part in PARTS}
    every = [row for of_part in rows.values() for row in of_part.values()]
    if not every:
        raise ValueError(f"{folder}: want the folder of a GPU day, it has no rows")
    values = {name: values_in(folder, name) for name in rows}
    return {
        "device": " and ".join(sorted({row.device_name for row in every})),
        "versions": every[0].versions,
        "dates": [min(row.date for row in every)[:10], max(row.date for row in every)[:10]],
        "parts": {name: _counts(of_part.values()) for name, of_part in rows.items()},
        "failures": [f"{row.key}: {row.error}" for row in every if row.error is not None],
        **figures(values, least_ratios(_kernel_rows(values["kernels"]))),
        "kernels": [asdict(one) for one in kernel_times(values["kernels"])],
        "plans": _plans(folder, values["plans"]),
        "passes": [asdict(one) for one in pass_times(values["plans"])],
        "memory": {row["plan"]: row["error"] for row in values["alone"].values() if "error" in row},
        "ceilings": _ceilings(values["environment"]),
        "unseen": [asdict(one) for one in unseen(values[OPERATORS])],
    }


def _counts(rows: Collection[StoredRow]) -> dict[str, float]:
    failed = sum(row.error is not None for row in rows)
    return {"rows": len(rows), "failed": failed, "seconds": round(float_sum(row.seconds for row in rows), 1)}


def _kernel_rows(values: Mapping[str, Mapping[str, Any]]) -> list[KernelRow]:
    return [KernelRow(**row) for measured in values.values() for row in measured["rows"]]


def kernel_times(values: Mapping[str, Mapping[str, Any]]) -> Iterator[KernelTime]:
    """Passes that were timed, in the order of the campaign."""
    for measured in values.values():
        rows = [KernelRow(**row) for row in measured["rows"]]
        ours = {row.direction: row.seconds for row in rows if row.who == OURS}
        for row in rows:
            mine = ours.get(row.direction)
            if row.seconds is not None and row.flop is not None and mine:
                yield KernelTime(
                    mask=row.mask,
                    length=row.length,
                    who=row.who,
                    direction=row.direction,
                    seconds=row.seconds,
                    spread=row.spread or 0.0,
                    flop_per_s=PASSES[row.direction] * row.flop / row.seconds,
                    ratio=row.seconds / mine,
                )


def _plans(folder: Path, values: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Judged plans, with the error of what all ranks' forwards, backwards, ... take together."""
    timed_plans = judged_plans(values)
    if not timed_plans:
        return []
    predicted_of = {one.plan: one for one in read_predictions(folder, values[PREDICTED]["digest"]).plans}
    kinds_s = {row["plan"]: row["kinds_s"] for row in values.values() if row["kind"] == JUDGED}
    return [
        _plan(name, timed, predicted_of[name].kinds_s, kinds_s[name]) for name, timed in timed_plans.items()
    ]


def _plan(
    name: str, timed: Timed, predicted_s: Mapping[str, float], executed_s: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "plan": name,
        "predicted_s": timed.predicted_s,
        "executed_s": timed.median_s,
        "error": timed.error,
        "spread": timed.spread,
        "kinds": {kind: predicted_s[kind] / executed_s[kind] - 1 for kind in COMPUTE if kind in executed_s},
    }


def pass_times(values: Mapping[str, Mapping[str, Any]]) -> Iterator[PassTimes]:
    """Passes of rehearsed plans, stage by stage: the same work, once a microbatch and step."""
    for row in values.values():
        if row.get("kind") != REHEARSAL:
            continue
        simulated_s = _passes_s([row["simulated"]] if "simulated" in row else [])
        for (stage, kind), times_s in sorted(_passes_s(row["steps"]).items()):
            simulated = simulated_s.get((stage, kind))
            yield PassTimes(
                plan=row["plan"],
                stage=stage,
                kind=kind,
                simulated_s=None if simulated is None else statistics.median(simulated),
                fastest_s=min(times_s),
                median_s=statistics.median(times_s),
                slowest_s=max(times_s),
            )


def _passes_s(traces: Sequence[str]) -> dict[tuple[int, str], list[float]]:
    """Seconds of every pass, by stage and kind."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for trace in traces:
        for span in loads(trace).spans:
            if span.action.kind in COMPUTE and span.action.stage is not None:
                key = span.action.stage, str(span.action.kind)
                seconds.setdefault(key, []).append(span.end_s - span.start_s)
    return seconds


def _ceilings(values: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {
        key: row[rate] for key, row in values.items() for rate in ("flop_per_s", "bytes_per_s") if rate in row
    }


def unseen(values: Mapping[str, Mapping[str, Any]]) -> Iterator[Unseen]:
    """What the shipped profile of the device says of products and sums of these operators; none: nothing."""
    device = values.get(HEADER, {}).get("device")
    if device not in known_profiles():
        return
    model = CostModel(load_profile(device))
    errors: dict[str, list[float]] = {}
    for key, measured in values.items():
        for row in measured.get("rows", ()):
            compared = _error(model, row_of(row, key))
            if compared is not None:
                what, error = compared
                errors.setdefault(what, []).append(error)
    for what, each in errors.items():
        sizes = [abs(error) for error in each]
        yield Unseen(what=what, count=len(each), mean_error=statistics.fmean(sizes), worst_error=max(sizes))


def _error(model: CostModel, row: Row) -> tuple[str, float] | None:
    """What a row is of, and the model's seconds over its own, minus 1; None for what is not compared."""
    match row:
        case MatmulRow():
            seconds, _ = model.in_short_loops().matmul_s(Gemm(row.m, row.n, row.k), row.precision)
            return "products in short calls", seconds / row.seconds - 1
        case SustainedMatmulRow():
            gemm = Gemm(row.m, row.n, row.k)
            seconds, _ = model.product_s(gemm, Direction(row.direction), row.precision)
            return "products in long loops", seconds / row.seconds - 1
        case CopyRow(operator=name) if name == SUMS:
            return "sums of two tensors", model.moved_s(row.num_bytes) / row.seconds - 1
    return None


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield f"{record['device']}, {' to '.join(dict.fromkeys(record['dates']))}: {versions}"
    for name, counts in record["parts"].items():
        yield f"{name:12s} {counts['rows']:4d} rows, {counts['failed']} failed, {counts['seconds']:.0f} s"
    yield from (f"FAILED {failure}" for failure in record["failures"])
    for key, rate in record["ceilings"].items():
        unit = "TFLOP/s" if key.startswith("product") else "TB/s"
        yield f"{key:20s} {rate / 1e12:8.3f} {unit}"
    for row in record["kernels"]:
        yield (
            f"{row['mask']:7s} {row['length'] // 1024:3d}k {row['direction']:8s} {row['who']:6s} "
            f"{row['seconds'] * 1e3:8.3f} ms +-{row['spread']:5.1%} {row['flop_per_s'] / 1e12:6.1f} TFLOP/s, "
            f"{row['ratio']:.3f} times ours"
        )
    for row in record["plans"]:
        yield (
            f"{row['plan']:74s} predicted {row['predicted_s'] * 1e3:7.1f} ms, executed "
            f"{row['executed_s'] * 1e3:7.1f} ms, {row['error']:+.1%}, steps spread by {row['spread']:.0%}; "
            + ", ".join(f"{kind} {error:+.1%}" for kind, error in row["kinds"].items())
        )
    for row in record["passes"]:
        prediction = "" if row["simulated_s"] is None else f", simulated {row['simulated_s'] * 1e3:6.2f}"
        yield (
            f"rehearsed {row['plan']:64s} stage {row['stage']:2d} {row['kind']} "
            f"{row['fastest_s'] * 1e3:6.2f} to {row['slowest_s'] * 1e3:6.2f} ms, "
            f"median {row['median_s'] * 1e3:6.2f}{prediction}"
        )
    for plan, error in record["memory"].items():
        yield f"memory {plan:70s} {error:+.2%}"
    for row in record["unseen"]:
        yield (
            f"shipped profile, {row['what']}: {row['count']} rows, {row['mean_error']:.1%} off in the mean, "
            f"worst {row['worst_error']:.1%}"
        )
    for name in figures({}, {}):
        value = record[name]
        yield f"{name:18s} {'not measured' if value is None else format(value, '.4g')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_day.report", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=STORED, help="of a GPU day; the stored one")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)

    def show() -> int:
        record = report(options.folder)
        for line in lines(record):
            sys.stdout.write(f"{line}\n")
        if options.json:
            sys.stdout.write(f"{json.dumps(record)}\n")
        return 0

    return run_main(show)


if __name__ == "__main__":
    sys.exit(main())
