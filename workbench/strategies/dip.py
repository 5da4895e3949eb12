"""DIP in its static form: all modules on the same ranks, encoders with sub-microbatches of their own.

Source: DIP, as described by Entrain (dissertation, sections 4.2 and 4.7.2, Figure 4.2c): each modality is
parallelized separately, their stages are colocated, all encoder forwards run before the LLM and all encoder
backwards after it. Differs: its run-time search over schedules is not included.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from workbench.balance.tokens.policies import longest_first
from workbench.cost.model import CostModel
from workbench.data.sample import Item
from workbench.job.job import Job
from workbench.model.model_graph import TEXT
from workbench.plan.lower import lower
from workbench.plan.microbatches import batched_microbatches
from workbench.plan.plan import Microbatch, Plan
from workbench.planner.assembly import dp_of, empty_draft, in_phases, layout_of, scheduled
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.planner.sample_work import module_quadratic
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import Chooser, First, OwnSpace, StrategySpec
from workbench.schedule.choice import usual_in_phases
from workbench.strategies.megatron_heterogeneous import grid_stages


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """Every module on all ranks, in three phases, with the numbers of sub-microbatches that are estimated
    fastest.

    The LLM's pp, if its layout has one, determines the number of ranks; every other module gets one stage
    per tp x cp ranks of a replica, whatever pp its layout has. An encoder's share of a microbatch is cut by
    item into 1, 2, 4, ... balanced sub-microbatches, at most as many as it has items.

    Raises:
        ValueError: ranks that do not divide, more stages than layers, a batch that does not divide, or a
            schedule that is neither 1F1B nor one in phases.
    """
    colocated = _on_all_ranks(job)
    candidates = [_plan(colocated, cost, parts) for parts in _powers(job.microbatch_samples)]
    seconds = _estimates_s(candidates, cost)
    progress(len(candidates), len(candidates), min(seconds))
    by_estimate = sorted(range(len(candidates)), key=seconds.__getitem__)
    return tuple(candidates[index] for index in by_estimate[:most])


plan = First(shortlist)


def regroup(plan: Plan, job: Job, cost: CostModel) -> Plan:
    """The job's batch on the plan's stages, with the number of sub-microbatches that is estimated fastest."""
    job = in_phases(job, "dip")
    draft = replace(plan, batch=job.batch, microbatches=(), programs=(), token_shards=())
    candidates = [
        scheduled(replace(draft, microbatches=_microbatches(job, draft, cost, parts)), job.schedule, cost)
        for parts in _powers(job.microbatch_samples)
    ]
    seconds = _estimates_s(candidates, cost)
    return candidates[seconds.index(min(seconds))]


def _estimates_s(candidates: Sequence[Plan], cost: CostModel) -> list[float]:
    """Seconds of each plan by the planner's estimate."""
    return [FROZEN_AWARE.plan_s(lower(candidate), cost) for candidate in candidates]


def _powers(most: int) -> Iterator[int]:
    parts = 1
    while parts <= most:
        yield parts
        parts *= 2


def _on_all_ranks(job: Job) -> Job:
    """The job with layouts that start at the first rank and a schedule of three phases."""
    num_ranks = job.usable_ranks
    llm = layout_of(job, job.model.llm.name)
    if llm.pp is not None:
        num_ranks = llm.pp * llm.stage_ranks * job.replicas
    layouts = []
    for module in job.model.modules:
        layout = layout_of(job, module.name)
        if dp_of(job, module.name) != job.replicas:
            raise ValueError(f"dip: want {job.replicas} replicas of {module.name!r}, got dp {layout.dp}")
        stage_ranks = layout.stage_ranks * job.replicas
        if num_ranks % stage_ranks:
            raise ValueError(
                f"dip: {num_ranks} ranks must divide by the {stage_ranks} of a stage of {module.name!r}; "
                f"nearest: max_ranks {num_ranks - num_ranks % stage_ranks or stage_ranks}"
            )
        layouts.append(replace(layout, pp=num_ranks // stage_ranks, rank_offset=0))
    return replace(in_phases(job, "dip"), layouts=tuple(layouts))


def _plan(job: Job, cost: CostModel, parts: int) -> Plan:
    draft = empty_draft(job, "dip")
    draft = replace(draft, microbatches=_microbatches(job, draft, cost, parts))
    counts = {module.name: layout_of(job, module.name).pp or 1 for module in job.model.modules}
    return CutCandidates(job, draft, cost, FROZEN_AWARE, grid_stages).plan(counts)


def _microbatches(job: Job, draft: Plan, cost: CostModel, parts: int) -> tuple[Microbatch, ...]:
    whole = batched_microbatches(
        draft, samples_per_microbatch=job.microbatch_samples, replicas=range(job.replicas)
    )
    microbatches: list[Microbatch] = []
    for module in job.model.modules:
        module_microbatches = [microbatch for microbatch in whole if microbatch.module == module.name]
        if module.modality == TEXT:
            microbatches += module_microbatches
            continue
        quadratic = module_quadratic(job, cost, module)
        seconds = {
            Item(sample.id, segment.k): segment.num_tiles * quadratic.seconds(segment.tile_tokens)
            for sample in job.batch
            for segment in sample.of(module.modality)
        }
        for replica in range(job.replicas):
            groups = [
                group
                for microbatch in module_microbatches
                if microbatch.replica == replica
                for group in _balanced(microbatch.items, seconds, parts)
            ]
            microbatches += [
                Microbatch(
                    module=module.name, replica=replica, index=index, rows=tuple((item,) for item in group)
                )
                for index, group in enumerate(groups)
            ]
    return tuple(microbatches)


def _balanced(
    items: Sequence[Item], seconds: Mapping[Item, float], parts: int
) -> tuple[tuple[Item, ...], ...]:
    """At most `parts` groups of balanced work, none empty."""
    count = min(parts, len(items))
    owners = longest_first([seconds[item] for item in items], count)
    groups = (
        tuple(item for item, owner in zip(items, owners, strict=True) if owner == part)
        for part in range(count)
    )
    return tuple(group for group in groups if group)


SPEC = StrategySpec(
    name="dip",
    planner=plan,
    shortlist=shortlist,
    summary="DIP: encoders and LLM on the same ranks in three phases, encoders in even sub-microbatches",
    regroup=regroup,
    own_space=OwnSpace(
        degrees=Chooser.EACH,
        where="Entrain, sections 4.2 and 4.7.2",
        has_cp=False,
        shares_ranks=True,
        schedules=(usual_in_phases(),),
        effort=4.0,
    ),
    placing=None,
)
