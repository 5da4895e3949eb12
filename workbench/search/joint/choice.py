"""A plan as explicit answers: stages, microbatches, order, token assignment and settings."""

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
from workbench.plan.lru_cache import Identity, IdentityKey, LruCache
from workbench.plan.plan import Microbatch, Plan, Program, Settings, Sharding, TokenShard
from workbench.plan.stage import Stage
from workbench.plan.token_shards import token_shards
from workbench.planner.assembly import scheduled
from workbench.schedule.choice import Schedule, ScheduleKind, usual

NAME = "joint"
MOST_ACTIONS = 50_000  # of all cached plans together: incumbents are evaluated again


class TokenRule(StrEnum):
    """How tokens of context-parallel modules are assigned; ZIGZAG is what a plan without shards means."""

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
        microbatches: which items are batched together, by module.
        schedule: the order of passes.
        settings: of modules.
        tokens: the rule that assigns tokens to ranks.
        programs: an order that no schedule produces; empty: the schedule's.
        token_shards: an assignment that no rule produces; empty: the rule's.
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[Microbatch, ...]
    schedule: Schedule
    settings: Settings
    tokens: TokenRule = TokenRule.ZIGZAG
    programs: tuple[Program, ...] = ()
    token_shards: tuple[TokenShard, ...] = ()


def num_actions(plan: Plan) -> int:
    """The size of a plan in caches, including everything derived from it."""
    return sum(len(program.actions) for program in plan.programs) + 1


_PLANS: LruCache[Plan] = LruCache(MOST_ACTIONS, num_actions)


def build(job: Job, choice: Choice, cost: CostModel) -> Plan:
    """The plan of a choice for the job's model, cluster and batch. Pure.

    Raises:
        ValueError: a schedule that does not support these stages, or programs that `check` refuses; an order
            of the choice's own is not checked here.

    Complexity: that of the schedule; with a split backward also a pricing of the plan. O(1) on a cache hit.
    """
    return _PLANS.get_or(_key(job, choice, cost), lambda: _built(job, choice, cost))


def _key(job: Job, choice: Choice, cost: CostModel) -> tuple[IdentityKey, ...]:
    """Everything that determines the plan of a choice."""
    return Identity(job.model), Identity(job.cluster), Identity(job.batch), Identity(cost), Identity(choice)


def _built(job: Job, choice: Choice, cost: CostModel) -> Plan:
    draft = draft_of(job, choice)
    if choice.programs:
        plan = replace(draft, programs=choice.programs)
    else:
        plan = scheduled(draft, choice.schedule, cost)
    shards = choice.token_shards or _ruled_shards(plan, choice.tokens)
    return replace(plan, token_shards=shards) if shards else plan


def draft_of(job: Job, choice: Choice) -> Plan:
    """The plan's stages and microbatches, without programs."""
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
    """The choice from which `build` makes this plan again, apart from the strategy's name.

    The order is the first of the job's schedule and all usual ones that produces the plan's programs, else
    the programs themselves. Tokens likewise: the first rule that produces the plan's shards, else the shards.

    Complexity: one set of programs for every schedule tried, one of shards for every rule.
    """
    literal = Choice(
        stages=plan.stages,
        microbatches=plan.microbatches,
        schedule=job.schedule,
        settings=plan.settings,
        programs=plan.programs,
        token_shards=plan.token_shards,
    )
    choice = _with_rule(job, _with_schedule(job, literal, cost))
    if plan.strategy == NAME:
        _PLANS.put(_key(job, choice, cost), plan)
    return choice


def _with_schedule(job: Job, choice: Choice, cost: CostModel) -> Choice:
    draft = draft_of(job, replace(choice, stages=_merged_units(choice)))
    for schedule in dict.fromkeys((job.schedule, *map(usual, ScheduleKind), *_offloading())):
        try:
            candidate = scheduled(draft, schedule, cost)
        except ValueError:  # the schedule does not support such stages
            continue
        if (candidate.programs, candidate.stages) == (choice.programs, choice.stages):
            return replace(choice, stages=draft.stages, schedule=schedule, programs=())
    return choice


def _merged_units(choice: Choice) -> tuple[Stage, ...]:
    """The stages; with sharded weights, consecutive layers on the same ranks merged: undoes `in_units`."""
    merged: list[Stage] = []
    for stage in choice.stages:
        last = merged[-1] if merged else stage
        is_unit = choice.settings.of(stage.module).sharding is Sharding.PARAMETERS
        is_same_place = replace(last, id=stage.id, layers=stage.layers) == stage
        if is_unit and is_same_place and last.layers[1] == stage.layers[0]:
            merged[-1] = replace(last, layers=(last.layers[0], stage.layers[1]))
        else:
            merged.append(replace(stage, id=len(merged)))
    return tuple(merged)


def _offloading() -> tuple[Schedule, ...]:
    return tuple(replace(usual(k), offload=True) for k in ScheduleKind if k.spec.takes("offload"))


def _with_rule(job: Job, choice: Choice) -> Choice:
    if not choice.token_shards:
        return choice
    draft = draft_of(job, choice)
    for rule in _POLICIES:
        if _ruled_shards(draft, rule) == choice.token_shards:
            return replace(choice, tokens=rule, token_shards=())
    return choice


def _ruled_shards(plan: Plan, rule: TokenRule) -> tuple[TokenShard, ...]:
    policy = _POLICIES.get(rule)
    if policy is None:
        return ()
    return tuple(shard for module in plan.model.modules for shard in token_shards(plan, module.name, policy))
