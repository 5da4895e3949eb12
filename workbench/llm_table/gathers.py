"""Updated weights gathered beside the next iteration's first forward."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.plan.lowered import Lowered
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.schedule.action import Pass
from workbench.timing.price import Price
from workbench.timing.weights import WeightPrices


def with_gathers_beside(
    prices: Price, lowered: Lowered, cost_of: Callable[[Sequence[int]], CostModel]
) -> Price:
    """Steps without what their gathers can do beside the first forward of their rank's other stages.

    Stages are buckets: the first one's weights are waited for, the others' travel while those before
    them compute (Megatron-Core, `overlap_param_gather`).
    """
    weights = WeightPrices(lowered, cost_of)
    gathers_s = dict.fromkeys(prices.steps_s, 0.0)
    for group in lowered.groups:
        instance = optimizer_shards(lowered.plan, group).instances[0]
        num_bytes = group.num_elements * lowered.plan.settings.precision.num_bytes
        seconds = weights.collective_s(Collective.ALL_GATHER, num_bytes, instance)
        for rank in gathers_s.keys() & set(group.ranks):
            gathers_s[rank] += seconds
    steps_s = {
        rank: step_s - min(gathers_s[rank], _room_s(prices, lowered, rank))
        for rank, step_s in prices.steps_s.items()
    }
    return replace(prices, steps_s=steps_s)


def _room_s(prices: Price, lowered: Lowered, rank: int) -> float:
    """Of the rank's first forwards, as many as it has stages, all but the first."""
    actions = lowered.plan.program[rank]
    forwards = [prices.durations_s[a] for a in actions if a.kind is Pass.F and a.microbatch == 0]
    num = len(forwards)
    return sum(forwards) * (num - 1) / num if num else 0.0
