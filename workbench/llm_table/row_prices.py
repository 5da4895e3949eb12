"""Prices of a row's plan, with the gathers of its training system at stage boundaries and beside forwards.

Messages between pipeline stages of tensor-parallel ranks: each rank sends its share over its own card.
Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 4.1
(scatter/gather): ranks that would all send the same tensor send a tp-th each, and the receivers gather it
inside their node. With sequence parallelism, tokens are split already and nothing is gathered.
"""

from collections.abc import Iterable
from dataclasses import replace

from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.llm_table.llm_row import DataOverlap, LlmRow
from workbench.llm_table.row_model import MODULE
from workbench.plan.lowered import Lowered, Route
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.schedule.action import Action, Pass
from workbench.timing.price import Price, price
from workbench.timing.weights import WeightPrices


def prices_of(whole: Lowered, row: LlmRow, cost: CostModel) -> Price:
    """Prices of the lowered plan that stands for all replicas."""
    prices = price(whole, cost)
    if row.tp > 1 and row.pp > 1 and not whole.plan.settings.divides_tokens(MODULE):
        prices = _with_boundary_gathers(prices, whole, cost)
    if row.dp_overlap is DataOverlap.BOTH and row.zero_stage in (1, 2):
        prices = _with_gathers_beside(prices, whole, cost)
    return prices


def scattered(lowered: Lowered, tp: int) -> Lowered:
    """The lowered plan with messages of a tp-th of their bytes, rounded up. O(rows)."""
    if tp == 1:
        return lowered
    transfers = tuple(
        row if row.route is Route.LOCAL else row._replace(num_bytes=-(-row.num_bytes // tp))
        for row in lowered.transfers
    )
    return replace(lowered, transfers=transfers)


def _with_boundary_gathers(prices: Price, lowered: Lowered, cost: CostModel) -> Price:
    """Add the all-gather to passes that receive scattered messages.

    Args:
        prices: of the plan.
        lowered: with scattered messages.
        cost: model of the machine.

    Complexity: O(rows).
    """
    weights, seconds = WeightPrices(lowered, lambda ranks: cost), dict(prices.durations_s)
    for action, row_bytes in _received(lowered).items():
        ranks = lowered.plan.stage[action.stage or 0].ranks[0]
        seconds[action] += weights.collective_s(Collective.ALL_GATHER, row_bytes * len(ranks), ranks)
    return replace(prices, durations_s=seconds)


def _received(lowered: Lowered) -> dict[Action, int]:
    """Pass -> bytes that its stage's first rank receives from elsewhere."""
    received: dict[Action, int] = {}
    for action, rows in lowered.inputs.items():
        first = lowered.plan.stage[action.stage or 0].flat_ranks[0]
        size = sum(_size(lowered, rows, first))
        if size:
            received[action] = size
    return received


def _size(lowered: Lowered, rows: Iterable[int], rank: int) -> Iterable[int]:
    for index in rows:
        row = lowered.transfers[index]
        if row.route is not Route.LOCAL and rank in row.destination_ranks:
            yield row.num_bytes


def _with_gathers_beside(prices: Price, lowered: Lowered, cost: CostModel) -> Price:
    """Reduce steps by the gathers that overlap the first forwards of their rank's other stages.

    Stages are buckets: the first one's weights are exposed, the others are gathered while earlier ones
    compute (Megatron-Core, `overlap_param_gather`).
    """
    weights = WeightPrices(lowered, lambda ranks: cost)
    gathers_s = dict.fromkeys(prices.steps_s, 0.0)
    for group in lowered.groups:
        instance = optimizer_shards(lowered.plan, group).instances[0]
        num_bytes = group.num_elements * lowered.plan.settings.precision.num_bytes
        seconds = weights.collective_s(Collective.ALL_GATHER, num_bytes, instance)
        for rank in gathers_s.keys() & set(group.ranks):
            gathers_s[rank] += seconds
    steps_s = {
        rank: step_s - min(gathers_s[rank], _overlap_s(prices, lowered, rank))
        for rank, step_s in prices.steps_s.items()
    }
    return replace(prices, steps_s=steps_s)


def _overlap_s(prices: Price, lowered: Lowered, rank: int) -> float:
    """Seconds of the rank's first forwards, one per stage, all but the first."""
    actions = lowered.plan.program[rank]
    forwards = [prices.durations_s[a] for a in actions if a.kind is Pass.F and a.microbatch == 0]
    num = len(forwards)
    return float_sum(forwards) * (num - 1) / num if num else 0.0
