"""Published training times of vision-language models, predicted before anybody here had seen them.

Source:  experiments/public/data/unseen/multimodal.csv: LLaVA, InternVL, ms-swift and SiQ-VL, from their
         scripts and READMEs. `multimodal_predictions.csv` was committed while the measured times were kept
         apart, unopened.
Ours:    each run becomes a job and a plan with its layouts, and the simulator predicts the step. Runs
         with transformers' modules have its kernels (`pointwise: eager`), PyTorch's loss and gradients in the
         weights' format.
Setup:   a run's hours are compared with its number of steps times the predicted step; start-up, loading of
         data and checkpoints are theirs alone. `passes`: without the optimizer's step, which that benchmark
         leaves out. Text lengths that no source states are presumed, see `note`. Peaks of memory were
         predicted afterwards, with transformers' kernels.
Run:     python -m experiments.public.unseen_multimodal [--predict] [--json]
"""

from dataclasses import replace

import numpy as np

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public import multimodal
from experiments.public.blind import FOLDER, check_unmeasured, predicting, rows_of
from experiments.public.multimodal import STRATEGY, Row, cost_of, models_of
from workbench.job.job import Job
from workbench.memory.account import peak_bytes
from workbench.memory.layer import state_bytes_of
from workbench.plan.kernels import Kernels
from workbench.planner.stage_counts import silent
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.units import GIB
from workbench.whole_file import write_text

RUNS, MODELS = FOLDER / "multimodal.csv", FOLDER / "multimodal_models.yaml"
PREDICTIONS, MEASURED = FOLDER / "multimodal_predictions.csv", FOLDER / "multimodal_measured.csv"


def job_of(row: Row) -> Job:
    """The job of a run of this round."""
    return multimodal.job_of(row, models_of(MODELS))


def predicted_s(row: Row) -> float:
    """Seconds of a run's step, or of its passes alone; ValueError for a job without a plan that fits."""
    return multimodal.predicted_s(row, job_of(row))


def peak_gib(row: Row) -> float:
    """Peak memory of a run's passes with transformers' modules on one GPU, without an optimizer's state."""
    job = job_of(row)
    settings = replace(job.settings, kernels=Kernels.EAGER, optimizer_precision=None)
    plan = PLANNERS[STRATEGY](replace(job, settings=settings), cost_of(row), silent)
    (peak,) = peak_bytes(*accept(plan)).values()
    trained = (layer for module in plan.model.modules for layer in module.layers if layer.trainable)
    elements = {
        parameter.name: parameter.num_elements for layer in trained for parameter in layer.parameters()
    }
    return (peak - sum(elements.values()) * state_bytes_of(settings).optimizer) / GIB


def measured_s(row: Row, printed: Row) -> float:
    """Seconds of a step behind what was printed: hours of the whole run, or seconds of a step."""
    seconds = multimodal.measured_s(row, float(printed["value"]), printed["unit"])
    assert seconds is not None
    return seconds


def write_predictions() -> None:
    """Write the prediction of every run; ValueError if there are measurements beside it already."""
    check_unmeasured(MEASURED)
    lines = [f"{row['id']},{predicted_s(row):.6g}" for row in rows_of(RUNS)]
    write_text("\n".join(("id,predicted_s", *lines)) + "\n", PREDICTIONS)


@script(command=predicting(write_predictions))
def run() -> Evidence:
    """Errors of the predictions that were written before, and of today's; above zero: predicted too slow."""
    printed = {each["id"]: each for each in rows_of(MEASURED)}
    before = {each["id"]: float(each["predicted_s"]) for each in rows_of(PREDICTIONS)}
    evidence, errors, today = Evidence(), {}, {}
    for row in rows_of(RUNS):
        took_s = measured_s(row, printed[row["id"]])
        errors[row["id"]] = before[row["id"]] / took_s - 1
        today[row["id"]] = predicted_s(row) / took_s - 1
        evidence.ours[f"{row['id']}/error"] = errors[row["id"]]
        if row["covers"] == "passes":
            peak = float(printed[row["id"]]["peak_gib"])
            evidence.ours[f"{row['id']}/memory_error"] = peak_gib(row) / peak - 1
    peaks = [value for name, value in evidence.ours.items() if name.endswith("/memory_error")]
    evidence.ours["memory_signed"] = float(np.mean(peaks))
    judged = [row for row in rows_of(RUNS) if not row["why_not"]]
    for name in ("all", *dict.fromkeys(row["project"] for row in judged)):
        chosen = [row["id"] for row in judged if name in ("all", row["project"])]
        sizes = np.abs([errors[each] for each in chosen])
        evidence.ours |= {
            f"{name}/rows": float(len(chosen)),
            f"{name}/mean": float(sizes.mean()),
            f"{name}/median": float(np.median(sizes)),
            f"{name}/signed": float(np.mean([errors[each] for each in chosen])),
            f"{name}/worst": float(sizes.max()),
            f"{name}/mean_today": float(np.abs([today[each] for each in chosen]).mean()),
        }
    return evidence
