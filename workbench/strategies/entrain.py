"""Entrain: balanced encoder microbatches, with LLM work deferred between pairs of them.

Source: Entrain (dissertation chapter 4), sections 4.3 and 4.5.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, takewhile

from workbench.balance.microbatches.assignment import MicrobatchAssignment, hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import even_match
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.model.model_graph import TEXT, Module
from workbench.plan.check import check
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import Routing, routing_of
from workbench.planner.assembly import disjoint_stages, draft_plan, most_that_fits, scheduled
from workbench.planner.cut_candidates import CutCandidates
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.planner.sample_work import sample_work
from workbench.planner.stage_counts import Progress, best_counts, silent
from workbench.planner.strategy_spec import PLAIN_OR_SPLIT, Chooser, First, OwnSpace, StrategySpec
from workbench.schedule.action import Action
from workbench.schedule.adjacent import with_followers
from workbench.schedule.eager import with_eager_forwards

Followers = Mapping[
    tuple[str, int], Mapping[int, int]
]  # (module, replica) -> microbatch -> the one before it
Actions = tuple[Action, ...]


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """Modules on ranks of their own; samples are assigned to microbatches one by one, by work.

    Deferral needs no mechanism of its own: an encoder microbatch is cut by consumer into one whose samples
    the LLM takes at once and one whose samples it takes with the next microbatch. Their forwards are
    adjacent, so that encoder work stays balanced; each has a backward of its own (the paper's split
    backward). Encoder forwards then run ahead as far as memory allows and the planner's estimate improves
    (section 4.5.3's eager forwards), see `_furthest_ahead`. Differs: the matching that balances all
    microbatches best, see `even_match`; stage counts that the job leaves open are searched by the planner's
    estimate instead of the paper's Algorithm 3, before forwards run ahead; forwards of the LLM stay where
    1F1B has them.

    Raises:
        ValueError: more stages than layers, fewer samples than replicas, too few ranks.
    """
    in_turn, followers = _in_turn(job, cost, progress, most)
    return tuple(_furthest_ahead(candidate, followers, cost) for candidate in in_turn)


plan = First(shortlist)


def plan_in_turn(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """As `plan`, but with every forward where the schedule has it (Figure 4.11b), before any runs ahead.

    Raises:
        ValueError: as `plan`.
    """
    return _in_turn(job, cost, progress, 1)[0][0]


def _in_turn(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[tuple[Plan, ...], Followers]:
    draft = draft_plan(job, "entrain")
    assignments = assign(job, cost)
    microbatches, followers = deferring_microbatches(draft, assignments)
    draft = replace(draft, microbatches=microbatches)
    finished = partial(with_adjacent_forwards, followers=followers)
    candidates = CutCandidates(job, draft, cost, FROZEN_AWARE, disjoint_stages, finished=finished)
    return best_counts(candidates, progress, most), followers


def _furthest_ahead(plan: Plan, followers: Followers, cost: CostModel) -> Plan:
    """Run forwards 0, 1, 2, 4, ... or the most microbatches ahead that fit in memory: the fastest, then the
    least.

    Sharded stages are unchanged: their forwards follow the all-gathers of their own positions.

    Complexity: O(log K) plans lowered and priced for K microbatches.
    """
    if shard_units(plan):
        return plan
    too_many = max((len(microbatches) for microbatches in plan.microbatches_of.values()), default=0)
    most = most_that_fits(partial(with_leads, plan, followers), too_many)
    leads = sorted({0, most, *takewhile(most.__gt__, powers_of_two())})
    candidates = [with_leads(plan, followers, lead) for lead in leads]
    seconds = [FROZEN_AWARE.plan_s(lower(candidate), cost) for candidate in candidates]
    return candidates[seconds.index(min(seconds))]


def powers_of_two() -> Iterator[int]:
    """1, 2, 4, ..."""
    return (1 << exponent for exponent in count())


def regroup(plan: Plan, job: Job, cost: CostModel) -> Plan:
    """Apply Algorithm 4 to the job's batch on the plan's stages, and run forwards ahead.

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
    in_turn = with_adjacent_forwards(scheduled(draft, job.schedule, cost), followers)
    return _furthest_ahead(in_turn, followers, cost)


def assign(job: Job, cost: CostModel) -> tuple[MicrobatchAssignment, ...]:
    """Apply Algorithm 4 to the job's batch; returns indices into it, by replica."""
    work = sample_work(job, cost)
    return hierarchical_assignment(
        work.encoder_s,
        work.llm_s,
        num_replicas=job.replicas,
        num_microbatches=len(job.batch) // (job.replicas * job.microbatch_samples),
        match=even_match,
    )


def with_adjacent_forwards(plan: Plan, followers: Followers) -> Plan:
    """Place every deferred encoder forward directly after the one it was cut from."""
    of_stage = {
        stage.id: followers[stage.module, stage.replica]
        for stage in plan.stages
        if (stage.module, stage.replica) in followers and plan.model.module(stage.module).modality != TEXT
    }
    return _reprogrammed(plan, lambda actions: with_followers(actions, of_stage))


def with_leads(plan: Plan, followers: Followers, lead: int) -> Plan:
    """Run forwards of a plan's first modules `lead` microbatches further ahead."""
    if lead == 0:
        return plan
    readers = {edge.target for edge in plan.model.edges}
    of_stage = {
        stage.id: followers.get((stage.module, stage.replica), {})
        for stage in plan.stages
        if stage.module not in readers and plan.model.module(stage.module).modality != TEXT
    }
    return _reprogrammed(plan, lambda actions: with_eager_forwards(actions, of_stage, lead))


def _reprogrammed(plan: Plan, changed: Callable[[Actions], Actions]) -> Plan:
    programs = tuple(replace(program, actions=changed(program.actions)) for program in plan.programs)
    reprogrammed = replace(plan, programs=programs)
    check(reprogrammed)
    return reprogrammed


def deferring_microbatches(
    draft: Plan, assignments: tuple[MicrobatchAssignment, ...]
) -> tuple[tuple[Microbatch, ...], Followers]:
    """Microbatches of all modules and replicas, and which encoder microbatch was cut from which."""
    routing = routing_of(draft)
    microbatches: list[Microbatch] = []
    followers: dict[tuple[str, int], dict[int, int]] = {}
    for module in draft.model.modules:
        for replica, assignment in enumerate(assignments):
            module_followers = followers.setdefault((module.name, replica), {})
            microbatches += _of_replica(routing, module, replica, assignment, module_followers)
    return tuple(microbatches), followers


def _of_replica(
    routing: Routing,
    module: Module,
    replica: int,
    assignment: MicrobatchAssignment,
    followers: dict[int, int],
) -> list[Microbatch]:
    """Microbatches of one replica of a module; adds to `followers` which one was cut from which."""
    batch = routing.plan.batch
    microbatches: list[Microbatch] = []

    def add(members: tuple[int, ...]) -> bool:
        items = (item for index in members for item in routing.items(module.name, batch[index].id))
        rows = tuple((item,) for item in items)
        if rows:
            microbatches.append(
                Microbatch(module=module.name, replica=replica, index=len(microbatches), rows=rows)
            )
        return bool(rows)

    if module.modality == TEXT:
        for members in assignment.llm:
            add(members)
        return microbatches
    for members, deferred in zip(assignment.encoder, assignment.deferred, strict=True):
        immediate = tuple(index for index in members if index not in deferred)
        if add(immediate) & add(deferred):
            followers[len(microbatches) - 1] = len(microbatches) - 2
    return microbatches


SPEC = StrategySpec(
    name="entrain",
    planner=plan,
    shortlist=shortlist,
    summary="Entrain: samples assigned hierarchically, encoder work of heavy microbatches deferred, "
    "encoder forwards as early as memory allows",
    batch_level=True,
    regroup=regroup,
    own_space=OwnSpace(
        degrees=Chooser.EACH,
        where="Entrain, sections 4.5 and 4.6",
        has_cp=False,
        schedules=PLAIN_OR_SPLIT,
        effort=5.0,
    ),
)
