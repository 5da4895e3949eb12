"""A plan on fewer nodes: the same pipelines, fewer of them, with the whole batch."""

from dataclasses import replace
from math import lcm

from workbench.balance.tokens.exchange import longest_first_exchanged
from workbench.cost.model import CostModel
from workbench.on_demand import OnDemand
from workbench.plan.plan import Microbatch, ModuleSettings, Plan, Settings, Sharding
from workbench.plan.token_shards import token_shards
from workbench.planner.assembly import scheduled
from workbench.schedule.choice import Schedule

nx = OnDemand("networkx")


def num_pipelines(plan: Plan) -> int:
    """Replicas of the whole model: those of every module, where all have equally many; else 1."""
    counts = {len(plan.replicas(module.name)) for module in plan.model.modules}
    return counts.pop() if len(counts) == 1 else 1


def pipelines_of_copy(plan: Plan) -> int:
    """Pipelines that hold all state once between them: one, or those of an instance where they shard weights.

    All of them where they shard only optimizer state or gradients: elastic training does not take that.
    """
    modules = [plan.settings.of(module.name) for module in plan.model.modules]
    if any(each.sharding not in (Sharding.NONE, Sharding.PARAMETERS) for each in modules):
        return num_pipelines(plan)
    return lcm(*(_sharing(plan, each) for each in modules))


def _sharing(plan: Plan, module: ModuleSettings) -> int:
    """Pipelines that shard a module's state among them: those of an instance."""
    return 1 if module.sharding is Sharding.NONE else max(1, num_pipelines(plan) // module.instances)


def num_nodes(plan: Plan) -> int:
    """Nodes with a rank that the plan uses."""
    return len({plan.cluster.node_of(rank) for rank in plan.ranks})


def nodes_of_first(plan: Plan, kept: int) -> int:
    """Nodes that the first so many pipelines take, moved together onto the first ones."""
    ranks = {rank for stage in plan.stages if stage.replica < kept for rank in stage.flat_ranks}
    return len({plan.cluster.node_of(rank) for rank in range(len(ranks))})


def with_pipelines(plan: Plan, kept: int, schedule: Schedule, cost: CostModel) -> Plan:
    """The plan's batch on its first `kept` pipelines, which move together onto the first nodes.

    All microbatches are dealt to them anew, one by one, so that none has more than one beyond another, with
    what other modules make of the same samples. Instances of sharded state are left whole.

    Args:
        schedule: of the programs.

    Raises:
        ValueError: fewer pipelines than one or more than there are, part of an instance, nodes of several
            kinds, which pipelines cannot change, or a plan that does not go on fewer ranks.
    """
    all_of_them = num_pipelines(plan)
    if not 1 <= kept <= all_of_them:
        raise ValueError(f"pipelines left: want 1 to {all_of_them}, got {kept}")
    if kept == all_of_them:
        return plan
    if len(set(plan.cluster.nodes)) > 1:
        raise ValueError(f"cluster {plan.cluster.name!r} has nodes of several kinds: pipelines keep theirs")
    held = [stage for stage in plan.stages if stage.replica < kept]
    ranks = sorted({rank for stage in held for rank in stage.flat_ranks})
    position = {rank: index for index, rank in enumerate(ranks)}
    stages = tuple(
        replace(stage, id=index, ranks=tuple(tuple(position[rank] for rank in row) for row in stage.ranks))
        for index, stage in enumerate(held)
    )
    settings = _with_instances(plan, kept)
    microbatches = _dealt(plan, kept)
    draft = replace(
        plan, stages=stages, microbatches=microbatches, programs=(), settings=settings, token_shards=()
    )
    found = scheduled(draft, schedule, cost)
    shards = tuple(
        shard
        for module in dict.fromkeys(shard.module for shard in plan.token_shards)
        for shard in token_shards(found, module, longest_first_exchanged)
    )
    return replace(found, token_shards=shards)


def _with_instances(plan: Plan, kept: int) -> Settings:
    """Of every module as many instances as so many pipelines are."""
    settings = plan.settings
    for each in plan.settings.modules:
        if each.sharding is Sharding.NONE or each.instances == 1:
            continue
        of_one = _sharing(plan, each)
        if kept % of_one:
            raise ValueError(
                f"pipelines left: module {each.module!r} shards its weights among {of_one} in each of its "
                f"{each.instances} instances, want a multiple of {of_one}, got {kept}"
            )
        settings = settings.with_module(replace(each, instances=kept // of_one))
    return settings


def _dealt(plan: Plan, kept: int) -> tuple[Microbatch, ...]:
    groups = _groups(plan)
    found: list[Microbatch] = []
    for module in plan.model.modules:
        for replica in range(kept):
            mine = [each for group in groups[replica::kept] for each in group if each.module == module.name]
            found += [replace(each, replica=replica, index=index) for index, each in enumerate(mine)]
    return tuple(found)


def _groups(plan: Plan) -> list[list[Microbatch]]:
    """What is dealt as one: the first of every pipeline, then the second, ..., as samples are.

    A microbatch of the LLM with those of other modules that its samples are in, or several where one of
    another module feeds them. Whole pipelines where samples go from one to another.

    Complexity: O(items + microbatches x log microbatches).
    """
    ordered, llm = sorted(plan.microbatches, key=lambda each: each.index), plan.model.llm.name
    first_of: dict[int, int] = {}
    linked = nx.Graph()
    for number, microbatch in enumerate(ordered):
        linked.add_edges_from((number, first_of.setdefault(item.sample, number)) for item in microbatch.items)
    groups = [[ordered[number] for number in sorted(each)] for each in nx.connected_components(linked)]
    if any(len({each.replica for each in group}) > 1 for group in groups):
        return [[each for each in ordered if each.replica == own] for own in range(num_pipelines(plan))]
    return sorted(groups, key=lambda group: min((m.module != llm, m.index, m.replica) for m in group))
