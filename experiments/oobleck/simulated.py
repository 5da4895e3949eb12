"""Pipelines of templates through the simulator: what the planning formula says beside 1F1B as it runs."""

from collections.abc import Sequence

from experiments.harness.printed_pipeline import StageTimes, free_cluster, microbatched, passes_s
from sim.step.sweep import Sweep
from workbench.elastic.instantiate import Instantiation
from workbench.elastic.model_chain import ModelChain
from workbench.elastic.node_specification import TemplateSet
from workbench.elastic.template import Template
from workbench.model.model_graph import ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import Stage

FORWARD_SHARE = 1 / 3


def pipeline_s(
    model: ModelGraph,
    chain: ModelChain,
    template: Template,
    num_microbatches: int,
    forward_share: float = FORWARD_SHARE,
) -> float:
    """Seconds of one iteration of a template's pipeline, without links; so much of a stage is forward.

    A stage that crosses modules is one plan stage per module on the same rank, which shares its time
    by layers.
    """
    stages: list[Stage] = []
    seconds: list[float] = []
    for rank, stage in enumerate(template.stages):
        for name, first, end in chain.runs_of(stage):
            stages.append(
                Stage(id=len(stages), module=name, replica=0, layers=(first, end), ranks=((rank,),))
            )
            seconds.append(stage.time_s * (end - first) / (stage.end - stage.first))
    cluster = free_cluster(len(template.stages))
    plan = with_programs(microbatched("template", model, cluster, tuple(stages), num_microbatches))

    def stage_times(stage: int) -> StageTimes:
        return StageTimes(forward_share * seconds[stage], (1 - forward_share) * seconds[stage])

    return Sweep(lower(plan)).iteration_s(passes_s(stage_times))


def simulated_s(
    model: ModelGraph,
    chain: ModelChain,
    planned: TemplateSet,
    chosen: Instantiation,
    forward_share: float = FORWARD_SHARE,
) -> float:
    """Seconds of the slowest pipeline of an instantiation."""
    pairs: Sequence[tuple[int, int]] = sorted(set(zip(chosen.sizes, chosen.microbatches, strict=True)))
    return max(pipeline_s(model, chain, planned.of_size(size), count, forward_share) for size, count in pairs)
