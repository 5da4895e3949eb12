"""A plan's step explained: where its time goes, what would shorten it, and what it is sensitive to."""

from dataclasses import dataclass

from workbench.cost.model import CostModel
from workbench.explain.changes import Changes
from workbench.explain.critical_path import COMPUTE, path_of
from workbench.explain.idle import IdleSeconds, idle_by_cause, idle_of
from workbench.explain.pass_parts import CauseSeconds, Parts, PricesOf, parts_of, path_causes
from workbench.explain.sensitivity import Sensitivity
from workbench.explain.timeline import timeline
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import MEANING, Activity
from workbench.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where a step's time goes.

    Args:
        path: the critical path by cause, most first; adds up to the step.
        idle: idle time of the mean rank by cause, most first; adds up to the step minus its compute time.
        num_steps: on the critical path.
    """

    path: tuple[CauseSeconds, ...]
    idle: tuple[IdleSeconds, ...]
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The content of `workbench explain`.

    Args:
        plan: to explain.
        trace: its simulated step.
        account: where the step's time goes.
        changes: those that were tried; None: none could be.
        refusal: why none could be tried, or a caveat about those that were; "": nothing.
        sensitivities: the widest first.
    """

    plan: Plan
    trace: Trace
    account: Account
    changes: Changes | None
    refusal: str
    sensitivities: tuple[Sensitivity, ...]


def account_of(lowered: Lowered, trace: Trace, cost: CostModel, prices_of: PricesOf) -> Account:
    """Where the time of a simulated step goes.

    Args:
        cost: model of the machine it was simulated on.
        prices_of: prices it as the simulation did.
    """
    times = timeline(lowered, trace)
    path = path_of(times)
    actions = {step.action for step in path if step.cause in COMPUTE and step.action is not None}
    parts = parts_of(lowered, cost, prices_of, actions)
    return Account(
        path=path_causes(path, parts),
        idle=idle_by_cause(lowered.plan, idle_of(times, trace)),
        num_steps=len(path),
    )


def parts_of_all(lowered: Lowered, cost: CostModel, prices_of: PricesOf) -> Parts:
    """Split every pass and STEP of the plan, see `parts_of`."""
    passes = (
        each for each in lowered.plan.program_actions if MEANING[each.kind].activity is Activity.COMPUTE
    )
    return parts_of(lowered, cost, prices_of, passes)
