"""Encoders replicated: the LLM is cut into stages and every stage's ranks hold all encoders whole.

Source: Cornstarch v1 section 2.2, Figures 1b and 2a (Llama 3's multimodal training), and the
baseline of section 6.1.
Differs: the copy that the LLM reads is the first stage's; the other copies do their forwards,
as the figure shows, but nobody asks them for gradients. A copy runs as soon as its rank is
free, while in the figure it waits for its LLM stage's input as if the two were one box.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.notations.cornstarch import EncoderPlacing
from workbench.model.model_graph import TEXT
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.planner.assembly import (
    blocks_cut,
    bottleneck_s,
    check_ranks,
    draft_plan,
    layout_of,
    module_stages,
    num_microbatches,
    num_ranks,
    scheduled,
    virtual_stages,
)
from workbench.planner.block_cuts import Cuts
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.own_space import Chooser, OwnSpace
from workbench.planner.planner_cost import FROZEN_UNAWARE
from workbench.planner.stage_bounds import StageBounds
from workbench.planner.stage_counts import Progress, best_counts, silent
from workbench.planner.strategy_spec import StrategySpec


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """LLM stages balanced by forward time; all encoders on each of them."""
    return shortlist(job, cost, progress, 1)[0]


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The best by the estimate of `plan`."""
    draft = draft_plan(job, "encoders-replicated")
    llm = next(module.name for module in job.model.modules if module.modality == TEXT)
    llm_s = believed_layers_s(job, draft, cost, FROZEN_UNAWARE.layer_s)[llm]
    layout = layout_of(job, llm)
    bounds = StageBounds(draft, cost, FROZEN_UNAWARE, job.schedule)
    candidates = _Candidates(job, draft, cost, llm, llm_s, bounds)
    return best_counts(job, {llm: layout.tp * layout.cp}, candidates, progress, most)


@dataclass(frozen=True, slots=True)
class _Candidates:
    job: Job
    draft: Plan
    cost: CostModel
    llm: str
    llm_s: tuple[float, ...]
    bounds: StageBounds

    def bound_s(self, counts: Mapping[str, int]) -> float:
        """The slowest LLM stage over all its microbatches where devices are alike; encoders come on top."""
        if len({node.device for node in self.job.cluster.nodes}) > 1:
            return 0.0
        cuts, virtual = self._cuts(counts), virtual_stages(self.job, self.llm)
        slowest_s = bottleneck_s(self.llm_s, cuts, self.job.schedule, virtual)
        return slowest_s * num_microbatches(self.draft, self.llm)

    def closer_s(self, counts: Mapping[str, int]) -> tuple[float, Plan]:
        """With the encoders, on each stage's own device."""
        draft = self._draft_of(counts)
        return self.bounds.seconds(draft), draft

    def check_memory(self, counts: Mapping[str, int]) -> None:
        self.bounds.check_memory(self._draft_of(counts))

    def plan(self, counts: Mapping[str, int]) -> Plan:
        return scheduled(self._draft_of(counts), self.job.schedule, self.cost)

    def _draft_of(self, counts: Mapping[str, int]) -> Plan:
        stages = _stages(self.job, self.llm, self._cuts(counts))
        microbatches = _copied(self.draft, self.llm, counts[self.llm])
        return replace(self.draft, stages=stages, microbatches=microbatches)

    def _cuts(self, counts: Mapping[str, int]) -> Cuts:
        return blocks_cut(self.job, self.llm_s, counts[self.llm], self.llm)

    def believed_s(self, lowered: Lowered) -> float:
        return FROZEN_UNAWARE.plan_s(lowered, self.cost)


def _stages(job: Job, llm: str, cuts: Cuts) -> tuple[Stage, ...]:
    """On every block of LLM ranks: one whole copy of each encoder, a replica of its own."""
    stages: list[Stage] = []
    first_rank = 0
    for replica in range(job.replicas):
        mine = module_stages(job, llm, cuts, replica=replica, first_id=0, first_rank=first_rank)
        blocks = list(dict.fromkeys(stage.ranks for stage in mine))
        for position, ranks in enumerate(blocks):
            for module in job.model.modules:
                if module.name == llm:
                    held = [stage for stage in mine if stage.ranks == ranks]
                    stages += [replace(stage, id=len(stages) + n) for n, stage in enumerate(held)]
                    continue
                stages.append(
                    Stage(
                        id=len(stages),
                        module=module.name,
                        replica=replica * len(blocks) + position,
                        layers=(0, len(module.layers)),
                        ranks=ranks,
                    )
                )
        first_rank += num_ranks(mine)
    check_ranks(job, first_rank)
    return tuple(stages)


def _copied(draft: Plan, llm: str, copies: int) -> tuple[Microbatch, ...]:
    """The draft's microbatches, those of encoders once per block of LLM ranks."""
    found: list[Microbatch] = []
    for microbatch in draft.microbatches:
        if microbatch.module == llm:
            found.append(microbatch)
        else:
            first = microbatch.replica * copies
            found.extend(replace(microbatch, replica=first + copy) for copy in range(copies))
    return tuple(found)


SPEC = StrategySpec(
    name="encoders-replicated",
    planner=plan,
    shortlist=shortlist,
    summary="a copy of the encoders on every LLM stage's ranks",
    own_space=OwnSpace(degrees=Chooser.ALIKE, where="Cornstarch v1, section 6.1", shares_ranks=True),
    placing=EncoderPlacing.REPLICATED,
    stands_for_placing=True,
)
