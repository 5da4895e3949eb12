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

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.public.blind import FOLDER, check_unmeasured, predicting, rows_of
from sim.predict import predict
from workbench.cost.execution import Execution, load_execution
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.traffic import LossKernel
from workbench.job.job import Job, job_from_spec
from workbench.job.job_file import parse_spec
from workbench.memory.account import peak_bytes
from workbench.memory.layer import state_bytes_of
from workbench.plan.kernels import Kernels
from workbench.planner.stage_counts import silent
from workbench.schedule.action import Pass
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.units import GIB, S_PER_HOUR
from workbench.whole_file import write_text

RUNS, MODELS = FOLDER / "multimodal.csv", FOLDER / "multimodal_models.yaml"
PREDICTIONS, MEASURED = FOLDER / "multimodal_predictions.csv", FOLDER / "multimodal_measured.csv"
EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS_PER_NODE = 8
STRATEGY = "megatron-heterogeneous"  # the layouts of the job as they are
EXECUTIONS = {
    "transformers": load_execution(EXAMPLES / "transformers-execution.json"),
    "megatron": Execution(loss=LossKernel.FUSED),
}
TRAINS = {
    "projector": ("projector", "none"),
    "llm": ("projector", "all"),
    "all": ("all", "all"),
}  # of the vision tower, of the language model

Row = Mapping[str, str]


@cache
def _models() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = yaml.safe_load(MODELS.read_text(encoding="utf-8"))
    return models


def job_of(row: Row) -> Job:
    """The job of a run: one replica on each `tp` GPUs, all modules on the same ones."""
    vision_trains, llm_trains = TRAINS[row["trains"]]
    gpus, tp, size = int(row["gpus"]), int(row["tp"]), int(row["micro_batch"])
    layout = {"rank_offset": 0, "tp": tp, "pp": 1, "sharding": row["sharding"], "sequence_parallel": tp > 1}
    recompute = "blocks" if row["recompute"] == "full" else row["recompute"]  # as all these trainers do
    spec = {
        "name": row["id"],
        "model": {
            "modules": {
                "vision": _models()["vision"][row["vision"]] | {"trainable": vision_trains},
                "llm": _models()["llm"][row["llm"]] | {"trainable": llm_trains},
            }
        },
        "cluster": {
            "device": row["gpu"],
            "nodes": -(-gpus // RANKS_PER_NODE),
            "ranks_per_node": min(gpus, RANKS_PER_NODE),
        },
        "batch": {
            "samples": gpus // tp * size * int(row["accumulation"]),
            "microbatch_samples": size,
            "replicas": gpus // tp,
            "fixed": {
                "text_tokens": int(row["text_tokens"]),
                "items": {"vision": _items(row)},
            },
        },
        "layouts": {
            "vision": layout | {"recompute": recompute if row["trains"] == "all" else "none"},
            "llm": layout | {"recompute": recompute},
        },
        "precision": "bfloat16",
        "optimizer_precision": "float32",
        "profile": row["gpu"],
    }
    return job_from_spec(parse_spec(yaml.safe_dump(spec), where=row["id"]), folder=FOLDER)


def _items(row: Row) -> dict[str, Any]:
    """The images of a sample: at the tower's own size, or squares of `image_px`."""
    images, side = int(row["images"]), row["image_px"]
    return {"images": [[int(side)] * 2] * images} if side else {"each": images}


def predicted_s(row: Row) -> float:
    """Seconds of a run's step, or of its passes alone.

    Raises:
        ValueError: the job has no plan, or the plan does not fit.
    """
    job, cost = job_of(row), CostModel(load_profile(row["gpu"]), EXECUTIONS[row["execution"]])
    trace = predict(*accept(PLANNERS[STRATEGY](job, cost, silent)), cost)
    step_s = sum(span.end_s - span.start_s for span in trace.spans if span.action.kind is Pass.STEP)
    return trace.iteration_s - (step_s if row["covers"] == "passes" else 0.0)


def peak_gib(row: Row) -> float:
    """Peak memory of a run's passes with transformers' modules on one GPU, without an optimizer's state."""
    job = job_of(row)
    settings = replace(job.settings, kernels=Kernels.EAGER, optimizer_precision=None)
    cost = CostModel(load_profile(row["gpu"]), EXECUTIONS[row["execution"]])
    plan = PLANNERS[STRATEGY](replace(job, settings=settings), cost, silent)
    (peak,) = peak_bytes(*accept(plan)).values()
    trained = (layer for module in plan.model.modules for layer in module.layers if layer.trainable)
    elements = sum(parameter.num_elements for layer in trained for parameter in layer.parameters())
    return (peak - elements * state_bytes_of(settings).optimizer) / GIB


def write_predictions() -> None:
    """Write the prediction of every run; ValueError if there are measurements beside it already."""
    check_unmeasured(MEASURED)
    lines = [f"{row['id']},{predicted_s(row):.6g}" for row in rows_of(RUNS)]
    write_text("\n".join(("id,predicted_s", *lines)) + "\n", PREDICTIONS)


def measured_s(row: Row, printed: Row) -> float:
    """Seconds of a step behind what was printed: hours of the whole run, or seconds of a step."""
    value = float(printed["value"])
    return value * S_PER_HOUR / int(row["steps"]) if printed["unit"] == "hours" else value


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
