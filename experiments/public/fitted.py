"""The few numbers fitted to training systems, on one half of their rows; tested on the other, and on all.

Source:  experiments/public/data. `experiments/public/record/rows.md` says what was examined before a number
         was chosen.
Ours:    the path of `workbench predict`, with a system's numbers free.
Setup:   halves are by model, in the order of their names; where a system has one model, by number of GPUs.
         The shipped numbers (`workbench/llm_table/frameworks.toml`) are fitted to all rows; the halves show
         how well they do elsewhere.
Run:     python -m experiments.public.fitted [--json]
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.harness.command import command_line
from experiments.public.published import Published, published
from sim.predict import iteration_s
from sim.step.sweep import Sweep
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.llm_table.columns import read_row
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
    """A row planned, lowered and compiled once, to be priced repeatedly."""

    row: LlmRow
    lowered: Lowered
    sweep: Sweep


@dataclass(frozen=True, slots=True)
class Free:
    """A fitted number of an execution: fitted in its logarithm, from a start, within bounds."""

    name: str
    start: float
    low: float
    high: float


def ready(rows: Sequence[LlmRow], predictor: RowPredictor) -> list[Ready]:
    """The compiled plans of all rows."""
    compiled = []
    for row in rows:
        lowered = with_replicas(lower(plan_of(row, predictor.cost(row).profile)), row)
        compiled.append(Ready(row, lowered, Sweep(lowered)))
    return compiled


def times_s(rows: Sequence[Ready], predictor: RowPredictor, execution: Execution) -> Floats:
    """[rows] seconds of an iteration under an execution, as `RowPredictor.predict` gives them.

    Layers are priced once for all rows of equal work.
    """
    models: dict[int, CostModel] = {}
    seconds = np.empty(len(rows))
    for index, row in enumerate(rows):
        plain = predictor.cost(row.row)
        if id(plain) not in models:
            models[id(plain)] = plain.executed(execution_of_row(row.row, execution))
        prices = prices_of(row.lowered, row.row, models[id(plain)])
        seconds[index] = row.sweep.iteration_s(prices.duration_s, prices.step_s)
    return seconds


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
    """The execution with given logarithms of its free numbers."""
    numbers: dict[str, Any] = {
        number.name: float(np.exp(log)) for number, log in zip(free, logs, strict=True)
    }
    return replace(Execution(), **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Rows that share some fitted numbers.

    Args:
        name: for the record.
        framework: pattern of its name.
        free: the fitted numbers.
        takes: selects its rows.
    """

    name: str
    framework: str
    free: tuple[Free, ...]
    takes: Callable[[Published], bool] = lambda row: True

    def rows(self) -> list[Published]:
        return [
            row
            for row in published()
            if row.unscorable is None and fnmatchcase(row.framework, self.framework) and self.takes(row)
        ]


def _rate(name: str) -> Free:
    return Free(name, 0.9, 0.2, 1.5)


def _waits(row: Published, recorded: str) -> bool:
    """Whether the host waits for experts: not where tokens are dropped, as far as recorded."""
    has_experts = row.cells.get("experts", "0") not in ("", "0") and not row.cells.get("capacity")
    return has_experts and row.cells.get("cuda_graphs", "none") == recorded


def _release(row: Published) -> tuple[int, ...]:
    named = row.cells.get("release")
    return tuple(int(part) for part in named.split(".")) if named else UNNAMED


LONG = ("Megatron-Core", "fms-fsdp", "llm-foundry")
UNNAMED = (99,)
TUNED = (26, 2, 1)  # release from which H100 recipes no longer wait for their hosts as long
WAIT = (Free("host_wait_s", 2e-3, 1e-5, 5e-2),)
SYSTEMS = (
    System(name="InternEvo", framework="InternEvo", free=(_rate("matmul_rate"),)),
    System(
        name="PyTorch and Megatron-Core on H100, two bytes",
        framework="[Mlf]*",
        free=(_rate("matmul_rate"),),
        takes=lambda row: (
            row.framework in LONG and row.cells["gpu"] == "H100" and row.cells["precision"] == "bf16"
        ),
    ),
    System(
        name="Megatron-Bridge, experts",
        framework="Megatron-Bridge",
        free=WAIT,
        takes=lambda row: _waits(row, "router") and row.cells["gpu"] != "H100",
    ),
    System(
        name="Megatron-Bridge, experts, H100, routers recorded",
        framework="Megatron-Bridge",
        free=WAIT,
        takes=lambda row: _waits(row, "router") and row.cells["gpu"] == "H100",
    ),
    System(
        name="Megatron-Bridge, experts, H100",
        framework="Megatron-Bridge",
        free=WAIT,
        takes=lambda row: _waits(row, "none") and TUNED <= _release(row) < UNNAMED,
    ),
    System(
        name="Megatron-Bridge, experts, H100, before recipes",
        framework="Megatron-Bridge",
        free=WAIT,
        takes=lambda row: _waits(row, "none") and not TUNED <= _release(row) < UNNAMED,
    ),
    System(
        name="JAX-Toolbox, XLA alone",
        framework="JAX-Toolbox [PMT]*",
        free=(_rate("memory_rate"),),
        takes=lambda row: row.cells["x_transformer_engine"] == "no",
    ),
    System(
        name="JAX-Toolbox ViT",
        framework="JAX-Toolbox ViT",
        free=(_rate("matmul_rate"), _rate("memory_rate")),
    ),
)


@dataclass(frozen=True, slots=True)
class Priced:
    """A row with its compiled plan, priced without the shipped numbers."""

    row: Published
    ready: Ready


def halves(rows: Sequence[Priced]) -> tuple[list[Priced], list[Priced]]:
    """The rows split by every second model; with one model, by every second number of GPUs."""
    has_models = len({each.row.model for each in rows}) > 1

    def key(row: Priced) -> str:
        return row.row.model if has_models else row.row.cells["gpus"]

    first = set(sorted({key(each) for each in rows})[::2])
    return [each for each in rows if key(each) in first], [each for each in rows if key(each) not in first]


def measure(system: System) -> dict[str, object]:
    """Errors of each half under the other's fit, and the numbers fitted on all rows."""
    predictor, published_rows = RowPredictor(iteration_s), system.rows()
    compiled = ready([replace(read_row(row.cells), fitted=()) for row in published_rows], predictor)
    rows = [Priced(row, each) for row, each in zip(published_rows, compiled, strict=True)]

    def mean(part: Sequence[Priced], execution: Execution) -> float:
        seconds = times_s([each.ready for each in part], predictor, execution)
        errors = [each.row.error(record) for each, record in zip(part, seconds, strict=True)]
        return round(float(np.abs(errors).mean()), 4)

    def fit(part: Sequence[Priced]) -> Execution:
        measured_s = np.array([each.row.measured_s for each in part])
        return fitted([each.ready for each in part], measured_s, predictor, system.free)

    record: dict[str, object] = {"rows": len(rows), "without": mean(rows, Execution())}
    first, second = halves(rows)
    for name, part, other in (("first", first, second), ("second", second, first)):
        if part and other:
            numbers = fit(part)
            record[f"fitted on the {name} half"] = {
                "numbers": _numbers(numbers, system),
                "its rows": mean(part, numbers),
                "the others": mean(other, numbers),
                "the others without": mean(other, Execution()),
            }
    numbers = fit(rows)
    record["fitted on all"] = {"numbers": _numbers(numbers, system), "its rows": mean(rows, numbers)}
    return record


def _numbers(execution: Execution, system: System) -> dict[str, float]:
    return {free.name: float(f"{getattr(execution, free.name):.4g}") for free in system.free}


def main() -> int:
    """Fit every system."""
    parser = command_line(__doc__)
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--system", choices=names, action="append", help="only this one; repeatable")
    arguments = parser.parse_args()
    measured = {
        system.name: measure(system) for system in SYSTEMS if system.name in (arguments.system or names)
    }
    sys.stdout.write(json.dumps(measured, indent=None if arguments.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
