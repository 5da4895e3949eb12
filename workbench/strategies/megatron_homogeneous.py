"""Megatron homogeneous (H), searched: one grid for all modules, encoders on the LLM's first stage.

Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
sections 1 and 4 (the baseline).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import (
    blocks_cut,
    check_ranks,
    dp_of,
    layout_of,
    module_stages,
    scheduled,
    shared_draft,
)
from workbench.planner.block_cuts import Cuts
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_plan import searched_plans
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import (
    KARNATI,
    PLAIN_OR_INTERLEAVED,
    Chooser,
    First,
    OwnSpace,
    StrategySpec,
)

NAME = "megatron-homogeneous"


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The fastest homogeneous layouts within the job's memory; a layout of the job for the LLM is kept.

    The LLM's first stage gets fewer layers, to compensate for the encoders' time on it. With joint replicas
    nothing is searched: an open pp takes all ranks.

    Raises:
        ValueError: no layout fits.
    """
    if job.joint_replicas > 1:
        choice = _given(job)
        laid_out = replace(job, layouts=tuple(each.layout for each in (*choice.encoders, choice.llm)))
        return (of_layout(laid_out, choice, cost),)

    def build(laid_out: Job, choice: LayoutChoice) -> Plan:
        return of_layout(laid_out, choice, cost)

    return searched_plans(job, cost, Mode.HOMOGENEOUS, build, progress, most)


plan = First(shortlist)


def _given(job: Job) -> LayoutChoice:
    """The layout of the job's LLM, with its grid for all encoders.

    Raises:
        ValueError: an encoder with another grid.
    """
    layout, dp = layout_of(job, job.model.llm.name), dp_of(job, job.model.llm.name)
    for other in job.layouts:
        replicas = dp_of(job, other.module) * other.joint_replicas
        if (other.tp, other.cp, replicas) != (layout.tp, layout.cp, dp * layout.joint_replicas):
            raise ValueError(
                f"{NAME}: encoders share the grid of {layout.module!r}, tp {layout.tp}, cp {layout.cp} and "
                f"{dp * layout.joint_replicas} replicas, {other.module!r} has tp {other.tp}, cp {other.cp} "
                f"and {replicas}; nearest: equal ones, or no layout of {other.module!r}"
            )
    pp = layout.pp or max(1, job.usable_ranks // (layout.stage_ranks * dp))
    llm = ModuleChoice(
        module=layout.module,
        tp=layout.tp,
        cp=layout.cp,
        pp=pp,
        dp=dp,
        ep=layout.ep,
        joint_replicas=layout.joint_replicas,
    )
    return LayoutChoice(
        mode=Mode.HOMOGENEOUS,
        encoders=tuple(replace(llm, module=encoder.name, pp=1, ep=1) for encoder in job.model.encoders),
        llm=llm,
    )


def of_layout(job: Job, choice: LayoutChoice, cost: CostModel) -> Plan:
    """The plan of a layout, which the job's own layouts describe too.

    Raises:
        ValueError: more stages than layers, a batch that cannot be split, too few ranks.
    """
    draft = shared_draft(job, NAME)
    layers_s = believed_layers_s(job, draft, cost, FROZEN_AWARE.layer_s)
    return scheduled(replace(draft, stages=first_stage_encoders(job, choice, layers_s)), job.schedule, cost)


def first_stage_encoders(
    job: Job, choice: LayoutChoice, layers_s: Mapping[str, Sequence[float]]
) -> tuple[Stage, ...]:
    """Stages in Megatron's order of ranks, tp-cp-dp-pp; encoders on the ranks of the LLM's first stage.

    The LLM's first stage gets fewer layers, to compensate for the encoders' time on it.

    Args:
        layers_s: seconds of every module's layers.

    Raises:
        ValueError: more stages than layers, or too few ranks.
    """
    llm = choice.llm
    first, *rest = layers_s[llm.module]
    encoders_s = float_sum(float_sum(layers_s[encoder.module]) for encoder in choice.encoders)
    cuts: dict[str, Cuts] = {
        encoder.module: ((0, len(layers_s[encoder.module])),) for encoder in choice.encoders
    }
    cuts[llm.module] = blocks_cut(job, (first + encoders_s, *rest), llm.pp, llm.module)
    size = llm.stage_ranks
    stages: list[Stage] = []
    for module in job.model.modules:
        for replica in range(llm.dp):
            stages += module_stages(
                job,
                module.name,
                cuts[module.name],
                replica=replica,
                first_id=len(stages),
                first_rank=replica * size,
                blocks_apart=llm.dp,
            )
    check_ranks(job, llm.num_ranks)
    return tuple(stages)


SPEC = StrategySpec(
    name=NAME,
    planner=plan,
    shortlist=shortlist,
    searches_layouts=True,
    summary="one layout for all modules; searched",
    own_space=OwnSpace(
        degrees=Chooser.ITSELF, where=KARNATI, schedules=PLAIN_OR_INTERLEAVED, says_memory=True, effort=5.0
    ),
    placing=None,
)
