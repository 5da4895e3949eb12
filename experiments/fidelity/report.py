"""The suite's result: one row per plan, figures per part and in total, as JSON and as text."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.fidelity.cases import LeftOut, Part
from experiments.fidelity.causes import causes, exposed_s
from experiments.fidelity.memory import RankMemory as MemoryRow
from experiments.fidelity.memory import summarise as summarise_memory
from experiments.fidelity.plan_runs import Predicted
from experiments.fidelity.score import Ranking, Timed, accuracy, job_regrets, ranking
from workbench.drift import Run, drift_warning
from workbench.memory.account import peak_bytes as planned_peak_bytes
from workbench.metrics import peak_bytes
from workbench.report.compare import Group, compare
from workbench.trace import Trace

PINNED = (Part.CLEAN, Part.CONTEXT)  # a core for every rank: what the goals speak of, DIVIDED has its own
GOAL_MEAN, GOAL_WORST, GOAL_TAU, GOAL_REGRET, GOAL_MEMORY = 0.03, 0.08, 0.95, 0.02, 0.01
GOAL_DIVIDED = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Seconds of one kind of action or of one stage, summed over ranks."""

    name: str
    predicted_s: float
    executed_s: float
    spread: float | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.executed_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Results of one plan of the suite.

    Args:
        causes: parts of the error, see `experiments.fidelity.causes`.
        exposed_s: predicted and executed communication that no computation hides, mean over ranks.
        memory: of every rank, where it was observed.
        unmeasured: inputs of the prediction that were not measured.
    """

    name: str
    part: Part
    num_ranks: int
    plan_hash: str
    timed: Timed
    kinds: tuple[Sum, ...]
    stages: tuple[Sum, ...]
    causes: dict[str, float]
    exposed_s: tuple[float, float]
    memory: tuple[MemoryRow, ...]
    unmeasured: tuple[str, ...]


def plan_row(
    prediction: Predicted, traces: Sequence[Trace], runs: tuple[Run, ...], watched: Trace | None
) -> PlanRow:
    """Compare a prediction with the executed steps of its plan.

    The iteration's error uses the predictions valid in each run; its causes use the first one.
    """
    comparison = compare(prediction.simulated, traces)
    return PlanRow(
        name=prediction.case.name,
        part=prediction.case.part,
        num_ranks=len(prediction.case.plan.ranks),
        plan_hash=prediction.plan_hash,
        timed=Timed(
            job=f"{prediction.case.part}/{prediction.case.job}",
            predicted_s=prediction.simulated.iteration_s,
            executed_s=tuple(trace.iteration_s for trace in traces),
            runs=runs,
        ),
        kinds=_sums(comparison.of(Group.KIND)),
        stages=_sums(comparison.of(Group.STAGE)),
        causes=causes(prediction.lowered, prediction.prices, traces),
        exposed_s=(exposed_s(prediction.simulated), statistics.median(exposed_s(trace) for trace in traces)),
        memory=() if watched is None else _memory(prediction, watched),
        unmeasured=prediction.prices.unmeasured,
    )


def _sums(rows: Iterable[Any]) -> tuple[Sum, ...]:
    return tuple(
        Sum(
            name=row.name,
            predicted_s=row.simulated,
            executed_s=row.executed_median,
            spread=row.spread_fraction,
        )
        for row in rows
        if row.executed_median
    )


def _memory(prediction: Predicted, watched: Trace) -> tuple[MemoryRow, ...]:
    predicted, measured = planned_peak_bytes(prediction.lowered, prediction.memory), peak_bytes(watched)
    return tuple(
        MemoryRow(
            plan=prediction.case.name,
            rank=rank,
            predicted_bytes=predicted[rank],
            measured_bytes=measured[rank],
        )
        for rank in prediction.case.plan.ranks
    )


def summary(rows: Sequence[PlanRow], left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """The figures that the goals refer to, followed by their inputs.

    Headline figures are over the plans with a core per rank that do not divide weights; memory is over all
    plans.
    """
    pinned = [row for row in rows if row.part in PINNED]
    chosen = pinned or list(rows)
    head = _figures(chosen)
    memory = [memory_row for row in rows for memory_row in row.memory]
    return {
        "mean_abs_error": head["mean_abs_error"],
        "worst_abs_error": head["worst_abs_error"],
        "spread": head["spread"],
        "kendall_tau": head["kendall_tau"],
        "regret": head["regret"],
        "memory_mean_abs_error": summarise_memory(memory).mean_abs_error if memory else None,
        "num_plans": len(rows),
        "drift": _mean_of([row.timed.drifted.drift for row in rows]),
        "mean_abs_error_corrected": head["mean_abs_error_corrected"],
        "headline_parts": [str(part) for part in PINNED] if pinned else ["all"],
        "pinned": head,
        "parts": {
            str(part): _figures([row for row in rows if row.part is part])
            for part in Part
            if any(row.part is part for row in rows)
        },
        "memory": asdict(summarise_memory(memory)) if memory else None,
        "left_out": [asdict(left_out_plan) for left_out_plan in left_out],
        "goals": _goals(head, memory) | _divided_goal(rows),
        "plans": [_as_json(row) for row in rows],
    }


def _mean_of(values: Sequence[float | None]) -> float | None:
    """The mean, or None where a value is missing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if values and len(known) == len(values) else None


def _corrected(rows: Sequence[PlanRow]) -> float | None:
    """Mean absolute error of the predictions corrected for the machine's drift."""
    errors = [row.timed.drifted.error_corrected for row in rows]
    return _mean_of([None if error is None else abs(error) for error in errors])


def _goals(head: dict[str, Any], memory: Sequence[MemoryRow]) -> dict[str, bool | None]:
    tau, regret = head["kendall_tau"], head["regret"]
    return {
        f"mean absolute error <= {GOAL_MEAN:.0%}": head["mean_abs_error"] <= GOAL_MEAN,
        f"worst error <= {GOAL_WORST:.0%} or the plan's spread": head["num_beyond"] == 0,
        f"Kendall tau >= {GOAL_TAU}": None if tau is None else tau >= GOAL_TAU,
        f"regret <= {GOAL_REGRET:.0%}": None if regret is None else regret <= GOAL_REGRET,
        f"mean memory error <= {GOAL_MEMORY:.0%}": (
            summarise_memory(memory).mean_abs_error <= GOAL_MEMORY if memory else None
        ),
    }


def _divided_goal(rows: Sequence[PlanRow]) -> dict[str, bool | None]:
    """Goal of plans with a core per rank that divide weights, so ranks communicate within layers."""
    timed = [row.timed for row in rows if row.part is Part.DIVIDED]
    error = accuracy(timed, limit=GOAL_WORST).mean_abs_error if timed else None
    name = f"mean absolute error <= {GOAL_DIVIDED:.0%} where ranks divide weights"
    return {name: None if error is None else error <= GOAL_DIVIDED}


def _figures(rows: Sequence[PlanRow]) -> dict[str, Any]:
    timed = [row.timed for row in rows]
    ranked: Ranking = ranking(timed)
    return {
        **asdict(accuracy(timed, limit=GOAL_WORST)),
        "drift": _mean_of([row.timed.drifted.drift for row in rows]),
        "mean_abs_error_corrected": _corrected(rows),
        **asdict(ranked),
        "job_regrets": job_regrets(timed),
        "kinds": _by_name([row.kinds for row in rows]),
        "stage_mean_abs_error": _mean_abs([stage.error for row in rows for stage in row.stages]),
        "exposed_error_of_iteration": statistics.fmean(
            (row.exposed_s[0] - row.exposed_s[1]) / row.timed.median_s for row in rows
        ),
        "causes": _causes(rows),
    }


def _by_name(sums: Sequence[Sequence[Sum]]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(kind.name for of_plan in sums for kind in of_plan)
    figures = {}
    for name in names:
        of_name = [kind for of_plan in sums for kind in of_plan if kind.name == name]
        errors = [kind.error for kind in of_name]
        figures[name] = {
            "mean_abs_error": statistics.fmean(map(abs, errors)),
            "mean_error": statistics.fmean(errors),
            "num_plans": len(of_name),
        }
    return figures


def _causes(rows: Sequence[PlanRow]) -> dict[str, dict[str, float]]:
    """Return cause -> signed mean and mean absolute share; plans without the cause count as 0."""
    names = dict.fromkeys(name for row in rows for name in row.causes)
    return {
        name: {
            "mean": statistics.fmean(row.causes.get(name, 0.0) for row in rows),
            "mean_abs": statistics.fmean(abs(row.causes.get(name, 0.0)) for row in rows),
        }
        for name in names
    }


def _mean_abs(errors: Sequence[float]) -> float:
    return statistics.fmean(map(abs, errors))


def _as_json(row: PlanRow) -> dict[str, Any]:
    timed = row.timed
    return {
        "name": row.name,
        "part": str(row.part),
        "job": timed.job,
        "num_ranks": row.num_ranks,
        "plan_hash": row.plan_hash,
        "predicted_s": timed.predicted_s,
        "executed_s": timed.median_s,
        "lowest_s": min(timed.executed_s),
        "highest_s": max(timed.executed_s),
        "steps": len(timed.executed_s),
        **asdict(timed.drifted),
        "spread": timed.spread,
        "kinds": {item.name: asdict(item) | {"error": item.error} for item in row.kinds},
        "stages": {item.name: asdict(item) | {"error": item.error} for item in row.stages},
        "causes": row.causes,
        "exposed_predicted_s": row.exposed_s[0],
        "exposed_executed_s": row.exposed_s[1],
        "memory": [asdict(item) | {"error": item.error} for item in row.memory],
        "unmeasured": list(row.unmeasured),
    }


def lines(result: dict[str, Any]) -> Iterable[str]:
    """Format the result: large drift and noise first, then plans, parts, kinds, causes, goals."""
    warning = drift_warning(result["drift"])
    if warning is not None:
        yield f"{warning} (calibrated again {result['recalibrated']} times)"
    yield from (f"NOISY: {line}" for line in result["noise"])
    yield (
        f"{'plan':52s} {'predicted':>10s} {'executed':>10s} {'error':>7s} {'drift':>7s} {'corrected':>9s} "
        f"{'spread':>7s}"
    )
    for row in result["plans"]:
        yield (
            f"{row['name']:52.52s} {row['predicted_s'] * 1e3:7.1f} ms {row['executed_s'] * 1e3:7.1f} ms "
            f"{row['error']:+7.1%} {_signed(row['drift']):>7s} {_signed(row['error_corrected']):>9s} "
            f"{row['spread']:7.1%}"
        )
    for name, part in (*result["parts"].items(), ("pinned", result["pinned"])):
        yield from _part_lines(name, part)
    if result["memory"]:
        memory = result["memory"]
        yield (
            f"memory: {memory['num_ranks']} ranks, mean absolute error {memory['mean_abs_error']:.2%}, "
            f"worst {memory['worst_abs_error']:.2%}, {memory['num_exceeded']} above the prediction"
        )
    if result["drift"] is not None:
        yield (
            f"drift: the machine ran {result['drift']:+.2%} slower beside the runs than while calibrated, "
            f"{result['recalibrated']} times calibrated again; mean absolute error "
            f"{result['mean_abs_error']:.2%}, corrected {_signed(result['mean_abs_error_corrected'])}"
        )
    for left_out in result["left_out"]:
        yield f"left out: {left_out['name']}: {left_out['reason']}"
    for goal, holds in result["goals"].items():
        yield f"goal: {goal}: {'not measured' if holds is None else 'holds' if holds else 'MISSED'}"


def _signed(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:+.1%}"


def _part_lines(name: str, part: dict[str, Any]) -> Iterable[str]:
    tau, regret = part["kendall_tau"], part["regret"]
    yield (
        f"{name}: {part['num_plans']} plans, mean absolute error {part['mean_abs_error']:.2%}, mean "
        f"{part['mean_error']:+.2%}, worst {part['worst_abs_error']:.2%}, spread {part['spread']:.2%}, "
        f"{part['num_too_slow']} predicted too slow (p {part['sign_p']:.2g}), {part['num_beyond']} beyond"
    )
    if tau is not None:
        clear = "-" if part["clear_tau"] is None else f"{part['clear_tau']:.3f}"
        yield (
            f"  tau {tau:.3f} over {part['num_pairs']} pairs ({clear} over the {part['num_clear']} that runs "
            f"can tell apart), regret {regret:.2%} at worst, {part['mean_regret']:.2%} in the mean"
        )
    for kind, one in part["kinds"].items():
        yield f"  {kind:12s} mean {one['mean_error']:+7.2%}  absolute {one['mean_abs_error']:6.2%}"
    parts = ", ".join(f"{cause} {one['mean']:+.2%}" for cause, one in part["causes"].items())
    yield f"  mean error by cause: {parts}"
