"""Entrain: encoder microbatches of even work, LLM work deferred between pairs of them.

Source: Entrain (dissertation chapter 4), sections 4.3 and 4.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workbench.balance.microbatches.assignment import MicrobatchAssignment, hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import even_match
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.model.model_graph import TEXT, Module
from workbench.plan.check import check
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Microbatch, Plan, Program
from workbench.plan.routing import Routing, routing_of
from workbench.planner.assembly import disjoint_stages, draft_plan, layout_of, scheduled
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.planner.sample_work import sample_work
from workbench.planner.stage_counts import Progress, fastest_counts, silent
from workbench.planner.strategy_spec import StrategySpec
from workbench.schedule.adjacent import with_followers
from workbench.schedule.eager import with_eager_forwards

Followers = Mapping[
    tuple[str, int], Mapping[int, int]
]  # (module, replica) -> microbatch -> the one before it


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Modules on ranks of their own; who goes together is decided by work, sample by sample.

    Deferral is no machinery: an encoder microbatch is cut by consumer into one whose samples the LLM
    takes at once and one whose samples it takes with the next microbatch. Their forwards are
    adjacent, so that encoder work stays even; each has a backward of its own (the paper's split backward).
    Differs: the matching that leaves all microbatches evenest, see `even_match`; stage counts that
    the job leaves open are searched by the planner's estimate instead of the paper's Algorithm 3.

    Raises:
        ValueError: more stages than layers, fewer samples than replicas, too few ranks.
    """
    draft = draft_plan(job, "entrain")
    assignments = assign(job, cost)
    microbatches, followers = deferring_microbatches(draft, assignments)
    draft = replace(draft, microbatches=microbatches)
    layers_s = believed_layers_s(job, draft, cost, FROZEN_AWARE.layer_s)
    entry_of = {module: module for module in layers_s}
    ranks_per_stage = {module: layout_of(job, module).tp * layout_of(job, module).cp for module in layers_s}
    cuts = CutCandidates(job, draft, cost, FROZEN_AWARE, layers_s, entry_of, disjoint_stages)
    return fastest_counts(job, ranks_per_stage, _Deferring(cuts, followers), progress)


def regroup(plan: Plan, job: Job, cost: CostModel) -> Plan:
    """Algorithm 4 on the job's batch, for the plan's stages.

    Raises:
        ValueError: a module with other replicas than the language model's.
    """
    for module in job.model.modules:
        if plan.replicas(module.name) != tuple(range(job.replicas)):
            raise ValueError(
                f"entrain: want {job.replicas} replicas of every module, {module.name!r} has "
                f"{len(plan.replicas(module.name))}"
            )
    draft = replace(plan, batch=job.batch, microbatches=(), programs=(), token_shards=())
    microbatches, followers = deferring_microbatches(draft, assign(job, cost))
    draft = replace(draft, microbatches=microbatches)
    return with_adjacent_forwards(scheduled(draft, job.schedule, cost), followers)


def assign(job: Job, cost: CostModel) -> tuple[MicrobatchAssignment, ...]:
    """Algorithm 4 on the job's batch: indices into it, by replica."""
    work = sample_work(job, cost)
    return hierarchical_assignment(
        work.encoder_s,
        work.llm_s,
        num_replicas=job.replicas,
        num_microbatches=len(job.batch) // (job.replicas * job.microbatch_samples),
        match=even_match,
    )


@dataclass(frozen=True, slots=True)
class _Deferring:
    """Candidates whose deferred encoder forwards follow those they were cut from."""

    cuts: CutCandidates
    followers: Followers

    def bound_s(self, counts: Mapping[str, int]) -> float:
        return self.cuts.bound_s(counts)

    def closer_s(self, counts: Mapping[str, int]) -> tuple[float, Plan]:
        return self.cuts.closer_s(counts)

    def check_memory(self, counts: Mapping[str, int]) -> None:
        self.cuts.check_memory(counts)

    def plan(self, counts: Mapping[str, int]) -> Plan:
        return with_adjacent_forwards(self.cuts.plan(counts), self.followers)

    def believed_s(self, lowered: Lowered) -> float:
        return self.cuts.believed_s(lowered)


def with_adjacent_forwards(plan: Plan, followers: Followers, lead: int = 0) -> Plan:
    """The plan with every deferred encoder forward right after the one it was cut from.

    Encoder forwards run `lead` microbatches further ahead than scheduled.
    """
    of_stage = {
        stage.id: followers[stage.module, stage.replica]
        for stage in plan.stages
        if (stage.module, stage.replica) in followers and plan.model.module(stage.module).modality != TEXT
    }
    programs = tuple(
        Program(
            ranks=program.ranks,
            actions=with_eager_forwards(with_followers(program.actions, of_stage), of_stage, lead),
        )
        for program in plan.programs
    )
    adjacent = replace(plan, programs=programs)
    check(adjacent)
    return adjacent


def deferring_microbatches(
    draft: Plan, assignments: tuple[MicrobatchAssignment, ...]
) -> tuple[tuple[Microbatch, ...], Followers]:
    """Microbatches of all modules and replicas, and which encoder microbatch was cut from which."""
    routing = routing_of(draft)
    found: list[Microbatch] = []
    followers: dict[tuple[str, int], dict[int, int]] = {}
    for module in draft.model.modules:
        for replica, assignment in enumerate(assignments):
            mine = followers.setdefault((module.name, replica), {})
            found += _of_replica(routing, module, replica, assignment, mine)
    return tuple(found), followers


def _of_replica(
    routing: Routing,
    module: Module,
    replica: int,
    assignment: MicrobatchAssignment,
    followers: dict[int, int],
) -> list[Microbatch]:
    """Microbatches of one replica of a module; `followers` learns which one was cut from which."""
    batch = routing.plan.batch
    found: list[Microbatch] = []

    def add(places: tuple[int, ...]) -> bool:
        items = (item for place in places for item in routing.items(module.name, batch[place].id))
        rows = tuple((item,) for item in items)
        if rows:
            found.append(Microbatch(module=module.name, replica=replica, index=len(found), rows=rows))
        return bool(rows)

    if module.modality == TEXT:
        for places in assignment.llm:
            add(places)
        return found
    for places, deferred in zip(assignment.encoder, assignment.deferred, strict=True):
        kept = tuple(place for place in places if place not in deferred)
        if add(kept) & add(deferred):
            followers[len(found) - 1] = len(found) - 2
    return found


SPEC = StrategySpec(
    name="entrain",
    planner=plan,
    summary="samples assigned hierarchically, encoder work of heavy microbatches deferred",
    batch_level=True,
    regroup=regroup,
)
