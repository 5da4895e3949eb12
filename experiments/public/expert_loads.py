"""Mixtures of the third multimodal round with unequal loads of experts, as published of other models.

Source:  MaxVio, the largest load over the mean less 1, over a whole validation set: 0.52 and 0.72 of models
         of 3 and 1 billion parameters with 64 experts, trained with a loss that balances them; 0.04 with
         biases in its place. Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
         Mixture-of-Experts" (arXiv 2408.15664), table 2.
Ours:    the error of a step with these loads in place of equal ones, and with all tokens at the same experts,
         which is the most there can be. A plan that does not fit has no step.
Setup:   not blind: it was computed after the round was scored. Nothing is fitted, and the sealed predictions
         stay as they are. Stages are cut anew for every load, unless a row has its own. Below zero: predicted
         too fast.
Run:     python -m experiments.public.expert_loads [--max-violations 0.04 0.52 0.72] [--json]
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.harness.command import Found, bench, want_at_least
from experiments.public import multimodal
from experiments.public.blind import Row, rows_of
from experiments.public.multimodal_round import Measured
from experiments.public.unseen_multimodal_third import ROUND
from workbench.cost.expert_load import load_cv_of
from workbench.job.job import Job
from workbench.model.expert_load import most_load_cv, with_expert_load
from workbench.model.experts import num_chosen, num_experts

EQUAL, ONE_PLACE = "equal", "one place"


def mixtures() -> Iterator[tuple[str, Row, Job, float]]:
    """Yield (name, row, job, measured seconds) of the round's runs whose language model has experts."""
    runs = ROUND.runs()
    took_s, models = Measured.read(runs, rows_of(ROUND.measured)).step_s, multimodal.models_of(ROUND.models)
    for name, row in runs.items():
        if name in took_s and row["llm"] and not row["unsaid"]:
            job = multimodal.job_of(row, models)
            if any(map(num_experts, job.model.llm.layers)):
                yield name, row, job, took_s[name]


def load_cvs(job: Job, max_violations: Sequence[float]) -> dict[str, float]:
    """Coefficients of variation by what they stand for: equal loads, each MaxVio, all tokens alike."""
    layer = next(layer for layer in job.model.llm.layers if num_experts(layer))
    count, most = num_experts(layer), most_load_cv(num_experts(layer), num_chosen(layer))
    stated = {f"{each:g}": load_cv_of(each, count) for each in max_violations}
    return {EQUAL: 0.0} | stated | {ONE_PLACE: most}


def with_load(job: Job, cv: float) -> Job:
    """The job with this CV of its language model's experts."""
    modules = (with_expert_load(each, cv) if each is job.model.llm else each for each in job.model.modules)
    return replace(job, model=replace(job.model, modules=tuple(modules)))


def error_of(row: Row, job: Job, measured_s: float) -> float:
    """Relative error of a step; NaN where the plan does not fit."""
    try:
        return multimodal.step_of(row, job).value / measured_s - 1
    except ValueError:
        return math.nan


def _text(error: float) -> str:
    return "does not fit" if math.isnan(error) else f"{error:+.1%}"


def _violations(texts: Sequence[str]) -> list[float]:
    """The numbers of the flag; ValueError for what is no number from 0 on."""
    try:
        values = [float(each) for each in texts]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"--max-violations: want numbers, got {' '.join(texts)!r}")
    want_at_least(0, max_violations=min(values))
    return values


@bench(max_violations="largest loads of an expert over the mean, less 1")
def run(max_violations: tuple[str, ...] = ("0.04", "0.52", "0.72")) -> Found:
    """Print the error of every run for every load."""
    values = _violations(max_violations)
    record: dict[str, dict[str, float | None]] = {}
    for name, row, job, measured_s in mixtures():
        cvs = load_cvs(job, values)
        errors = {load: error_of(row, with_load(job, cv), measured_s) for load, cv in cvs.items()}
        shown = (f"{load} (cv {cvs[load]:.2f}) {_text(error)}" for load, error in errors.items())
        print(f"{name}: {', '.join(shown)}", flush=True)
        record[name] = {load: None if math.isnan(error) else error for load, error in errors.items()}
    return Found(record)
