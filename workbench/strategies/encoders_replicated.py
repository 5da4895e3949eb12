"""Encoders replicated: the LLM is cut into stages, and every stage's ranks hold a copy of all encoders.

Source: Cornstarch v1 section 2.2, Figures 1b and 2a (Llama 3's multimodal training), and the baseline of
section 6.1. Differs: the LLM reads the first stage's copy; the other copies run their forwards, as the
figure shows, but receive no gradients. A copy runs as soon as its rank is free, while in the figure it
waits for its LLM stage's input as if the two were one box.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.notations.cornstarch import EncoderPlacing
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import check_ranks, draft_plan, module_stages, num_ranks
from workbench.planner.block_cuts import Cuts
from workbench.planner.cut_candidates import Counts, CutCandidates
from workbench.planner.planner_cost import FROZEN_UNAWARE
from workbench.planner.stage_counts import Progress, best_counts
from workbench.planner.strategy_spec import Chooser, First, OwnSpace, StrategySpec


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """LLM stages balanced by forward time; all encoders on each of them."""
    draft = draft_plan(job, "encoders-replicated")
    llm = job.model.llm.name
    copied = partial(_copied, draft, llm)
    candidates = CutCandidates(job, draft, cost, FROZEN_UNAWARE, _stages, {llm: llm}, microbatches_of=copied)
    return best_counts(candidates, progress, most)


plan = First(shortlist)


def _stages(job: Job, cuts: Mapping[str, Cuts]) -> tuple[Stage, ...]:
    """On every block of LLM ranks, one full copy of each encoder, as a replica of its own."""
    ((llm, llm_cuts),) = cuts.items()
    stages: list[Stage] = []
    first_rank = 0
    for replica in range(job.replicas):
        llm_stages = module_stages(job, llm, llm_cuts, replica=replica, first_id=0, first_rank=first_rank)
        blocks = list(dict.fromkeys(stage.ranks for stage in llm_stages))
        for position, ranks in enumerate(blocks):
            for module in job.model.modules:
                if module.name == llm:
                    block_stages = [stage for stage in llm_stages if stage.ranks == ranks]
                    stages += [replace(stage, id=len(stages) + n) for n, stage in enumerate(block_stages)]
                    continue
                stages.append(
                    Stage(
                        id=len(stages),
                        module=module.name,
                        replica=replica * len(blocks) + position,
                        layers=(0, len(module.layers)),
                        ranks=ranks,
                        joint_replicas=llm_stages[0].joint_replicas,
                    )
                )
        first_rank += num_ranks(llm_stages)
    check_ranks(job, first_rank)
    return tuple(stages)


def _copied(draft: Plan, llm: str, counts: Counts) -> tuple[Microbatch, ...]:
    """The draft's microbatches, those of encoders once per block of LLM ranks."""
    microbatches: list[Microbatch] = []
    for microbatch in draft.microbatches:
        if microbatch.module == llm:
            microbatches.append(microbatch)
        else:
            first = microbatch.replica * counts[llm]
            microbatches.extend(replace(microbatch, replica=first + copy) for copy in range(counts[llm]))
    return tuple(microbatches)


SPEC = StrategySpec(
    name="encoders-replicated",
    planner=plan,
    shortlist=shortlist,
    summary="a copy of the encoders on the ranks of every LLM stage",
    own_space=OwnSpace(degrees=Chooser.ALIKE, where="Cornstarch v1, section 6.1", shares_ranks=True),
    placing=EncoderPlacing.REPLICATED,
    stands_for_placing=True,
)
