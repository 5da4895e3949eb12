"""Fits the numbers of an execution to iteration times of rows, through the workbench's own prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from sim.step.sweep import Sweep
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.replicas import with_replicas
from workbench.llm_table.row_execution import execution_of as execution_of_row
from workbench.llm_table.row_plan import plan_of
from workbench.llm_table.row_prices import prices_of
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ready:
    """A row planned, lowered and compiled once, to be priced again and again."""

    row: LlmRow
    lowered: Lowered
    sweep: Sweep


@dataclass(frozen=True, slots=True)
class Free:
    """A number of an execution that is fitted: in its logarithm, from a start, within bounds."""

    name: str
    start: float
    low: float
    high: float


def ready(rows: Sequence[LlmRow], predictor: RowPredictor) -> list[Ready]:
    """Plans of all rows, compiled."""
    found = []
    for row in rows:
        lowered = with_replicas(lower(plan_of(row, predictor.cost(row).profile)), row)
        found.append(Ready(row, lowered, Sweep(lowered)))
    return found


def times_s(rows: Sequence[Ready], predictor: RowPredictor, execution: Execution) -> Floats:
    """[rows] seconds of an iteration under that execution: what `RowPredictor.predict` would say.

    Layers are priced once for all rows of equal work.
    """
    models: dict[int, CostModel] = {}
    found = np.empty(len(rows))
    for index, each in enumerate(rows):
        plain = predictor.cost(each.row)
        if id(plain) not in models:
            models[id(plain)] = plain.executed(execution_of_row(each.row, execution))
        prices = prices_of(each.lowered, each.row, models[id(plain)])
        found[index] = each.sweep.iteration_s(prices.duration_s, prices.step_s)
    return found


def fitted(
    rows: Sequence[Ready], measured_s: Floats, predictor: RowPredictor, free: Sequence[Free]
) -> Execution:
    """Least squares over log(predicted / measured), with a soft l1 loss, in the logarithms of `free`.

    Complexity: O(rows x numbers) predictions a step.
    """
    log_measured = np.log(measured_s)

    def residuals(logs: Floats) -> Floats:
        return np.log(times_s(rows, predictor, execution_of(free, logs))) - log_measured

    solution = least_squares(
        residuals,
        np.log([number.start for number in free]),
        bounds=(np.log([number.low for number in free]), np.log([number.high for number in free])),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=1e-3,
        max_nfev=25,
    )
    return execution_of(free, solution.x)


def execution_of(free: Sequence[Free], logs: Floats) -> Execution:
    """The execution with these logarithms of its free numbers."""
    numbers: dict[str, Any] = {
        number.name: float(np.exp(log)) for number, log in zip(free, logs, strict=True)
    }
    return replace(Execution(), **numbers)
