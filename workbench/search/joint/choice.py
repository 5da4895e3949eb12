"""A plan as explicit answers: stages, microbatches, an order, owners of tokens and settings."""

from dataclasses import dataclass, replace
from enum import StrEnum

from workbench.balance.tokens.exchange import longest_first_exchanged
from workbench.balance.tokens.policies import (
    Policy,
    contiguous,
    longest_first,
    longest_first_equal_counts,
    sorted_round_robin,
    stripe,
)
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Microbatch, Plan, Program, Settings, Sharding, Stage, TokenShard
from workbench.plan.token_shards import token_shards
from workbench.planner.assembly import scheduled
from workbench.schedule.choice import Schedule, ScheduleKind, usual

NAME = "joint"
MOST_ACTIONS = 50_000  # of all plans that are cached: an incumbent is looked at again


class TokenRule(StrEnum):
    """Who owns the tokens of context-parallel modules; ZIGZAG is what a plan without shards means."""

    ZIGZAG = "zigzag"
    EXCHANGED = "longest-first-exchanged"
    LONGEST_FIRST = "longest-first"
    EQUAL_COUNTS = "longest-first-equal-counts"
    ROUND_ROBIN = "sorted-round-robin"
    CONTIGUOUS = "contiguous"
    STRIPE = "stripe"


_POLICIES: dict[TokenRule, Policy] = {
    TokenRule.EXCHANGED: longest_first_exchanged,
    TokenRule.LONGEST_FIRST: longest_first,
    TokenRule.EQUAL_COUNTS: longest_first_equal_counts,
    TokenRule.ROUND_ROBIN: sorted_round_robin,
    TokenRule.CONTIGUOUS: contiguous,
    TokenRule.STRIPE: stripe,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An explicit answer to every question.

    Args:
        stages: which ranks hold which layers.
        microbatches: which items go together, by module.
        schedule: the order of passes.
        settings: of modules.
        tokens: the rule by which tokens get owners.
        programs: an order that is none of a schedule's; empty: the schedule's.
        token_shards: owners that follow from no rule; empty: the rule's.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[Microbatch, ...]
    schedule: Schedule
    settings: Settings
    tokens: TokenRule = TokenRule.ZIGZAG
    programs: tuple[Program, ...] = ()
    token_shards: tuple[TokenShard, ...] = ()


def num_actions(plan: Plan) -> int:
    """By which plans weigh that are cached, with all that was derived of them."""
    return sum(len(program.actions) for program in plan.programs) + 1


_PLANS: LruCache[Plan] = LruCache(MOST_ACTIONS, num_actions)


def build(job: Job, choice: Choice, cost: CostModel) -> Plan:
    """The plan of a choice for the job's model, cluster and batch. Pure.

    Raises:
        ValueError: a schedule that does not take these stages, or what `check` refuses of its programs;
            an order of the choice's own is not checked here.

    Complexity: that of the schedule; of a split backward also a price. O(1) again, soon after.
    """
    return _PLANS.get_or(_key(job, choice, cost), lambda: _built(job, choice, cost))


def _key(job: Job, choice: Choice, cost: CostModel) -> tuple[Identity, ...]:
    """All that the plan of a choice follows from."""
    return Identity(job.model), Identity(job.cluster), Identity(job.batch), Identity(cost), Identity(choice)


def _built(job: Job, choice: Choice, cost: CostModel) -> Plan:
    draft = draft_of(job, choice)
    if choice.programs:
        plan = replace(draft, programs=choice.programs)
    else:
        plan = scheduled(draft, choice.schedule, cost)
    shards = choice.token_shards or _shards(plan, choice.tokens)
    return replace(plan, token_shards=shards) if shards else plan


def draft_of(job: Job, choice: Choice) -> Plan:
    """Its stages and microbatches without programs."""
    return Plan(
        strategy=NAME,
        model=job.model,
        cluster=job.cluster,
        batch=job.batch,
        stages=choice.stages,
        microbatches=choice.microbatches,
        programs=(),
        settings=choice.settings,
    )


def choice_of(job: Job, plan: Plan, cost: CostModel) -> Choice:
    """The choice that a plan is: `build` makes the same plan of it, but for its strategy's name.

    The order is the first of the job's schedule and all usual ones that gives the plan's programs, else
    the programs themselves; the tokens' likewise the first rule that gives its shards.

    Complexity: one set of programs for every schedule tried, one of shards for every rule.
    """
    kept = Choice(
        stages=plan.stages,
        microbatches=plan.microbatches,
        schedule=job.schedule,
        settings=plan.settings,
        programs=plan.programs,
        token_shards=plan.token_shards,
    )
    found = _with_rule(job, _with_schedule(job, kept, cost))
    if plan.strategy == NAME:
        _PLANS.put(_key(job, found, cost), plan)
    return found


def _with_schedule(job: Job, kept: Choice, cost: CostModel) -> Choice:
    bare = draft_of(job, replace(kept, stages=_whole(kept)))
    for schedule in dict.fromkeys((job.schedule, *map(usual, ScheduleKind), *_offloading())):
        try:
            found = scheduled(bare, schedule, cost)
        except ValueError:  # a schedule that is not for such stages
            continue
        if (found.programs, found.stages) == (kept.programs, kept.stages):
            return replace(kept, stages=bare.stages, schedule=schedule, programs=())
    return kept


def _whole(choice: Choice) -> tuple[Stage, ...]:
    """The stages; where weights are sharded, layers in a row on the same ranks are one: `in_units` undone."""
    found: list[Stage] = []
    for stage in choice.stages:
        last = found[-1] if found else stage
        is_unit = choice.settings.of(stage.module).sharding is Sharding.PARAMETERS
        same = replace(last, id=stage.id, layers=stage.layers) == stage
        if is_unit and same and last.layers[1] == stage.layers[0]:
            found[-1] = replace(last, layers=(last.layers[0], stage.layers[1]))
        else:
            found.append(replace(stage, id=len(found)))
    return tuple(found)


def _offloading() -> tuple[Schedule, ...]:
    return tuple(replace(usual(k), offload=True) for k in ScheduleKind if k.spec.takes("offload"))


def _with_rule(job: Job, kept: Choice) -> Choice:
    if not kept.token_shards:
        return kept
    bare = draft_of(job, kept)
    for rule in _POLICIES:
        if _shards(bare, rule) == kept.token_shards:
            return replace(kept, tokens=rule, token_shards=())
    return kept


def _shards(plan: Plan, rule: TokenRule) -> tuple[TokenShard, ...]:
    policy = _POLICIES.get(rule)
    if policy is None:
        return ()
    return tuple(shard for module in plan.model.modules for shard in token_shards(plan, module.name, policy))
