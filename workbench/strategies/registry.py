"""All strategies in the order in which they are listed, one line each; everything else is in their own
files.
"""

from workbench.planner.strategy_spec import Planner, StrategySpec
from workbench.strategies import (
    auto_cornstarch,
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

STRATEGIES: tuple[StrategySpec, ...] = (
    cornstarch.SPEC,
    auto_cornstarch.SPEC,
    cornstarch.SPEC_FROZEN_UNAWARE,
    encoders_colocated.SPEC,
    encoders_colocated.SPEC_FROZEN_AWARE,
    encoders_replicated.SPEC,
    dip.SPEC,
    entrain.SPEC,
    entrain_graded.SPEC,
    entrain_search.SPEC,
    disttrain.SPEC,
    disttrain.SPEC_CHEAPEST,
    reordered.SPEC,
    reordered.SPEC_BY_EXCHANGES,
    megatron_heterogeneous.SPEC,
    megatron_homogeneous.SPEC,
    megatron_heterogeneous.SPEC_COLOCATED,
    megatron_heterogeneous.SPEC_ISLANDS,
    fsdp.SPEC,
    fsdp.SPEC_HYBRID,
)

BY_NAME: dict[str, StrategySpec] = {spec.name: spec for spec in STRATEGIES}

PLANNERS: dict[str, Planner] = {spec.name: spec.planner for spec in STRATEGIES if not spec.wants_prices}

PRICED: dict[str, Planner] = {spec.name: spec.planner for spec in STRATEGIES if spec.wants_prices}
"""Planners for jobs whose ranks have a price."""
