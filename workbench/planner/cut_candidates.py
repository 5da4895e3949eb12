"""Candidates of the stage-count search: plans whose modules are each cut into balanced stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import (
    blocks_cut,
    bottleneck_s,
    layout_of,
    num_microbatches,
    scheduled,
    virtual_stages,
)
from workbench.planner.block_cuts import Cuts
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.planner_cost import PlannerCost
from workbench.planner.stage_bounds import StageBounds

Counts = Mapping[str, int]


@dataclass(frozen=True)
class CutCandidates:
    """Turns stage counts into plans: modules are cut by the planner's cost of their layers.

    Args:
        draft: the plan without stages.
        planner_cost: the planner's estimates for layers and plans.
        stages_of: assigns ranks to the cut modules.
        entry_of: module -> the entry of the counts that applies to it; None: each has its own.
        microbatches_of: counts -> microbatches; None: the draft's, whatever the counts.
        finished: applied to a plan with programs; None: nothing.
    """

    job: Job
    draft: Plan
    cost: CostModel
    planner_cost: PlannerCost
    stages_of: Callable[[Job, Mapping[str, Cuts]], tuple[Stage, ...]]
    entry_of: Mapping[str, str] | None = None
    microbatches_of: Callable[[Counts], tuple[Microbatch, ...]] | None = None
    finished: Callable[[Plan], Plan] | None = None

    @cached_property
    def entries(self) -> Mapping[str, str]:
        """Module -> its entry in the counts."""
        return self.entry_of or {module.name: module.name for module in self.job.model.modules}

    @cached_property
    def ranks_per_stage(self) -> Mapping[str, int]:
        """Entry -> ranks of one stage of one replica."""
        layouts = {entry: layout_of(self.job, module) for module, entry in self.entries.items()}
        return {entry: layout.stage_ranks for entry, layout in layouts.items()}

    @cached_property
    def layers_s(self) -> Mapping[str, tuple[float, ...]]:
        """Module -> estimated seconds of each layer over a microbatch."""
        seconds_of = believed_layers_s(self.job, self.draft, self.cost, self.planner_cost.layer_s)
        return {module: seconds_of[module] for module in self.entries}

    @cached_property
    def bounds(self) -> StageBounds:
        """Bounds on the plans of all counts."""
        return StageBounds(self.draft, self.cost, self.planner_cost, self.job.schedule)

    def bound_s(self, counts: Counts) -> float:
        """A cheap lower bound, by the planner's estimate, on the seconds of every plan of these counts.

        The slowest ranks of a module over all its microbatches; modules that share ranks are not added up.
        0 where the cluster has several kinds of devices, since stages have no ranks yet.
        """
        if len({node.device for node in self.job.cluster.nodes}) > 1:
            return 0.0
        schedule = self.job.schedule
        return max(
            bottleneck_s(self.layers_s[module], cuts, schedule, virtual_stages(self.job, module))
            * num_microbatches(self.draft, module)
            for module, cuts in self._cuts(counts).items()
        )

    def closer_s(self, counts: Counts) -> tuple[float, Plan]:
        """A tighter, more expensive bound, and the draft with stages.

        It adds what precedes and follows each stage's passes, on the stage's own device.

        Raises:
            ValueError: no plan of these counts is sound.
        """
        draft = self._draft_of(counts)
        return self.bounds.seconds(draft), draft

    def check_memory(self, counts: Counts) -> None:
        """Raise ValueError where stages alone show that no plan of these counts fits in memory."""
        self.bounds.check_memory(self._draft_of(counts))

    def plan(self, counts: Counts) -> Plan:
        """The plan of these counts; ValueError where there is none."""
        plan = scheduled(self._draft_of(counts), self.job.schedule, self.cost)
        return plan if self.finished is None else self.finished(plan)

    def believed_s(self, lowered: Lowered) -> float:
        """The planner's estimate of a plan's seconds."""
        return self.planner_cost.plan_s(lowered, self.cost)

    def _draft_of(self, counts: Counts) -> Plan:
        draft = replace(self.draft, stages=self.stages_of(self.job, self._cuts(counts)))
        if self.microbatches_of is None:
            return draft
        return replace(draft, microbatches=self.microbatches_of(counts))

    def _cuts(self, counts: Counts) -> dict[str, Cuts]:
        return {
            m: blocks_cut(self.job, self.layers_s[m], counts[entry], m) for m, entry in self.entries.items()
        }
