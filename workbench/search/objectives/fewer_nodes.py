"""A plan on fewer nodes: fewer of the same pipelines, with the whole batch."""

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
    """Replicas of the whole model if every module has equally many, else 1."""
    counts = {len(plan.replicas(module.name)) for module in plan.model.modules}
    return counts.pop() if len(counts) == 1 else 1


def pipelines_of_copy(plan: Plan) -> int:
    """Number of pipelines that hold one copy of all state: one, or those of an instance of sharded weights.

    All pipelines if only optimizer state or gradients are sharded: elastic training does not support that.
    """
    modules = [plan.settings.of(module.name) for module in plan.model.modules]
    if any(settings.sharding not in (Sharding.NONE, Sharding.PARAMETERS) for settings in modules):
        return num_pipelines(plan)
    return lcm(*(_pipelines_of_instance(plan, settings) for settings in modules))


def _pipelines_of_instance(plan: Plan, module: ModuleSettings) -> int:
    """Pipelines among which a module's state is sharded."""
    return 1 if module.sharding is Sharding.NONE else max(1, num_pipelines(plan) // module.instances)


def num_nodes(plan: Plan) -> int:
    """Number of nodes with a rank of the plan."""
    return len({plan.cluster.node_of(rank) for rank in plan.ranks})


def nodes_of_first(plan: Plan, kept: int) -> int:
    """Nodes that the first `kept` pipelines need once they are moved to the first nodes."""
    ranks = {rank for stage in plan.stages if stage.replica < kept for rank in stage.flat_ranks}
    return len({plan.cluster.node_of(rank) for rank in range(len(ranks))})


def with_pipelines(plan: Plan, kept: int, schedule: Schedule, cost: CostModel) -> Plan:
    """Run the plan's batch on its first `kept` pipelines, moved together onto the first nodes.

    All LLM microbatches are distributed round-robin, so that their counts differ by at most one, along with
    the microbatches of other modules for the same samples. Instances of sharded state stay whole.

    Args:
        schedule: of the programs.

    Raises:
        ValueError: `kept` is out of range or splits an instance, the nodes are of several kinds, which
            pipelines cannot change, or the plan does not run on fewer ranks.
    """
    total = num_pipelines(plan)
    if not 1 <= kept <= total:
        raise ValueError(f"pipelines left: want 1 to {total}, got {kept}")
    if kept == total:
        return plan
    if len(set(plan.cluster.nodes)) > 1:
        raise ValueError(f"cluster {plan.cluster.name!r} has nodes of several kinds: pipelines keep theirs")
    stages_kept = [stage for stage in plan.stages if stage.replica < kept]
    ranks = sorted({rank for stage in stages_kept for rank in stage.flat_ranks})
    position = {rank: index for index, rank in enumerate(ranks)}
    stages = tuple(
        replace(stage, id=index, ranks=tuple(tuple(position[rank] for rank in row) for row in stage.ranks))
        for index, stage in enumerate(stages_kept)
    )
    settings = _with_instances(plan, kept)
    microbatches = _redistributed(plan, kept)
    draft = replace(
        plan, stages=stages, microbatches=microbatches, programs=(), settings=settings, token_shards=()
    )
    scheduled_plan = scheduled(draft, schedule, cost)
    shards = tuple(
        shard
        for module in dict.fromkeys(shard.module for shard in plan.token_shards)
        for shard in token_shards(scheduled_plan, module, longest_first_exchanged)
    )
    return replace(scheduled_plan, token_shards=shards)


def _with_instances(plan: Plan, kept: int) -> Settings:
    """Settings with as many instances of every module as `kept` pipelines form."""
    settings = plan.settings
    for each in plan.settings.modules:
        if each.sharding is Sharding.NONE or each.instances == 1:
            continue
        pipelines = _pipelines_of_instance(plan, each)
        if kept % pipelines:
            raise ValueError(
                f"pipelines left: module {each.module!r} shards its weights among {pipelines} in each of its "
                f"{each.instances} instances, want a multiple of {pipelines}, got {kept}"
            )
        settings = settings.with_module(replace(each, instances=kept // pipelines))
    return settings


def _redistributed(plan: Plan, kept: int) -> tuple[Microbatch, ...]:
    groups = _groups(plan)
    microbatches: list[Microbatch] = []
    for module in plan.model.modules:
        for replica in range(kept):
            own_microbatches = [
                each for group in groups[replica::kept] for each in group if each.module == module.name
            ]
            microbatches += [
                replace(each, replica=replica, index=index) for index, each in enumerate(own_microbatches)
            ]
    return tuple(microbatches)


def _groups(plan: Plan) -> list[list[Microbatch]]:
    """Groups of microbatches to distribute as one, in the order of samples: the first of every pipeline, then
    the second, ...

    A group is an LLM microbatch with those of other modules for its samples, or several LLM microbatches
    fed by one of another module. Whole pipelines if samples move between pipelines.

    Complexity: O(items + microbatches x log microbatches).
    """
    ordered, llm = sorted(plan.microbatches, key=lambda each: each.index), plan.model.llm.name
    first_of: dict[int, int] = {}
    graph = nx.Graph()
    for number, microbatch in enumerate(ordered):
        graph.add_edges_from((number, first_of.setdefault(item.sample, number)) for item in microbatch.items)
    groups = [[ordered[number] for number in sorted(each)] for each in nx.connected_components(graph)]
    if any(len({each.replica for each in group}) > 1 for group in groups):
        return [
            [each for each in ordered if each.replica == pipeline] for pipeline in range(num_pipelines(plan))
        ]
    return sorted(groups, key=lambda group: min((m.module != llm, m.index, m.replica) for m in group))
