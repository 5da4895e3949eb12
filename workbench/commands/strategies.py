"""Strategies by the names users type."""

from enum import StrEnum

from workbench.search.drive import Planner
from workbench.strategies import (
    auto_cornstarch,
    auto_islands,
    colocated,
    cornstarch,
    dip,
    disttrain,
    encoders_colocated,
    encoders_replicated,
    entrain,
    entrain_graded,
    entrain_search,
    fsdp,
    megatron_heterogeneous,
    megatron_homogeneous,
    reordered,
)


class Strategy(StrEnum):
    """Strategies by the names users type."""

    CORNSTARCH = "cornstarch"
    CORNSTARCH_LOOSELY_COUPLED = "cornstarch-loosely-coupled"
    CORNSTARCH_FROZEN_UNAWARE = "cornstarch-frozen-unaware"
    ENCODERS_COLOCATED = "encoders-colocated"
    ENCODERS_COLOCATED_FROZEN_AWARE = "encoders-colocated-frozen-aware"
    ENCODERS_REPLICATED = "encoders-replicated"
    DIP = "dip"
    ENTRAIN = "entrain"
    ENTRAIN_GRADED = "entrain-graded"
    ENTRAIN_SEARCH = "entrain-search"
    DISTTRAIN = "disttrain"
    DISTTRAIN_CHEAPEST = "disttrain-cheapest"
    DISTTRAIN_REORDERED = "disttrain-reordered"
    REORDERED_BY_EXCHANGES = "reordered-by-exchanges"
    MEGATRON_HETEROGENEOUS = "megatron-heterogeneous"
    MEGATRON_HOMOGENEOUS = "megatron-homogeneous"
    MEGATRON_COLOCATED = "megatron-colocated"
    MEGATRON_ISLANDS = "megatron-islands"
    FSDP = "fsdp"
    HSDP = "hsdp"


PLANNERS: dict[str, Planner] = {
    Strategy.CORNSTARCH: cornstarch.plan,
    Strategy.CORNSTARCH_LOOSELY_COUPLED: auto_cornstarch.plan,
    Strategy.CORNSTARCH_FROZEN_UNAWARE: cornstarch.plan_frozen_unaware,
    Strategy.ENCODERS_COLOCATED: encoders_colocated.plan,
    Strategy.ENCODERS_COLOCATED_FROZEN_AWARE: encoders_colocated.plan_frozen_aware,
    Strategy.ENCODERS_REPLICATED: encoders_replicated.plan,
    Strategy.DIP: dip.plan,
    Strategy.ENTRAIN: entrain.plan,
    Strategy.ENTRAIN_GRADED: entrain_graded.plan,
    Strategy.ENTRAIN_SEARCH: entrain_search.plan,
    Strategy.DISTTRAIN: disttrain.plan,
    Strategy.DISTTRAIN_REORDERED: reordered.plan,
    Strategy.REORDERED_BY_EXCHANGES: reordered.plan_by_exchanges,
    Strategy.MEGATRON_HETEROGENEOUS: megatron_heterogeneous.plan,
    Strategy.MEGATRON_HOMOGENEOUS: megatron_homogeneous.plan,
    Strategy.MEGATRON_COLOCATED: colocated.plan,
    Strategy.MEGATRON_ISLANDS: auto_islands.plan,
    Strategy.FSDP: fsdp.plan,
    Strategy.HSDP: fsdp.plan_hybrid,
}

PRICED: dict[str, Planner] = {Strategy.DISTTRAIN_CHEAPEST: disttrain.plan_cheapest}
"""Planners of jobs whose ranks have a price."""
