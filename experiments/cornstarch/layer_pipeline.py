"""A pipeline over all layers of a model, cut anywhere: stages that follow the layers, not the modules."""

from collections.abc import Callable, Mapping, Sequence

from experiments.cornstarch.modelled import total
from experiments.harness.printed_pipeline import PrintedRun, StageTimes, free_cluster, microbatched, passes_s
from sim.step.engine import simulate
from workbench.balance.stages.partition import partition
from workbench.model.model_graph import ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Stage

LayerTimes = Mapping[str, Sequence[StageTimes]]


def layer_plan(
    model: ModelGraph,
    times: LayerTimes,
    balanced: Callable[[StageTimes], float],
    num_ranks: int,
    num_microbatches: int,
) -> Plan:
    """One rank per part of the partition of all layers in model order.

    A part that crosses from one module into the next becomes two stages on the same rank.

    Args:
        model: a chain of modules.
        times: [layers] seconds by module.
        balanced: what of a layer's times the partition balances.
        num_ranks, num_microbatches: of the pipeline.
    """
    owners = [(module.name, index) for module in model.modules for index in range(len(module.layers))]
    cuts = partition([balanced(times[name][index]) for name, index in owners], num_ranks)
    stages: list[Stage] = []
    for rank, (first, end) in enumerate(cuts):
        for name in dict.fromkeys(owner for owner, _ in owners[first:end]):
            mine = [index for owner, index in owners[first:end] if owner == name]
            layers = (mine[0], mine[-1] + 1)
            stages.append(Stage(id=len(stages), module=name, replica=0, layers=layers, ranks=((rank,),)))
    return with_programs(
        microbatched("printed-layers", model, free_cluster(num_ranks), tuple(stages), num_microbatches)
    )


def run_layers(plan: Plan, times: LayerTimes) -> PrintedRun:
    """Simulate one step whose stages take the sum of their layers' times."""

    def stage_times(stage: int) -> StageTimes:
        held = plan.stage[stage]
        return total(times[held.module][slice(*held.layers)])

    trace = simulate(lower(plan), passes_s(stage_times))
    return PrintedRun(trace.iteration_s, plan_hash(plan))
