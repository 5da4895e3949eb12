"""A paper's printed stage times in the simulator: the iteration time that follows from them.

The plan is a real one (stages of a zoo model, graph-aware 1F1B programs, lowered); only the
durations are the paper's. Links cost nothing, because the papers print no transfer times and
their stage times are all there is; `bytes_per_s` of the cluster below is merely large.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sim.step.engine import simulate
from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.model.model_graph import ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import draft_plan
from workbench.schedule.action import Action, Pass

_FREE = Link(name="free", bytes_per_s=1e30, latency_s=0.0)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage of a module on one microbatch."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s

    @classmethod
    def from_ms(cls, forward_ms: str, backward_ms: str) -> "StageTimes":
        """Make stage times from printed cells."""
        return cls(float(forward_ms) / 1e3, float(backward_ms) / 1e3)


@dataclass(frozen=True, slots=True)
class PrintedRun:
    """Times of a simulated step with printed stage times."""

    iteration_s: float
    plan_hash: str


def passes_s(times: Callable[[int], StageTimes]) -> Callable[[Action], float]:
    """Durations of actions where only passes take time: those of their stage for any microbatch."""

    def duration_s(action: Action) -> float:
        if action.stage is None or action.kind not in (Pass.F, Pass.B):
            return 0.0
        stage = times(action.stage)
        return stage.forward_s if action.kind is Pass.F else stage.backward_s

    return duration_s


def pipeline_plan(model: ModelGraph, counts: Mapping[str, int], num_microbatches: int) -> Plan:
    """Modules cut evenly into `counts` stages on separate ranks; one sample per microbatch.

    A stage is one rank here: the effect of tensor parallelism is included in the printed times.
    """
    stages: list[Stage] = []
    for module in model.modules:
        layers, count = len(module.layers), counts[module.name]
        if not 1 <= count <= layers:
            raise ValueError(f"module {module.name!r}: want 1..{layers} stages, got {count}")
        bounds = [layers * k // count for k in range(count + 1)]
        for k in range(count):
            rank = len(stages)
            stages.append(
                Stage(
                    id=rank,
                    module=module.name,
                    replica=0,
                    layers=(bounds[k], bounds[k + 1]),
                    ranks=((rank,),),
                )
            )
    draft = microbatched("printed", model, free_cluster(len(stages)), tuple(stages), num_microbatches)
    return with_programs(draft)


def run_printed(
    model: ModelGraph, counts: Mapping[str, int], times: Mapping[str, StageTimes], num_microbatches: int
) -> PrintedRun:
    """Simulate one step whose stages take the printed times.

    Args:
        model: its frozen flags decide which stages have a backward.
        counts: stages by module name.
        times: by module name; a stage without gradients has no backward, whatever is printed.
        num_microbatches: of the step.
    """
    plan = pipeline_plan(model, counts, num_microbatches)
    return run_plan(plan, lambda stage: times[stage.module])


def run_plan(plan: Plan, times: Callable[[Stage], StageTimes]) -> PrintedRun:
    """Simulate one step whose stages take those times."""
    trace = simulate(lower(plan), passes_s(lambda number: times(plan.stage[number])))
    return PrintedRun(trace.iteration_s, plan_hash(plan))


def free_cluster(num_ranks: int) -> Cluster:
    """Ranks whose communication takes no time."""
    node = Node(device="printed", num_ranks=num_ranks, memory_bytes=2**60)
    return uniform("printed", node, num_nodes=1, intra=_FREE, inter=_FREE)


def microbatched(
    name: str, model: ModelGraph, cluster: Cluster, stages: tuple[Stage, ...], num_microbatches: int
) -> Plan:
    """A draft plan with one sample, with one item of each modality, per microbatch."""
    segments = tuple(Segment(module.modality, 0, 1, 1) for module in model.modules)
    batch = tuple(Sample(id=index, segments=segments) for index in range(num_microbatches))
    job = Job(name=name, model=model, cluster=cluster, batch=batch)
    return replace(draft_plan(job, name), stages=stages)
