"""Encoders replicated: the LLM is cut into stages and every stage's ranks hold all encoders whole.

Source: Cornstarch v1 section 2.2, Figures 1b and 2a (Llama 3's multimodal training), and the
baseline of section 6.1.
Differs: the copy that the LLM reads is the first stage's; the other copies do their forwards,
as the figure shows, but nobody asks them for gradients.
"""

from collections.abc import Mapping
from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.graph.frozen import FrozenRule
from workbench.graph.model_graph import TEXT
from workbench.job import Job
from workbench.plan.build import with_programs
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.strategies.assembly import Cuts, check_ranks, cut, draft_plan, grid, layout_of
from workbench.strategies.layer_cost import layer_costs
from workbench.strategies.stage_counts import Progress, fastest_counts, silent


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """LLM stages balanced by forward time; all encoders on each of them."""
    draft = draft_plan(job, "encoders-replicated")
    llm = next(module.name for module in job.model.modules if module.modality == TEXT)
    layers = layer_costs(job, draft, layout_of(job, llm), cost, FrozenRule.EXACT)
    forward_s = [layer.forward_s for layer in layers]

    def with_counts(counts: Mapping[str, int]) -> Plan:
        cuts = cut(forward_s, counts[llm], llm)
        return with_programs(
            replace(
                draft,
                stages=_stages(job, llm, cuts),
                microbatches=_copied(job, draft, llm, counts[llm]),
            )
        )

    layout = layout_of(job, llm)
    return fastest_counts(job, cost, {llm: layout.tp * layout.cp}, with_counts, progress)


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


def _copied(job: Job, draft: Plan, llm: str, copies: int) -> tuple[Microbatch, ...]:
    """The draft's microbatches, those of encoders once per LLM stage."""
    found: list[Microbatch] = []
    for microbatch in draft.microbatches:
        if microbatch.module == llm:
            found.append(microbatch)
        else:
            first = microbatch.replica * copies
            found.extend(replace(microbatch, replica=first + copy) for copy in range(copies))
    return tuple(found)
