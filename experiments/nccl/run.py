"""Runs cases on gloo with NCCL's behaviour, and reports each outcome."""

import math
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from experiments.fidelity.mutant_runs import compared
from experiments.fidelity.work import this_machine
from experiments.nccl.cases import LINK, Case
from experiments.nccl.manners import ALL, Manner
from experiments.nccl.ranks import LACKS, Conduct, Doom, Variant, run_with_manners
from runtime.data.batches import SyntheticSource
from runtime.launch import RunResult, result_of
from runtime.reference import ReferenceResult, reference_step
from runtime.run_settings import Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings
from runtime.world.failure import WorldFailed
from runtime.world.pool import Pool
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.model.model_graph import ModelGraph
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision, Settings
from workbench.planner.assembly import empty_draft

TIMEOUT_S = 15.0  # of a wait that should end
SHORT_S = 2.0  # of one that should not
HANG_S = 5.0  # after which a job is given up
UNNOTICED_S = 2.5  # the same, before supervisors look whether a silent process was stopped
JOB_S = 90.0
SAME = "same"
HUNG = "hung"
CLIP_NORM = 1.0  # so that all ranks meet in the step too


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case: `same` as one process, `hung`, or what was wrong."""

    what: str
    seconds: float


def execute(
    plan: Plan, pool: Pool, conduct: Conduct, *, timeout_s: float = TIMEOUT_S, job_s: float = JOB_S
) -> RunResult:
    """One step in float64; errors as `run_lowered`."""
    settings = RunSettings(
        precision=Precision.FLOAT64,
        collect=Collect.GRADIENTS,
        timeout_s=timeout_s,
        optimizer=OptimizerSettings(clip_norm=CLIP_NORM),
    )
    lowered, source = lower(plan), SyntheticSource(settings.seed)
    torch.set_num_threads(1)
    reports = pool.run(
        run_with_manners,
        len(plan.ranks),
        lowered,
        settings,
        source,
        conduct,
        timeout_s=job_s,
        wait_s=timeout_s,
    )
    return result_of(lowered, reports, settings)


def outcome(plan: Plan, pool: Pool, conduct: Conduct, **bounds: float) -> Outcome:
    """Compare loss and gradients with one process on the whole batch."""
    start_s = time.perf_counter()
    try:
        result = execute(plan, pool, conduct, **bounds)
    except WorldFailed as error:
        text = " ".join(str(error).split())
        return Outcome(HUNG if text.startswith("not done after") else text, time.perf_counter() - start_s)
    seconds = time.perf_counter() - start_s
    if not math.isfinite(result.losses[0]):
        return Outcome(f"loss {result.losses[0]}", seconds)
    return Outcome(compared(plan, result, _reference(plan.model, plan.batch, plan.settings)), seconds)


@cache
def _reference(model: ModelGraph, batch: tuple[Sample, ...], settings: Settings) -> ReferenceResult:
    """The reference of one process, which many plans share."""
    name = "one process"
    job = Job(name=name, model=model, cluster=this_machine(LINK, 1), batch=batch, settings=settings)
    return reference_step(empty_draft(job, name), seed=0, dtype=torch.float64, source=SyntheticSource(0))


def run_all(cases: Iterable[Case], pool: Pool) -> Iterator[tuple[Case, Outcome]]:
    """Run every case with all behaviours, on the real executor."""
    for case in cases:
        yield case, outcome(case.plan, pool, Conduct())


def hangs_of_before(cases: Iterable[Case], pool: Pool) -> Iterator[tuple[Case, Outcome]]:
    """Outcomes with receives posted first and a wait for the device after each action."""
    before = Conduct(
        manners=frozenset({Manner.DEVICE_WAIT, Manner.ENDLESS_WAITS}), variant=Variant.WAITS_FOR_THE_DEVICE
    )
    for case in cases:
        if case.hangs_as_before:
            yield case, outcome(case.plan, pool, before, job_s=HANG_S)


def caught(plan: Plan, pool: Pool) -> dict[str, dict[str, str]]:
    """Behaviour -> outcomes of it alone, on the real executor and on one that cannot cope with it.

    The last one is shown by a rank that stops in the middle of its step.
    """
    outcomes = {}
    for manner, variant in LACKS.items():
        endless = manner is Manner.ENDLESS_WAITS
        doom = Doom(plan.ranks[-1], 1, signal.SIGSTOP) if endless else None
        bounds = {"job_s": 2 * HANG_S, "timeout_s": HANG_S}
        if endless:
            bounds = {"job_s": UNNOTICED_S, "timeout_s": SHORT_S}
        outcomes[manner.name.lower()] = {
            which.name.lower(): outcome(
                plan, pool, Conduct(manners=frozenset({manner}), variant=which, doom=doom), **bounds
            ).what
            for which in (Variant.AS_BUILT, variant)
        }
    return outcomes


def dead_rank(plan: Plan, pool: Pool, number: int) -> Outcome:
    """What a job reports, and when, if a rank gets a signal at its second action; no wait notices it."""
    doom = Doom(plan.ranks[-1], 1, number)
    return outcome(plan, pool, Conduct(manners=ALL, doom=doom), timeout_s=SHORT_S)
