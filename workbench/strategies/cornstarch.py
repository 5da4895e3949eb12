"""Cornstarch: every module on ranks of its own, stages balanced by forward plus backward.

Source: Cornstarch v1 section 4.1 (modality parallelism) and 4.2, ICML section 3.1 and 4.1
(frozen-status-aware partitioning, Eq. 1-6).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.graph.frozen import FrozenRule
from workbench.job import Job
from workbench.plan.build import with_programs
from workbench.plan.plan import Plan
from workbench.strategies.assembly import cut, disjoint_stages, draft_plan, layout_of
from workbench.strategies.layer_cost import LayerCost, layer_costs
from workbench.strategies.stage_counts import Progress, fastest_counts, silent

Balanced = Callable[[LayerCost], float]


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Frozen-aware: T_l = F_l + B_l, where B_l counts the gradients that really run.

    Stage counts that the job leaves open are searched under its rank budget.

    Raises:
        ValueError: more stages than layers, a batch that does not divide, too few ranks.
    """
    return _plan(job, cost, "cornstarch", lambda layer: layer.total_s, progress)


def plan_frozen_unaware(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The same with stages balanced by forward time, as if every backward were twice that.

    Source: Cornstarch v1 section 6.1 (baseline) and 6.4.
    """
    return _plan(job, cost, "cornstarch-frozen-unaware", lambda layer: layer.forward_s, progress)


def _plan(job: Job, cost: CostModel, name: str, balanced: Balanced, progress: Progress) -> Plan:
    draft = draft_plan(job, name)
    weights = {
        module.name: [
            balanced(layer)
            for layer in layer_costs(job, draft, layout_of(job, module.name), cost, FrozenRule.EXACT)
        ]
        for module in job.model.modules
    }

    def with_counts(counts: Mapping[str, int]) -> Plan:
        cuts = {module: cut(weights[module], num_stages, module) for module, num_stages in counts.items()}
        return with_programs(replace(draft, stages=disjoint_stages(job, cuts)))

    ranks_per_stage = {name: layout_of(job, name).tp * layout_of(job, name).cp for name in weights}
    return fastest_counts(job, cost, ranks_per_stage, with_counts, progress)
