"""Degrees of expert parallelism that a search tries in place of tensor parallelism inside experts.

Source: Z. Zhang et al., "DistTrain", sections 4.1 and 4.3: what is said of tensor parallelism holds for
expert parallelism in its place. Differs: attention stays cut by the same ranks; only experts are distributed.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from workbench.balance.orchestration.expert_degrees import expert_degrees
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.model.experts import num_experts
from workbench.model.model_graph import Module
from workbench.planner.layout_choice import ModuleChoice, on_tensor_ranks
from workbench.planner.module_price import ModulePrices


def expert_counts(module: Module) -> tuple[int, ...]:
    """Distinct numbers of experts of the module's mixtures, ascending; empty for a dense module.

    Complexity: O(operators).
    """
    return tuple(sorted({num_experts(layer) for layer in module.layers} - {0}))


def expert_choices(counts: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Degrees that a search tries in a stage of tp x cp ranks: all that divide `num_ranks` and every count.

    Complexity: O(ranks).
    """
    if not counts:
        return (1,)
    return expert_degrees(num_ranks, gcd(*counts))


def joint_choices(counts: Sequence[int], tp: int, dp: int) -> tuple[int, ...]:
    """Degrees beyond tp that a search tries: those that join a divisor of `dp` replicas without cp.

    Complexity: O(ranks); O(1) for a dense module.
    """
    if not counts:
        return ()
    return tuple(ep for ep in expert_degrees(tp * dp, gcd(*counts)) if ep > tp and ep % tp == 0)


def fastest_degree(prices: ModulePrices, choice: ModuleChoice) -> int:
    """The faster degree of 1 and tp, by the module's passes over one sample; 1 among equals.

    A rank holds equally many expert parameters under both.
    """
    counts = expert_counts(prices.job.model.module(choice.module))
    degrees = {1, choice.tp} & set(expert_choices(counts, choice.tp))
    return min(degrees, key=lambda ep: (prices.passes_s(replace(choice, ep=ep), 1), ep))


def with_fastest_degrees(job: Job, cost: CostModel) -> Job:
    """The job with ep = 1 or ep = tp in every layout, whichever is faster."""
    prices = ModulePrices(job, cost)
    layouts = []
    for layout in job.layouts:
        choice = on_tensor_ranks(job.settings.of(layout.module), layout.tp)
        layouts.append(replace(layout, ep=fastest_degree(prices, choice)))
    return replace(job, layouts=tuple(layouts))
