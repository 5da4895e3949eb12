"""The rows of a campaign in a few figures; null where the rows for one are missing."""

import statistics
from collections.abc import Mapping
from typing import Any

from experiments.fidelity.score import Timed, ranking
from experiments.gpu_day.predictions import JUDGED

Rows = Mapping[str, Mapping[str, Any]]  # key -> values, of one part

RATIOS = ("flex_forward_min", "flex_backward_min", "cudnn_causal_min")


def figures(rows: Mapping[str, Rows], ratios: Mapping[str, float | None]) -> dict[str, float | int | None]:
    """The figures that the goals speak of.

    Args:
        rows: of each part, by its name.
        ratios: of rivals' times over those of our kernels, by `RATIOS`; what is not there was not measured.
    """
    memory = [abs(row["error"]) for row in rows.get("alone", {}).values() if "error" in row]
    return {
        **{name: ratios.get(name) for name in RATIOS},
        **_plan_figures(rows.get("plans", {})),
        "memory_error": max(memory, default=None),
    }


def _plan_figures(rows: Rows) -> dict[str, float | int | None]:
    timed = list(judged_plans(rows).values())
    errors = [abs(one.error) for one in timed]
    return {
        "plans_judged": len(timed) or None,
        "mean_error": statistics.fmean(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "tau": ranking(timed).clear_tau,
    }


def judged_plans(rows: Rows) -> dict[str, Timed]:
    """Judged plans by name, as they were first run; every step of all their runs counts."""
    executed: dict[str, list[float]] = {}
    predicted: dict[str, float] = {}
    for row in rows.values():
        if row.get("kind") == JUDGED:
            executed.setdefault(row["plan"], []).extend(row["executed_s"])
            predicted[row["plan"]] = row["predicted_s"]
    return {
        plan: Timed(job="", predicted_s=predicted[plan], executed_s=tuple(steps))
        for plan, steps in executed.items()
    }
