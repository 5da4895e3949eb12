"""How many plans of every strategy `workbench export` writes, and whether the systems accept the folders.

Setup:   twelve jobs, half of several modules (`export_jobs`), planned by every strategy; each plan to every
         target. A target that can express a plan writes a folder, which the system itself then reads
         (`targets`): torchtitan by its config manager, Megatron-LM by its parser and TransformerConfig,
         Megatron-Bridge by its config classes. fsdp2 and torchrun folders run in the tests; here writing them
         is enough. Megatron's folders of two modules, on ranks of their own and on the same ones, also train
         two steps on gloo: megatron-core's own code runs, with the CPU in place of CUDA.
Given:   nothing.
Run:     python -m experiments.doors [--json]
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from experiments.doors.export_jobs import export_jobs, small_job
from experiments.doors.targets import CHECKED, Folder, fetched, refusals, trained
from sim.predict import predict
from workbench.cost.model import CostModel
from workbench.export.export import export
from workbench.export.registry import BY_NAME, TARGETS
from workbench.export.target import Target
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

KEY = "export_targets_parsed"
TRAINED = ("megatron-islands", "megatron-colocated")
"""Strategies that put two modules on ranks of their own, and on the same ones."""


class Simulated:
    """Prices plans by simulation; equal plans are simulated once."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known: dict[str, float] = {}

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step; ValueError for a plan that is invalid or does not fit."""
        key = plan_hash(plan)
        if key not in self._known:
            self._known[key] = predict(*accept(plan), self.cost).iteration_s
        return self._known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with the simulated prices of its job's machines."""

    job: str
    plan: Plan
    prices: Simulated


def plans_of(jobs: Sequence[Job]) -> list[PricedPlan]:
    """Plans of all registered strategies for all jobs, where there is one."""
    plans = []
    for job in jobs:
        prices = Simulated(cost_of(job, None, None))
        for planner in PLANNERS.values():
            try:
                plan = planner(job, prices.cost, lambda *_: None)
                prices.step_s(plan)
            except ValueError:
                continue
            plans.append(PricedPlan(job=job.name, plan=plan, prices=prices))
    return plans


def parsed(target: Target, plans: Sequence[PricedPlan]) -> dict[str, Any]:
    """Counts of tried plans, expressible ones and accepted folders of a target, and reasons for the others.

    `accepted` is null where the system's packages cannot be fetched, so that nothing was checked.
    """
    folders: list[Folder] = []
    reasons: Counter[str] = Counter()
    for one_plan in plans:
        try:
            files = export(one_plan.plan, target, one_plan.prices)
            folders.append(Folder(files=files, ranks=len(one_plan.plan.ranks)))
        except ValueError as error:
            reasons[_part(str(error), target)] += 1
    record: dict[str, Any] = {
        "tried": len(plans),
        "said": len(folders),
        "refused": sum(reasons.values()),
        "reasons": dict(reasons.most_common()),
    }
    return record | _checked(target, folders)


def _part(message: str, target: Target) -> str:
    """The part of the plan that a refusal is about, without names and details."""
    part = message.removeprefix(f"{target.name} cannot express ").split(";")[0].split(", nor any other")[0]
    return part.split(": ")[0]


def _checked(target: Target, folders: Sequence[Folder]) -> dict[str, Any]:
    if target.name not in CHECKED:
        return {"accepted": len(folders), "held_by": "its own runs in the tests"}
    packages = _packages()
    if packages is None:
        return {"accepted": None, "held_by": "nothing: the package index gives no packages"}
    answers = refusals(target.name, folders, packages)
    turned = Counter(answer for answer in answers if answer is not None)
    return {
        "accepted": answers.count(None),
        "held_by": target.system,
        "turned_down": dict(turned.most_common()),
    }


@cache
def _packages() -> Any:
    return fetched()


def megatron_losses(strategy: str) -> list[float] | None:
    """Losses of the small job's folder with megatron-core on a host; None: packages cannot be fetched."""
    job = small_job()
    prices = Simulated(cost_of(job, None, None))
    return trained_losses(PLANNERS[strategy](job, prices.cost, lambda *_: None), prices)


def trained_losses(plan: Plan, prices: Simulated) -> list[float] | None:
    """Losses of two steps of a plan's Megatron folder on a host; None: packages cannot be fetched."""
    packages = _packages()
    if packages is None:
        return None
    files = export(plan, BY_NAME["megatron"], prices)
    return trained(Folder(files=files, ranks=len(plan.ranks)), packages, steps=2)


def keys() -> dict[str, Any]:
    """The results of parsing and training."""
    plans = plans_of(export_jobs())
    return {
        KEY: {target.name: parsed(target, plans) for target in TARGETS},
        "export_megatron_losses": {name: megatron_losses(name) for name in TRAINED},
    }
