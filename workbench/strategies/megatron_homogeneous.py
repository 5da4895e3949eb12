"""Megatron homogeneous (H), searched: one grid for all modules, encoders on the LLM's first stage.

Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
sections 1 and 4 (the baseline).
"""

from dataclasses import replace
from itertools import accumulate, pairwise

from workbench.cost.model import CostModel
from workbench.job import Job
from workbench.plan.plan import Plan, Stage
from workbench.strategies.assembly import check_ranks, layout_of, module_stages, scheduled, shared_draft
from workbench.strategies.layout_choice import LayoutChoice, Mode
from workbench.strategies.layout_plan import searched_plan
from workbench.strategies.stage_counts import Progress, silent

NAME = "megatron-homogeneous"


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The fastest homogeneous layout under the job's memory; the layout that the job gives the LLM is kept.

    The LLM's stages make up for the encoders' time on the first of them.

    Raises:
        ValueError: no layout fits.
    """

    def build(found: Job, choice: LayoutChoice) -> Plan:
        draft = replace(shared_draft(found, NAME), stages=first_stage_encoders(found, choice))
        return scheduled(draft, found.schedule, cost)

    return searched_plan(job, cost, Mode.HOMOGENEOUS, build, progress)


def first_stage_encoders(job: Job, choice: LayoutChoice) -> tuple[Stage, ...]:
    """Stages in Megatron's order of ranks, tp-cp-dp-pp; encoders on the ranks of the LLM's first stage."""
    llm = choice.llm
    size = llm.tp * llm.cp
    stages: list[Stage] = []
    for module in job.model.modules:
        given = layout_of(job, module.name).stage_layers or (len(module.layers),)
        cuts = tuple(pairwise(accumulate(given, initial=0)))
        for replica in range(llm.dp):
            stages += module_stages(
                job,
                module.name,
                cuts,
                replica=replica,
                first_id=len(stages),
                first_rank=replica * size,
                blocks_apart=llm.dp,
            )
    check_ranks(job, llm.num_ranks)
    return tuple(stages)
