"""A planner's estimate of backward passes, which determines what it balances."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.arrays import Flags
from workbench.cost.model import CostModel
from workbench.plan.lowered import Lowered
from workbench.planner.layer_cost import LayerCost
from workbench.schedule.action import COMPUTE, Action, Pass
from workbench.timing.critical_path import critical_path_s
from workbench.timing.price import price
from workbench.timing.stage_seconds import Seconds


@dataclass(frozen=True, slots=True)
class PlannerCost:
    """A planner's estimates of seconds.

    Args:
        layer_s: seconds of a layer over one microbatch.
        plan_s: seconds of a plan.
        passes_s: true forward and backward seconds of stages, and which have a backward -> estimated ones.
    """

    layer_s: Callable[[LayerCost], float]
    plan_s: Callable[[Lowered, CostModel], float]
    passes_s: Callable[[Seconds, Seconds, Flags], tuple[Seconds, Seconds]]


def _aware_passes_s(forward_s: Seconds, backward_s: Seconds, has: Flags) -> tuple[Seconds, Seconds]:
    return forward_s, np.where(has, backward_s, 0.0)


def _unaware_passes_s(forward_s: Seconds, backward_s: Seconds, has: Flags) -> tuple[Seconds, Seconds]:
    return np.where(has, forward_s, 3 * forward_s), np.where(has, 2 * forward_s, 0.0)


def _aware_s(lowered: Lowered, cost: CostModel) -> float:
    return critical_path_s(lowered, price(lowered, cost).duration_s)


def _unaware_s(lowered: Lowered, cost: CostModel) -> float:
    prices = price(lowered, cost)
    actions = lowered.plan.program_actions

    def believed_s(action: Action) -> float:
        if action.kind not in COMPUTE:
            return 0.0
        forward_s = prices.duration_s(action._replace(kind=Pass.F))
        backwards = {action._replace(kind=kind) for kind in (Pass.B, Pass.I, Pass.W)} & actions.keys()
        if action.kind is Pass.F:
            return forward_s if backwards else 3 * forward_s
        return 2 * forward_s / len(backwards)

    return critical_path_s(lowered, believed_s)


FROZEN_AWARE = PlannerCost(lambda layer: layer.total_s, _aware_s, _aware_passes_s)
"""Counts the gradients that really run. Source: Cornstarch (ICML) section 3.1."""

FROZEN_UNAWARE = PlannerCost(lambda layer: 3 * layer.forward_s, _unaware_s, _unaware_passes_s)
"""Assumes that every backward takes twice its forward, even where none runs.
Source: Cornstarch v1 section 6.1, the baselines, which balance forward times."""
