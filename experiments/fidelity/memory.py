"""Predicted and measured peak memory of every rank.

Setup:   gloo ranks on this machine; the demo's model on a small batch and the tiny model of
         examples/tiny.yaml, under every strategy and several mixes of frozen and trained
         modules, and with recompute, larger microbatches, two replicas and other precisions.
Ours:    the peak of `workbench.memory.account`'s account, recorded before the run; measured is the second
         step, with every storage counted as it is allocated and freed.
Run:     python -m experiments.fidelity.memory [--json]
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.demo_job import MIXES, NUM_RANKS, STRATEGIES, demo_job, local_cluster
from experiments.harness.command import Found, bench, print_rows
from runtime.emulation.peak_memory import WARMUP, PeakMemory
from runtime.launch import run_local
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import peak_bytes as planned_peak_bytes
from workbench.metrics import peak_bytes
from workbench.model.model_graph import TEXT
from workbench.model.trainable import Trainable, with_trainable
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute
from workbench.strategies import cornstarch, encoders_replicated
from workbench.timing.accept import accept
from workbench.units import MIB

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
DEMO_SAMPLES = 3
TINY_MIXES = {  # what of the encoders is trained, and what of the LLM
    "projectors": (Trainable.PROJECTOR, Trainable.NONE),
    "projectors+llm": (Trainable.PROJECTOR, Trainable.ALL),
    "all": (Trainable.ALL, Trainable.ALL),
}
GOAL_MEAN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory(PeakMemory):
    """Predicted and measured memory of one rank of one plan."""

    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures over all ranks of all plans; `mean_error` is signed, `num_exceeded` predicted too little."""

    mean_abs_error: float
    mean_error: float
    worst_abs_error: float
    num_exceeded: int
    num_plans: int
    num_ranks: int


def cases() -> Iterator[tuple[str, Plan]]:
    """Names and plans, all on at most `NUM_RANKS` ranks."""
    cost = CostModel(ideal_profile())
    cluster = local_cluster(Link(name="any", bytes_per_s=1e9, latency_s=1e-4), 2**40)
    for mix in MIXES:
        job = demo_job(mix, cluster)
        job = replace(job, batch=job.batch[:DEMO_SAMPLES])
        yield from _under_every_strategy(f"demo {mix}", job, cost)
    for mix in TINY_MIXES:
        yield from _under_every_strategy(f"tiny {mix}", tiny_job(mix), cost)
    for name, job, strategy in variants():
        yield f"tiny {name}", strategy(job, cost)


@cache
def tiny_job(mix: str) -> Job:
    """The tour's job with other training settings."""
    job = load_job(TINY)
    encoders, llm = TINY_MIXES[mix]
    modules = tuple(
        with_trainable(module, llm if module.modality == TEXT else encoders) for module in job.model.modules
    )
    return replace(job, model=replace(job.model, modules=modules))


def variants() -> Iterator[tuple[str, Job, Callable[[Job, CostModel], Plan]]]:
    """Settings that change what is kept, one at a time."""
    job = tiny_job("all")
    names = [module.name for module in job.model.modules]
    recomputed = tuple(ModuleSettings(module=name, recompute=Recompute.FULL) for name in names)
    yield (
        "all, recompute",
        replace(job, settings=replace(job.settings, modules=recomputed)),
        cornstarch.plan,
    )
    yield "all, microbatches of 2", replace(job, microbatch_samples=2), cornstarch.plan
    two = (*(ModuleLayout(module=name, pp=1) for name in names[:-1]), ModuleLayout(module=names[-1], pp=2))
    yield "all, 2 replicas", replace(job, replicas=2, layouts=two), encoders_replicated.plan
    for precision in (Precision.FLOAT64, Precision.BFLOAT16):
        settings = replace(job.settings, precision=precision)
        yield f"all, {precision.value}", replace(job, settings=settings), cornstarch.plan


def _under_every_strategy(name: str, job: Job, cost: CostModel) -> Iterator[tuple[str, Plan]]:
    """Cases of every strategy; strategies with equal stages and programs are one case."""
    seen: list[tuple[object, ...]] = []
    for strategy in STRATEGIES:
        plan = strategy(job, cost)
        if (plan.stages, plan.programs) not in seen:
            seen.append((plan.stages, plan.programs))
            yield f"{name}, {plan.strategy}", plan


def measure(name: str, plan: Plan, pool: Pool) -> tuple[RankMemory, ...]:
    """Predict the memory, then run two steps and take the second one's peaks."""
    predicted = planned_peak_bytes(*accept(plan))
    result = run_local(plan, RunSettings(steps=1, warmup=WARMUP, collect=Collect.MEMORY), pool=pool)
    measured = peak_bytes(result.trace)
    return tuple(
        RankMemory(plan=name, rank=rank, predicted_bytes=predicted[rank], measured_bytes=measured[rank])
        for rank in plan.ranks
    )


def summarise(rows: Sequence[RankMemory]) -> Summary:
    errors = [row.error for row in rows]
    return Summary(
        mean_abs_error=statistics.fmean(abs(error) for error in errors),
        mean_error=statistics.fmean(errors),
        worst_abs_error=max(abs(error) for error in errors),
        num_exceeded=sum(error < 0 for error in errors),
        num_plans=len({row.plan for row in rows}),
        num_ranks=len(rows),
    )


def line(row: RankMemory, width: int = 45) -> str:
    """Format a row of the table under `head`."""
    return (
        f"{row.plan:{width}s} {row.rank:4d} {row.predicted_bytes / MIB:7.2f} MiB "
        f"{row.measured_bytes / MIB:7.2f} MiB {row.error:+7.2%}"
    )


def head(width: int = 45) -> str:
    return f"{'plan':{width}s} rank  predicted   measured   error"


def summary_line(summary: Summary, seconds: float) -> str:
    return (
        f"{summary.num_plans} plans, {summary.num_ranks} ranks, {seconds:.0f} s: "
        f"mean error {summary.mean_error:+.2%}, absolute {summary.mean_abs_error:.2%}, "
        f"worst {summary.worst_abs_error:.2%}"
    )


def record(rows: Sequence[RankMemory]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return asdict(summarise(rows)) | {"rows": [asdict(row) | {"error": row.error} for row in rows]}


@bench()
def run() -> Found:
    started_s = time.perf_counter()
    with Pool(NUM_RANKS) as pool:
        rows = print_rows(head(), (row for case in cases() for row in measure(*case, pool)), line)
    summary = summarise(rows)
    print(summary_line(summary, time.perf_counter() - started_s))
    claims = {
        "no rank needs more than predicted": summary.num_exceeded == 0,
        f"mean absolute error <= {GOAL_MEAN:.0%}": summary.mean_abs_error <= GOAL_MEAN,
    }
    return Found(record(rows), claims)
