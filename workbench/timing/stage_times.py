"""Seconds of every microbatch on every stage of a replica, for algorithms that order microbatches."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.cost.model import CostModel
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, Pass
from workbench.timing.price import price

Seconds = NDArray[np.float64]


class StageTimes(NamedTuple):
    """[positions, stages] seconds along one chain: encoders in parallel, then the LLM.

    Args:
        forward_s, backward_s: of both passes.
        num_encoder_stages: how many of the columns are the encoders'.
    """

    forward_s: Seconds
    backward_s: Seconds
    num_encoder_stages: int


def stage_times(
    plan: Plan, cost: CostModel, replica: int, *, produced: Mapping[int, int], consumed: Mapping[int, int]
) -> StageTimes:
    """Price every pass of a replica, at the position of its first sample.

    Of several parallel encoders the slowest counts; they end where the LLM begins.

    Args:
        produced: sample id -> position at which the encoders run it forward.
        consumed: sample id -> position at which the LLM takes it; all of its backwards count there.
    """
    prices = price(lower(plan), cost)
    llm = plan.model.llm.name
    encoders = [module.name for module in plan.model.modules if module.name != llm]
    depth = max((len(plan.chain.get((name, replica), ())) for name in encoders), default=0)
    shape = 1 + max(consumed.values()), depth + len(plan.chain[llm, replica])
    forward, backward = np.zeros(shape), np.zeros(shape)
    for name in (*encoders, llm):
        chain = plan.chain.get((name, replica), ())
        first = depth if name == llm else depth - len(chain)
        own_times = {True: np.zeros((shape[0], len(chain))), False: np.zeros((shape[0], len(chain)))}
        column = {stage.id: index for index, stage in enumerate(chain)}
        microbatches = plan.microbatches_of.get((name, replica), ())
        for action in plan.program_actions:
            if action.kind in COMPUTE and action.stage in column:
                sample = microbatches[action.microbatch or 0].items[0].sample
                is_forward = action.kind is Pass.F
                position = (produced if is_forward and name != llm else consumed)[sample]
                own_times[is_forward][position, column[action.stage]] += prices.duration_s(action)
        for all_s, own_s in ((forward, own_times[True]), (backward, own_times[False])):
            columns = all_s[:, first : first + len(chain)]
            np.maximum(columns, own_s, out=columns)
    return StageTimes(forward, backward, depth)
