"""Messages between pipeline stages of tensor-parallel ranks: each sends its share over its own card.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 4.1
(scatter/gather): ranks that would all send the same tensor send a tp-th each, and gather it behind, inside
their node. Where tokens are split anyway (sequence parallelism), nothing is gathered.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.plan.lowered import Lowered, Route
from workbench.schedule.action import Action
from workbench.timing.price import Price
from workbench.timing.weights import WeightPrices


def scattered(lowered: Lowered, tp: int) -> Lowered:
    """The lowered plan whose messages carry a tp-th of their bytes, rounded up. O(rows)."""
    if tp == 1:
        return lowered
    transfers = tuple(
        row if row.route is Route.LOCAL else row._replace(num_bytes=-(-row.num_bytes // tp))
        for row in lowered.transfers
    )
    return replace(lowered, transfers=transfers)


def with_boundary_gathers(
    prices: Price, lowered: Lowered, cost_of: Callable[[Sequence[int]], CostModel]
) -> Price:
    """Passes that receive scattered messages, with the gather in front of them.

    Args:
        prices: of the plan.
        lowered: with scattered messages.
        cost_of: the machine that some ranks are.

    Complexity: O(rows).
    """
    weights, seconds = WeightPrices(lowered, cost_of), dict(prices.durations_s)
    for action, row_bytes in _received(lowered).items():
        ranks = lowered.plan.stage[action.stage or 0].ranks[0]
        seconds[action] += weights.collective_s(Collective.ALL_GATHER, row_bytes * len(ranks), ranks)
    return replace(prices, durations_s=seconds)


def _received(lowered: Lowered) -> dict[Action, int]:
    """Pass -> bytes of the share that its stage's first rank gets from elsewhere."""
    found: dict[Action, int] = {}
    for action, rows in lowered.inputs.items():
        first = lowered.plan.stage[action.stage or 0].flat_ranks[0]
        size = sum(_size(lowered, rows, first))
        if size:
            found[action] = size
    return found


def _size(lowered: Lowered, rows: Iterable[int], rank: int) -> Iterable[int]:
    for place in rows:
        row = lowered.transfers[place]
        if row.route is not Route.LOCAL and rank in row.destination_ranks:
            yield row.num_bytes
