"""Plans whose modules are each cut into balanced stages: what stage-count search chooses from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Microbatch, Plan, Stage
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
    """Modules cut by what a planner believes of their layers: how stage counts become plans.

    Args:
        draft: the plan without stages.
        planner_cost: of layers and plans.
        stages_of: gives the cut modules their ranks.
        entry_of: module that is cut -> the entry of the counts that holds for it; None: each has its own.
        microbatches_of: the draft's where counts decide them; None: they do not.
        finished: what is done to a plan with programs; None: nothing.
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
        """Module -> its entry."""
        return self.entry_of or {module.name: module.name for module in self.job.model.modules}

    @cached_property
    def ranks_per_stage(self) -> Mapping[str, int]:
        """Entry -> ranks that one replica's stage takes."""
        layouts = {entry: layout_of(self.job, module) for module, entry in self.entries.items()}
        return {entry: layout.tp * layout.cp for entry, layout in layouts.items()}

    @cached_property
    def layers_s(self) -> Mapping[str, tuple[float, ...]]:
        """Module -> believed seconds of each layer over a microbatch."""
        found = believed_layers_s(self.job, self.draft, self.cost, self.planner_cost.layer_s)
        return {module: found[module] for module in self.entries}

    @cached_property
    def bounds(self) -> StageBounds:
        """Of all counts' plans."""
        return StageBounds(self.draft, self.cost, self.planner_cost, self.job.schedule)

    def bound_s(self, counts: Counts) -> float:
        """Seconds that no plan of these counts is believed to beat.

        The slowest ranks of a module over all its microbatches; modules that share ranks are not added.
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

    def closer_s(self, counts: Counts) -> tuple[float, Plan]:
        """The same, closer and dearer, with the stages; ValueError where no plan of these counts is sound.

        By what stands ahead of and behind each stage's passes, on its own device.
        """
        draft = self._draft_of(counts)
        return self.bounds.seconds(draft), draft

    def check_memory(self, counts: Counts) -> None:
        """ValueError where no plan of these counts fits, as far as that is told without one."""
        self.bounds.check_memory(self._draft_of(counts))

    def plan(self, counts: Counts) -> Plan:
        """The plan of these counts; ValueError when there is none."""
        found = scheduled(self._draft_of(counts), self.job.schedule, self.cost)
        return found if self.finished is None else self.finished(found)

    def believed_s(self, lowered: Lowered) -> float:
        """The planner's own estimate of a plan."""
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
