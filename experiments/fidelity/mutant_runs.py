"""Mutants on real processes: accepted ones must train like their parents, the others must hang."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiments.fidelity.mutant_kinds import NUM_RANKS
from runtime.data.batches import SyntheticSource
from runtime.launch import RunResult, run_lowered
from runtime.parallel.expert.cuts import held_parts
from runtime.reference import ReferenceResult, reference_step
from runtime.run_settings import Collect, RunSettings
from runtime.world.failure import WorldFailed
from runtime.world.pool import Pool
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision

BOUND = 1e-10  # of the loss, and of a gradient against the norm of all
TIMEOUT_S = 5.0
RUN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A mutant and its parent; sampled refused mutants are those reported as a deadlock."""

    operator: str
    plan: Plan
    parent: Plan
    is_accepted: bool


def run_samples(samples: Sequence[Sample]) -> dict[str, object]:
    """Run all samples on gloo in float64; returns the outcomes by kind."""
    failed, ran = [], []
    with Pool(NUM_RANKS) as pool:
        for sample in samples:
            result = outcome(sample, pool)
            if sample.is_accepted and result != "same":
                failed.append(f"{sample.operator}: {result}")
            if not sample.is_accepted and not result.startswith("failed"):
                ran.append(f"{sample.operator}: {result}")
    return {
        "accepted_run": sum(sample.is_accepted for sample in samples),
        "accepted_that_failed": failed,
        "deadlocks_run": sum(not sample.is_accepted for sample in samples),
        "deadlocks_that_ran": ran,
    }


def outcome(sample: Sample, pool: Pool) -> str:
    """Return `same`, `different ...` or `failed ...`."""
    settings = RunSettings(
        precision=Precision.FLOAT64,
        collect=Collect.GRADIENTS,
        timeout_s=RUN_TIMEOUT_S if sample.is_accepted else TIMEOUT_S,
    )
    torch.set_num_threads(1)
    try:
        result = run_lowered(lower(sample.plan), settings, pool=pool)
    except (WorldFailed, ValueError) as error:
        return f"failed: {' '.join(str(error).split())[:200]}"
    reference = reference_step(
        sample.parent, seed=settings.seed, dtype=torch.float64, source=SyntheticSource(settings.seed)
    )
    return compared(sample.plan, result, reference)


def compared(plan: Plan, result: RunResult, reference: ReferenceResult) -> str:
    """Compare each rank's gradients with the same parts of the reference's."""
    if not math.isclose(result.losses[0], reference.loss, rel_tol=BOUND):
        return f"different loss: {result.losses[0]} instead of {reference.loss}"
    norm = float(torch.stack([gradient.norm() for gradient in reference.gradients.values()]).norm())
    for state in result.states:
        parts = held_parts(plan, state.rank)
        for key, gradient in state.gradients.items():
            expected = parts.get(key, torch.clone)(reference.gradients[key])
            if not float((gradient - expected).norm()) <= BOUND * norm:  # NaN, too
                return f"different gradient of {key} on rank {state.rank}"
    return "same"
