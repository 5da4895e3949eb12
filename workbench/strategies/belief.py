"""What a planner believes of backward passes, and so what it balances."""

from collections.abc import Callable
from dataclasses import dataclass

from workbench.cost.model import CostModel
from workbench.plan.critical_path import critical_path_s
from workbench.plan.lowered import Lowered
from workbench.plan.price import price
from workbench.schedule.action import COMPUTE, Action, Pass
from workbench.strategies.layer_cost import LayerCost


@dataclass(frozen=True, slots=True)
class Belief:
    """How long a layer takes over one microbatch, and how long a plan takes."""

    layer_s: Callable[[LayerCost], float]
    plan_s: Callable[[Lowered, CostModel], float]


def _aware_s(lowered: Lowered, cost: CostModel) -> float:
    return critical_path_s(lowered, price(lowered, cost).duration_s)


def _unaware_s(lowered: Lowered, cost: CostModel) -> float:
    prices = price(lowered, cost)
    actions = lowered.plan.program_actions

    def believed_s(action: Action) -> float:
        if action.kind not in COMPUTE:
            return 0.0
        forward_s = prices.duration_s(action._replace(kind=Pass.F))
        rest = {action._replace(kind=kind) for kind in (Pass.B, Pass.I, Pass.W)} & actions.keys()
        if action.kind is Pass.F:
            return forward_s if rest else 3 * forward_s
        return 2 * forward_s / len(rest)

    return critical_path_s(lowered, believed_s)


FROZEN_AWARE = Belief(lambda layer: layer.total_s, _aware_s)
"""The gradients that really run. Source: Cornstarch (ICML) section 3.1."""

FROZEN_UNAWARE = Belief(lambda layer: 3 * layer.forward_s, _unaware_s)
"""Every backward takes twice its forward, also where none runs.
Source: Cornstarch v1 section 6.1, the baselines, which balance forward times."""
