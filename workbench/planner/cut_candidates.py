"""Plans whose modules are each cut into balanced stages: what stage-count search chooses from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan, Stage
from workbench.planner.assembly import (
    blocks_cut,
    bottleneck_s,
    num_microbatches,
    scheduled,
    virtual_stages,
)
from workbench.planner.block_cuts import Cuts
from workbench.planner.planner_cost import Belief
from workbench.planner.stage_bounds import StageBounds


@dataclass(frozen=True)
class CutCandidates:
    """Every module cut by what a planner believes of its layers.

    Args:
        draft: the plan without stages.
        layers_s: module -> believed seconds of each layer over a microbatch.
        entry_of: module -> the entry of the counts that holds for it.
        stages_of: gives the cut modules their ranks.
    """

    job: Job
    draft: Plan
    cost: CostModel
    belief: Belief
    layers_s: Mapping[str, tuple[float, ...]]
    entry_of: Mapping[str, str]
    stages_of: Callable[[Job, Mapping[str, Cuts]], tuple[Stage, ...]]

    def bound_s(self, counts: Mapping[str, int]) -> float:
        """The slowest ranks of a module over all its microbatches; modules that share ranks are not added.

        Nothing where the cluster has several kinds of devices: where stages lie is not known yet.
        """
        if len({node.device for node in self.job.cluster.nodes}) > 1:
            return 0.0
        schedule = self.job.schedule
        return max(
            bottleneck_s(self.layers_s[module], cuts, schedule, virtual_stages(self.job, module))
            * num_microbatches(self.draft, module)
            for module, cuts in self._cuts(counts).items()
        )

    def closer_s(self, counts: Mapping[str, int]) -> tuple[float, Plan]:
        """By what stands ahead of and behind each stage's passes, on its own device."""
        draft = self._draft_of(counts)
        return self.bounds.seconds(draft), draft

    def check_memory(self, counts: Mapping[str, int]) -> None:
        self.bounds.check_memory(self._draft_of(counts))

    def plan(self, counts: Mapping[str, int]) -> Plan:
        return scheduled(self._draft_of(counts), self.job.schedule, self.cost)

    def believed_s(self, lowered: Lowered) -> float:
        return self.belief.plan_s(lowered, self.cost)

    def _draft_of(self, counts: Mapping[str, int]) -> Plan:
        return replace(self.draft, stages=self.stages_of(self.job, self._cuts(counts)))

    @cached_property
    def bounds(self) -> StageBounds:
        """Of all counts' plans."""
        return StageBounds(self.draft, self.cost, self.belief, self.job.schedule)

    def _cuts(self, counts: Mapping[str, int]) -> dict[str, Cuts]:
        return {
            m: blocks_cut(self.job, self.layers_s[m], counts[entry], m) for m, entry in self.entry_of.items()
        }
