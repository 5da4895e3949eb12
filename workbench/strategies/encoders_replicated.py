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
from workbench.graph.model_graph import TEXT
from workbench.job import Job
from workbench.plan.build import with_programs
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.strategies.assembly import (
    Cuts,
    bottleneck_s,
    check_ranks,
    cut,
    draft_plan,
    grid,
    layout_of,
    num_microbatches,
)
from workbench.strategies.belief import FROZEN_UNAWARE
from workbench.strategies.layer_cost import believed_layers_s
from workbench.strategies.stage_counts import Progress, fastest_counts, silent


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """LLM stages balanced by forward time; all encoders on each of them."""
    draft = draft_plan(job, "encoders-replicated")
    llm = next(module.name for module in job.model.modules if module.modality == TEXT)
    llm_s = believed_layers_s(job, draft, cost, FROZEN_UNAWARE.layer_s)[llm]
    layout = layout_of(job, llm)
    candidates = _Candidates(job, draft, cost, llm, llm_s)
    return fastest_counts(job, {llm: layout.tp * layout.cp}, candidates, progress)


@dataclass(frozen=True, slots=True)
class _Candidates:
    job: Job
    draft: Plan
    cost: CostModel
    llm: str
    llm_s: tuple[float, ...]

    def bound_s(self, counts: Mapping[str, int]) -> float:
        """The slowest LLM stage over all its microbatches; encoders come on top."""
        cuts = cut(self.llm_s, counts[self.llm], self.llm)
        return bottleneck_s(self.llm_s, cuts) * num_microbatches(self.draft, self.llm)

    def plan(self, counts: Mapping[str, int]) -> Plan:
        cuts = cut(self.llm_s, counts[self.llm], self.llm)
        stages = _stages(self.job, self.llm, cuts)
        microbatches = _copied(self.draft, self.llm, len(cuts))
        return with_programs(replace(self.draft, stages=stages, microbatches=microbatches), self.job.schedule)

    def believed_s(self, lowered: Lowered) -> float:
        return FROZEN_UNAWARE.plan_s(lowered, self.cost)


def _stages(job: Job, llm: str, cuts: Cuts) -> tuple[Stage, ...]:
    """On the ranks of every LLM stage: one whole copy of each encoder, a replica of its own."""
    layout = layout_of(job, llm)
    stages: list[Stage] = []
    first_rank = 0
    for replica in range(job.replicas):
        for position, layers in enumerate(cuts):
            ranks = grid(first_rank, layout)
            for module in job.model.modules:
                encoder = module.name != llm
                stages.append(
                    Stage(
                        id=len(stages),
                        module=module.name,
                        replica=replica * len(cuts) + position if encoder else replica,
                        layers=(0, len(module.layers)) if encoder else layers,
                        ranks=ranks,
                    )
                )
            first_rank += layout.tp * layout.cp
    check_ranks(job, first_rank)
    return tuple(stages)


def _copied(draft: Plan, llm: str, copies: int) -> tuple[Microbatch, ...]:
    """The draft's microbatches, those of encoders once per LLM stage."""
    found: list[Microbatch] = []
    for microbatch in draft.microbatches:
        if microbatch.module == llm:
            found.append(microbatch)
        else:
            first = microbatch.replica * copies
            found.extend(replace(microbatch, replica=first + copy) for copy in range(copies))
    return tuple(found)
