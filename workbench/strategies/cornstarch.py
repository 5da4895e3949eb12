"""Cornstarch: every module on ranks of its own, stages balanced by forward plus backward.

Source: Cornstarch v1 section 4.1 (modality parallelism) and 4.2, ICML section 3.1 and 4.1
(frozen-status-aware partitioning, Eq. 1-6).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.job import Job
from workbench.plan.build import with_programs
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.strategies.assembly import (
    Cuts,
    bottleneck_s,
    cut,
    disjoint_stages,
    draft_plan,
    layout_of,
    num_microbatches,
)
from workbench.strategies.belief import FROZEN_AWARE, FROZEN_UNAWARE, Belief
from workbench.strategies.layer_cost import believed_layers_s
from workbench.strategies.stage_counts import Progress, fastest_counts, silent


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Frozen-aware: T_l = F_l + B_l, where B_l counts the gradients that really run.

    Stage counts that the job leaves open are searched under its rank budget.

    Raises:
        ValueError: more stages than layers, a batch that does not divide, too few ranks.
    """
    return _plan(job, cost, "cornstarch", FROZEN_AWARE, progress)


def plan_frozen_unaware(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The same with stages balanced, and counted, as if every backward took twice its forward.

    Source: Cornstarch v1 section 6.1 (baseline) and 6.4.
    """
    return _plan(job, cost, "cornstarch-frozen-unaware", FROZEN_UNAWARE, progress)


def _plan(job: Job, cost: CostModel, name: str, belief: Belief, progress: Progress) -> Plan:
    draft = draft_plan(job, name)
    layers_s = believed_layers_s(job, draft, cost, belief.layer_s)
    ranks_per_stage = {module: layout_of(job, module).tp * layout_of(job, module).cp for module in layers_s}
    return fastest_counts(job, ranks_per_stage, _Candidates(job, draft, cost, belief, layers_s), progress)


@dataclass(frozen=True, slots=True)
class _Candidates:
    job: Job
    draft: Plan
    cost: CostModel
    belief: Belief
    layers_s: Mapping[str, tuple[float, ...]]

    def bound_s(self, counts: Mapping[str, int]) -> float:
        """The slowest stage over all its microbatches."""
        return max(
            bottleneck_s(self.layers_s[module], cuts) * num_microbatches(self.draft, module)
            for module, cuts in self._cuts(counts).items()
        )

    def plan(self, counts: Mapping[str, int]) -> Plan:
        return with_programs(replace(self.draft, stages=disjoint_stages(self.job, self._cuts(counts))))

    def believed_s(self, lowered: Lowered) -> float:
        return self.belief.plan_s(lowered, self.cost)

    def _cuts(self, counts: Mapping[str, int]) -> dict[str, Cuts]:
        return {module: cut(self.layers_s[module], count, module) for module, count in counts.items()}
