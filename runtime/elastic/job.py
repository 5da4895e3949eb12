"""A training job whose nodes may join and leave, and the plan of one step for a layout of nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from math import lcm

import torch

from runtime.data.batches import DataSource
from runtime.run_settings import TORCH_TYPE
from runtime.step.optimizer import OptimizerSettings
from workbench.cost.hardware import Cluster, Link, Node
from workbench.data.sample import Sample
from workbench.elastic.batch_distribution import distribute
from workbench.elastic.instantiate import SumSeconds, unsummed
from workbench.elastic.layout import NodeLayout
from workbench.elastic.model_chain import ModelChain
from workbench.elastic.node_specification import TemplateSet
from workbench.elastic.template import TemplateStage
from workbench.model.model_graph import ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.microbatches import chunked_microbatches
from workbench.plan.parameter_shards import in_units
from workbench.plan.plan import ModuleSettings, Plan, Precision, Settings, Sharding
from workbench.plan.stage import Stage

STRATEGY = "oobleck"
STATES_PER_WEIGHT = 3  # the weight and AdamW's two moments
LOOPBACK = Link(name="loopback", bytes_per_s=1e9, latency_s=1e-5)
NODE_BYTES = 2**34


class Reduction(StrEnum):
    """When gradients are summed over the ranks of a layer."""

    LAYERWISE = (
        "layerwise"  # each layer's as soon as they are complete, overlapping earlier layers' backwards
    )
    AFTER_BACKWARD = "after backward"  # all of a stage's after its last backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process: one rank of a node."""

    node: str
    slot: int

    def __str__(self) -> str:
        return f"rank {self.slot} of node {self.node!r}"


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """What is trained, and the time limits.

    No `slots`: the widths of stages are cached on the instance.

    Args:
        model, chain: the model and its layers in the order in which templates partition them.
        templates: planned once; their nodes have as many GPUs as nodes here have processes. The ranks of
            a stage split the samples of its microbatches; stages may have different numbers of ranks.
        sharding: whether these ranks also shard parameters: each has all of the stage's layers, or a part
            of every weight and of its optimizer state (parameters), gathered layer by layer for use.
        batch: step -> its samples, always the same number.
        samples_per_microbatch: microbatches are assigned to pipelines by the time of their templates.
        sum_s: seconds of gradient sums over pipelines, by which the fastest pipelines are chosen.
        reduction: when gradients are summed; the sums are the same. Those of sharded weights are
            always reduce-scattered, and then added up, layer by layer.
        source: data by sample id.
        data: identifies the data of the steps among trainings; None: not identified.
        wait_s: limit of every wait of a rank for another; a hanging rank is detected after it.
        step_s: limit from the start of a step until every rank has complete gradients.

    Raises:
        ValueError: microbatches that ranks cannot split, weights sharded among unequal numbers of ranks, an
            unsupported level of sharding, clipping, templates of another model.
    """

    model: ModelGraph
    chain: ModelChain
    templates: TemplateSet
    batch: Callable[[int], tuple[Sample, ...]]
    source: DataSource
    data: str | None = None
    samples_per_microbatch: int = 1
    sum_s: SumSeconds = unsummed
    sharding: Sharding = Sharding.NONE
    seed: int = 0
    precision: Precision = Precision.FLOAT32
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    reduction: Reduction = Reduction.LAYERWISE
    wait_s: float = 10.0
    step_s: float = 60.0

    def __post_init__(self) -> None:
        if self.samples_per_microbatch % self.lanes:
            ranks = " or ".join(map(str, self.stage_widths))
            raise ValueError(
                f"microbatches of {self.samples_per_microbatch} samples are split among the {ranks} "
                f"ranks of a stage: want a multiple of {self.lanes}"
            )
        self._check_sharding()
        if self.optimizer.clip_norm is not None:
            raise ValueError(
                "clipping sums a norm after the step was agreed on, so a failure there would leave it "
                f"half done: want clip_norm None, got {self.optimizer.clip_norm}"
            )
        if len(self.chain.owners) != self.templates.templates[0].num_layers:
            raise ValueError(
                f"the model has {len(self.chain.owners)} layers, its templates "
                f"{self.templates.templates[0].num_layers}"
            )
        if not 0 < self.wait_s <= self.step_s:
            raise ValueError(f"want 0 < wait_s <= step_s, got {self.wait_s} and {self.step_s}")

    def _check_sharding(self) -> None:
        if self.sharding not in (Sharding.NONE, Sharding.PARAMETERS):
            raise ValueError(
                "sharding: the ranks of a stage shard everything or nothing, got "
                f"{self.sharding.value!r}; want {Sharding.NONE.value!r} or {Sharding.PARAMETERS.value!r}"
            )
        if self.is_sharded and len(self.stage_widths) > 1:
            raise ValueError(
                f"sharding: weights are sharded among equally many ranks in every stage, stages have "
                f"{list(self.stage_widths)}; want templates of one width, or {Sharding.NONE.value!r}"
            )
        if self.is_sharded and self.lanes == 1:
            raise ValueError(
                "sharding: weights are sharded among the ranks of a stage, and stages have one rank; want "
                f"templates of 2 or more GPUs a stage, or {Sharding.NONE.value!r}"
            )
        if self.is_sharded and self.reduction is not Reduction.LAYERWISE:
            raise ValueError(
                f"gradients of sharded weights are summed {Reduction.LAYERWISE.value}, got reduction "
                f"{self.reduction.value!r}"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has only parts of weights."""
        return self.sharding is Sharding.PARAMETERS

    @property
    def ranks_per_node(self) -> int:
        return self.templates.templates[0].gpus_per_node

    @cached_property
    def stage_widths(self) -> tuple[int, ...]:
        """Numbers of ranks of stages, ascending."""
        return tuple(sorted({s.num_gpus for t in self.templates.templates for s in t.stages}))

    @property
    def lanes(self) -> int:
        """Number of parts of a microbatch that a pipeline processes in parallel: every width divides it."""
        return lcm(*self.stage_widths)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_TYPE[self.precision]

    @property
    def num_microbatches(self) -> int:
        return len(self.batch(0)) // self.samples_per_microbatch

    def layer_bytes(self) -> tuple[int, ...]:
        """[L] bytes of weights and optimizer state of each layer of the chain."""
        return tuple(
            STATES_PER_WEIGHT
            * self.precision.num_bytes
            * sum(parameter.num_elements for parameter in self.model.module(name).layers[index].parameters())
            for name, index in self.chain.owners
        )


def members_of(layout: NodeLayout, ranks_per_node: int) -> tuple[Member, ...]:
    """The process of every rank, in rank order."""
    return tuple(
        Member(node=node, slot=slot)
        for pipeline in layout.pipelines
        for node in pipeline
        for slot in range(ranks_per_node)
    )


def held_by(job: ElasticJob, layout: NodeLayout) -> dict[Member, tuple[int, ...]]:
    """Process -> the layers of the chain that it has."""
    layers_of: dict[Member, tuple[int, ...]] = {}
    for pipeline in layout.pipelines:
        members = members_of(NodeLayout(pipelines=(pipeline,)), job.ranks_per_node)
        stages = job.templates.of_size(len(pipeline)).stages
        layers_of.update(
            (member, tuple(range(stage.first, stage.end)))
            for member, stage in zip(members, _per_rank(stages), strict=True)
        )
    return layers_of


def _per_rank(stages: Sequence[TemplateStage]) -> Iterator[TemplateStage]:
    """The stage of every rank of a pipeline, in rank order."""
    return (stage for stage in stages for _ in range(stage.num_gpus))


def plan_step(job: ElasticJob, layout: NodeLayout, batch: Sequence[Sample]) -> Plan:
    """The plan of one step: pipelines of the layout are replicas, partitioned by their templates.

    Microbatches are consecutive samples, assigned to pipelines by Eq. 2.6 of the Oobleck chapter. Where
    stages have several ranks, their pipeline is several parallel replicas, each with its part of the samples
    of every microbatch; their number is the least common multiple of the stages' numbers of ranks. A rank of
    a stage with fewer ranks serves several replicas in turn, with one copy of its weights. Ranks that shard
    parameters are an instance, which has every weight once.

    Raises:
        ValueError: fewer microbatches than pipelines, samples that do not fill microbatches.
    """
    stages: list[Stage] = []
    first_rank, lanes = 0, job.lanes
    for index, pipeline in enumerate(layout.pipelines):
        cuts = job.templates.of_size(len(pipeline)).stages
        starts = list(accumulate((cut.num_gpus for cut in cuts), initial=first_rank))
        for lane in range(lanes):
            for start, cut in zip(starts, cuts, strict=False):
                ranks = ((start + lane * cut.num_gpus // lanes,),)
                stages += [
                    Stage(
                        id=len(stages) + run,
                        module=module,
                        replica=index * lanes + lane,
                        layers=(first, end),
                        ranks=ranks,
                    )
                    for run, (module, first, end) in enumerate(job.chain.runs_of(cut))
                ]
        first_rank = starts[-1]
    node = Node(device="host", num_ranks=job.ranks_per_node, memory_bytes=NODE_BYTES)
    cluster = Cluster(name="elastic", nodes=(node,) * layout.num_nodes, intra=LOOPBACK, inter=LOOPBACK)
    draft = Plan(
        strategy=STRATEGY,
        model=job.model,
        cluster=cluster,
        batch=tuple(batch),
        stages=tuple(stages),
        microbatches=(),
        programs=(),
        settings=Settings(precision=job.precision, modules=_module_settings(job, layout)),
    )
    return with_programs(in_units(_with_microbatches(job, layout, draft)))


def _module_settings(job: ElasticJob, layout: NodeLayout) -> tuple[ModuleSettings, ...]:
    if not job.is_sharded:
        return ()
    return tuple(
        ModuleSettings(module=module.name, sharding=job.sharding, instances=len(layout.pipelines))
        for module in job.model.modules
    )


def _with_microbatches(job: ElasticJob, layout: NodeLayout, draft: Plan) -> Plan:
    size, batch = job.samples_per_microbatch, draft.batch
    if len(batch) % size:
        raise ValueError(f"a batch of {len(batch)} samples does not fill microbatches of {size}")
    chunks = [batch[start : start + size] for start in range(0, len(batch), size)]
    counts = distribute([job.templates.of_size(nodes).microbatch_s for nodes in layout.sizes], len(chunks))
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    lanes = job.lanes
    part = size // lanes
    assigned = {
        index * lanes + lane: [chunk[lane * part : (lane + 1) * part] for chunk in chunks[end - count : end]]
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
        for lane in range(lanes)
    }
    return replace(draft, microbatches=chunked_microbatches(draft, assigned))
