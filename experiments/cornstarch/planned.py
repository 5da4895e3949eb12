"""Our own planner on a paper's job: stages of each side, and the plan's time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from experiments.cornstarch.modelled import A40, Setting, layer_times, module_tp
from experiments.harness.printed_pipeline import StageTimes
from sim.predict import step_s
from workbench.balance.stages.partition import partition
from workbench.cost.hardware import Cluster, Node, uniform
from workbench.cost.model import CostModel
from workbench.data.corpus import fixed_samples
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import ModelGraph
from workbench.plan.codec import plan_hash
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Settings
from workbench.strategies import cornstarch, encoders_colocated

Strategy = Callable[[Job, CostModel], Plan]


class Awareness(StrEnum):
    """What partitioning balances: forward plus backward, or only forward."""

    AWARE = "aware"
    UNAWARE = "unaware"


class Placement(StrEnum):
    """Encoders on separate ranks, or all of them in the same leading stages."""

    DISJOINT = "disjoint"
    COLOCATED = "colocated"


STRATEGIES: Mapping[tuple[Placement, Awareness], Strategy] = {
    (Placement.DISJOINT, Awareness.AWARE): cornstarch.plan,
    (Placement.DISJOINT, Awareness.UNAWARE): cornstarch.plan_frozen_unaware,
    (Placement.COLOCATED, Awareness.AWARE): encoders_colocated.plan_frozen_aware,
    (Placement.COLOCATED, Awareness.UNAWARE): encoders_colocated.plan,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan's stage counts by module, its ranks, its simulated iteration and its hash."""

    counts: tuple[tuple[str, int], ...]
    num_ranks: int
    iteration_s: float
    plan_hash: str

    @property
    def stages(self) -> dict[str, int]:
        return dict(self.counts)


def simulated(strategy: Strategy, job: Job, cost: CostModel) -> Planned:
    """Plan the job, price it, simulate one step."""
    plan = strategy(job, cost)
    counts = tuple((module, len(chain)) for (module, _), chain in plan.chain.items())
    return Planned(counts, len(plan.ranks), step_s(lower(plan), cost), plan_hash(plan))


def paper_job(
    model: ModelGraph, setting: Setting, counts: Mapping[str, int], num_microbatches: int, cost: CostModel
) -> Job:
    """The papers' testbed (nodes of four A40) and batch; every module with its stage count.

    As many nodes as the stages need, so that no layout is refused for want of GPUs.
    """
    num_ranks = sum(counts.values()) * setting.tp * setting.cp
    items = {modality: (tokens,) for modality, tokens in setting.items if modality in _modalities(model)}
    num_samples = num_microbatches * setting.microbatch_samples
    return Job(
        name=model.name,
        model=model,
        cluster=testbed(num_ranks, cost),
        batch=fixed_samples(num_samples, text_tokens=setting.text_tokens, items=items),
        microbatch_samples=setting.microbatch_samples,
        layouts=tuple(
            ModuleLayout(
                module=module, pp=count, tp=module_tp(model.module(module), setting.tp), cp=setting.cp
            )
            for module, count in counts.items()
        ),
        settings=Settings(
            precision=Precision(setting.precision),
            modules=tuple(
                ModuleSettings(module=module.name, recompute=setting.recompute) for module in model.modules
            ),
        ),
        profile=A40,
    )


def best_split(
    model: ModelGraph, setting: Setting, cost: CostModel, awareness: Awareness, num_stages: int
) -> dict[str, int]:
    """Stages of each module with the smallest bottleneck, when all encoders share the leading ones.

    Ties go to more LLM stages. Complexity: O(stages) partitions.
    """
    times = layer_times(model, setting, cost)
    encoders = [module.name for module in model.encoders]
    llm = model.llm.name

    def bottleneck_s(num_encoder_stages: int) -> float:
        sums = [
            sum(stage)
            for stage in zip(
                *(_stage_costs(times[name], num_encoder_stages, awareness) for name in encoders), strict=True
            )
        ]
        return max(*sums, *_stage_costs(times[llm], num_stages - num_encoder_stages, awareness))

    best = min(range(1, num_stages), key=bottleneck_s)
    return dict.fromkeys(encoders, best) | {llm: num_stages - best}


def _stage_costs(times: Sequence[StageTimes], count: int, awareness: Awareness) -> list[float]:
    costs = [time.total_s if awareness is Awareness.AWARE else time.forward_s for time in times]
    if count > len(costs):
        return [float("inf")] * count
    return [float_sum(costs[first:end]) for first, end in partition(costs, count)]


def testbed(num_ranks: int, cost: CostModel) -> Cluster:
    """Nodes of four A40s, as both versions of the paper have them."""
    node = Node(device=A40, num_ranks=4, memory_bytes=cost.profile.memory_bytes)
    intra, inter = (cost.profile.machine_link(scope).link for scope in ("intra", "inter"))
    return uniform("a40-testbed", node, num_nodes=-(-num_ranks // node.num_ranks), intra=intra, inter=inter)


def _modalities(model: ModelGraph) -> set[str]:
    return {module.modality for module in model.modules}
