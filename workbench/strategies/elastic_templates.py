"""Pipeline templates of a job: its pipelines on any number of nodes, and what a change of nodes moves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.cost.hardware import Node
from workbench.cost.model import CostModel
from workbench.cost.node_copy import node_copy_s
from workbench.elastic.instantiate import Instantiation, fastest
from workbench.elastic.model_chain import ModelChain, chain_order, model_chain
from workbench.elastic.node_specification import TemplateSet, plan_templates
from workbench.elastic.template import Template, TemplateStage
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.memory.layer import StateBytes
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import Sharding
from workbench.planner.assembly import layout_of
from workbench.planner.layer_totals import Totals
from workbench.planner.layout_choice import ModuleChoice, on_tensor_ranks
from workbench.planner.module_price import ModulePrices
from workbench.planner.sharded_step import PREFETCHED


@dataclass(frozen=True, kw_only=True)
class ElasticTemplates:
    """A job's templates with the prices of its layers; all stages have equally many GPUs.

    Args:
        job: on as many nodes as templates were planned for.
        chain: its layers as templates cut them.
        planned: the templates.
        prices: of its modules.
        layers: [L] price of each layer of the chain.
        sharing: GPUs of a stage that each hold all its layers and split the samples of a microbatch.
        sharding: what these also shard: nothing, or parameters, which they all-gather for use.
    """

    job: Job
    chain: ModelChain
    planned: TemplateSet
    prices: ModulePrices
    layers: tuple[Totals, ...]
    sharing: int = 1
    sharding: Sharding = Sharding.NONE

    @property
    def num_microbatches(self) -> int:
        return len(self.job.batch) // self.job.microbatch_samples

    @cached_property
    def layer_bytes(self) -> tuple[float, ...]:
        """[L] bytes of weights and optimizer state of a layer on each GPU of its stage, which a copy
        moves.
        """
        size = self.prices.size
        return tuple(
            (held.weights * size.weight + held.trained * (size.optimizer if held.trained else 0))
            / self._parts
            for held in (layer.held for layer in self.layers)
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint, which a restarting job reads."""
        return checkpoint_bytes(self.job.model, self.job.settings)

    @property
    def _width(self) -> int:
        """GPUs per stage."""
        return self.planned.templates[0].stages[0].num_gpus

    @property
    def _tp(self) -> int:
        """GPUs of a stage among which its layers are cut."""
        return self._width // self.sharing

    @property
    def _parts(self) -> int:
        """GPUs of a stage among which each weight is sharded."""
        return self.sharing if self.sharding is Sharding.PARAMETERS else 1

    def microbatch_capacity(self, template: Template) -> tuple[int, ...]:
        """[stages] maximum samples of a microbatch by the memory of each stage's GPUs.

        1F1B keeps activations of as many microbatches as there are stages from this one to the last, plus
        the working memory of one layer. Both grow with the samples; weights, gradients and optimizer state,
        and layers gathered in full where GPUs shard parameters, do not.
        """
        capacity_bytes, size = _rank_bytes(self.job.cluster.nodes[0]), self.job.microbatch_samples
        capacities = []
        for index, stage in enumerate(template.stages):
            layers = self.layers[stage.first : stage.end]
            state_bytes = self.chain.chain.stage_bytes(stage.first, stage.end, stage.num_gpus)
            free_bytes = (
                capacity_bytes
                - state_bytes
                - (_gathered_bytes(self.prices.size, layers) if self._parts > 1 else 0)
            )
            in_flight = len(template.stages) - index
            kept_bytes = in_flight * sum(layer.kept_bytes for layer in layers)
            total_bytes = kept_bytes + max(layer.working_bytes for layer in layers)
            capacities.append(int(max(0, free_bytes) * size // total_bytes))
        return tuple(capacities)

    def at(self, num_nodes: int) -> Instantiation:
        """The pipelines with the shortest step on `num_nodes` nodes, including the all-reduce of gradients.

        Raises:
            ValueError: fewer nodes than the threshold, or fewer microbatches than pipelines.
        """
        return fastest(self.planned, num_nodes, self.num_microbatches, self.sum_s)

    def samples_per_s(self, num_nodes: int) -> float:
        """Throughput on `num_nodes` nodes: the slowest pipeline, then the all-reduce over all pipelines."""
        return len(self.job.batch) / self.at(num_nodes).step_s

    def grid_samples_per_s(self, num_nodes: int) -> float:
        """Throughput of the best grid of equal pipelines, with the other nodes idle; 0 if none fits."""
        best_s = float("inf")
        for size in self.planned.specification.sizes:
            replicas = min(num_nodes // size, self.num_microbatches)
            if replicas:
                template = self.planned.of_size(size)
                iteration_s = template.iteration_s(-(-self.num_microbatches // replicas))
                best_s = min(best_s, iteration_s + self.sum_s(size, replicas))
        return len(self.job.batch) / best_s

    @property
    def copy_s(self) -> float:
        """Seconds until the node with most state has copied it all: each GPU from one at the same
        position.
        """
        bytes_by_template = (
            [self._held_bytes(stage, index) for stage in template.stages for index in range(stage.num_gpus)]
            for template in self.planned.templates
        )
        return max(
            node_copy_s(self.job.cluster, dict(enumerate(rank_bytes))) for rank_bytes in bytes_by_template
        )

    def _held_bytes(self, stage: TemplateStage, index: int) -> float:
        """Weights and optimizer state on one GPU of a stage: a module of smaller tp is on the first ones."""
        return float_sum(
            self.layer_bytes[layer]
            for layer in range(stage.first, stage.end)
            if index < layout_of(self.job, self.chain.owners[layer][0]).tp * self.sharing
        )

    def sum_s(self, size: int, num_pipelines: int) -> float:
        """Seconds to all-reduce the gradients of a template's busiest stage over `num_pipelines`, without
        overlap.

        It uses the links between nodes: no two pipelines share one, and no stage spans two.
        """
        stages = self.planned.of_size(size).stages
        elements = max(
            float_sum(layer.held.trained for layer in self.layers[s.first : s.end]) for s in stages
        )
        members, ranks_per_node = self.sharing // self._parts, self.job.cluster.nodes[0].num_ranks
        ranks = [
            node * ranks_per_node + position for node in range(num_pipelines) for position in range(members)
        ]
        return self.prices.sum_s(elements / self._parts, ranks)


def elastic_templates(
    job: Job,
    cost: CostModel,
    *,
    num_nodes: int,
    num_faults: int,
    sharing: int = 1,
    sharding: Sharding = Sharding.NONE,
) -> ElasticTemplates:
    """Templates of all node counts for a job on `num_nodes` nodes like its cluster's.

    A stage has as many GPUs as the largest tp of the job's layouts; a module of smaller tp uses some of
    them. Or, without tp, `sharing` GPUs, each of which computes its part of a microbatch's samples. A layer
    adds its weights, gradients and optimizer state to a GPU. For activations, (layers of a stage) x
    (microbatches in flight) is about the number of layers of the model in every stage of 1F1B: those of one
    microbatch in all layers, and the largest working memory, are reserved on every GPU. If GPUs of a stage
    shard parameters, two layers are gathered in full at a time, and a layer takes as long as its passes or
    its collectives, which overlap those of its neighbours.

    Source: Oobleck chapter, section 2.4.

    Args:
        cost: model of the machine.
        num_faults: f, nodes that may fail at the same moment.
        sharing: GPUs of a stage that split samples.
        sharding: NONE, or PARAMETERS to also shard weights and optimizer state.

    Raises:
        ValueError: nodes of several kinds, a batch that does not fill its microbatches, samples that cannot
            be split, context or expert parallelism, or what templates refuse.

    Complexity: that of `exact_templates`.
    """
    node = _check(job, num_nodes)
    cluster = replace(job.cluster, nodes=(node,) * num_nodes)
    job = replace(job, cluster=cluster, max_ranks=None)
    prices = ModulePrices(job, cost)
    tp = max((layout.tp for layout in job.layouts), default=1)
    _check_sharing(job, sharing, tp)
    gpu_layers = _GpuLayers(
        prices=prices,
        layers=_priced(job, prices, sharing),
        parts=sharing if sharding is Sharding.PARAMETERS else 1,
    )
    layers = tuple(gpu_layers.layers[module][layer] for module, layer in chain_order(job.model))
    free_bytes = max(0, _rank_bytes(node) - gpu_layers.reserved_bytes(layers))
    chain = model_chain(job.model, (tp * sharing,), gpu_layers.layer_s, gpu_layers.held_bytes, free_bytes)
    return ElasticTemplates(
        job=job,
        chain=chain,
        planned=plan_templates(chain.chain, node.num_ranks, num_nodes, num_faults),
        prices=prices,
        layers=layers,
        sharing=sharing,
        sharding=sharding,
    )


def _priced(job: Job, prices: ModulePrices, sharing: int) -> dict[str, Sequence[Totals]]:
    """By module, the prices of its layers for a GPU's part of a microbatch's samples."""
    degrees = {layout.module: layout.tp for layout in job.layouts}
    samples = job.microbatch_samples // sharing
    return {
        name: prices.layers(on_tensor_ranks(job.settings.of(name), degrees.get(name, 1)), samples)
        for name in (module.name for module in job.model.modules)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _GpuLayers:
    """Layers on one GPU of a stage.

    Args:
        layers: of each module, unsharded.
        parts: GPUs among which parameters are sharded.
    """

    prices: ModulePrices
    layers: Mapping[str, Sequence[Totals]]
    parts: int

    def held_bytes(self, module: str, layer: int, _: int) -> int:
        """Bytes of weights, gradients and optimizer state."""
        held, size = self.layers[module][layer].held, self.prices.size
        state = held.weights * size.weight + held.trained * (size.gradient + size.optimizer)
        return round(state / self.parts)

    def layer_s(self, module: str, layer: int, _: int) -> float:
        """Seconds of its passes, or of the collectives beside them if these take longer."""
        price = self.layers[module][layer]
        exchange = self.prices.sharded_exchange(ModuleChoice(module=module, dp=self.parts), price.held)
        behind_s = exchange.gather_s + exchange.scatter_s if price.backward_s else 0.0
        return max(price.forward_s, exchange.gather_s) + max(price.backward_s, behind_s)

    def reserved_bytes(self, layers: Sequence[Totals]) -> int:
        """Memory that a GPU reserves for activations, working memory and layers gathered in full."""
        reserved = float_sum(layer.kept_bytes for layer in layers) + max(
            layer.working_bytes for layer in layers
        )
        return round(reserved + (_gathered_bytes(self.prices.size, layers) if self.parts > 1 else 0))


def _check_sharing(job: Job, sharing: int, tp: int) -> None:
    if sharing < 1:
        raise ValueError(f"{job.name}: want 1 or more ranks that split samples, got {sharing}")
    size = job.microbatch_samples
    if size % sharing:
        raise ValueError(
            f"{job.name}: {sharing} ranks of a stage cannot split microbatches of {size} samples; "
            f"nearest: microbatch_samples {-(-size // sharing) * sharing}"
        )
    if sharing > 1 and tp > 1:
        raise ValueError(
            f"{job.name}: ranks of a stage cut layers or split samples, not both; got tp {tp} and "
            f"{sharing} that share"
        )


def _gathered_bytes(size: StateBytes, layers: Sequence[Totals]) -> int:
    """Bytes of the layers that are gathered in full at a time where GPUs shard parameters."""
    return PREFETCHED * round(
        max(layer.held.weights * size.weight + layer.held.trained * size.gradient for layer in layers)
    )


def _rank_bytes(node: Node) -> int:
    """Memory of a rank; ranks that share a node's cores also share its memory."""
    return node.memory_bytes if node.num_cores is None else node.memory_bytes // node.num_ranks


def _most_of_a_kind(job: Job) -> str:
    """The largest group of equal nodes: of a pool that takes every module, if there is one."""
    cluster, modules = job.cluster, [module.name for module in job.model.modules]
    for pool in sorted(job.pools, key=lambda pool: -pool.num_ranks):
        nodes = {cluster.nodes[cluster.node_of(rank)] for rank in range(pool.first_rank, pool.end_rank)}
        if len(nodes) == 1 and all(map(pool.takes, modules)):
            return f"a job of pool {pool.name!r} alone, {pool.num_ranks // nodes.pop().num_ranks} nodes"
    node, count = Counter(cluster.nodes).most_common(1)[0]
    return f"a job of {count} nodes of {node.num_ranks} ranks alone"


def _check(job: Job, num_nodes: int) -> Node:
    """Check the job and return the only kind of node."""
    kinds = set(job.cluster.nodes)
    if len(kinds) > 1:
        raise ValueError(
            f"{job.name}: templates need nodes of one kind, the cluster has {len(kinds)}; nearest: "
            f"{_most_of_a_kind(job)}"
        )
    if num_nodes < 1:
        raise ValueError(f"{job.name}: want 1 node or more, got {num_nodes}")
    if (optimizer := job.settings.optimizer) is not Optimizer.ADAMW:
        known = Optimizer.ADAMW.value
        raise ValueError(
            f"{job.name}: templates count the state of optimizer {known!r}, got {optimizer.value!r}; "
            f"nearest: {known!r}"
        )
    size, batch_samples = job.microbatch_samples, len(job.batch)
    if batch_samples % size:
        raise ValueError(
            f"{job.name}: a batch of {batch_samples} samples does not fill microbatches of {size}; "
            f"nearest: {max(size, batch_samples // size * size)} samples"
        )
    for layout in job.layouts:
        if (layout.cp, layout.ep) != (1, 1):
            raise ValueError(
                f"{job.name}: stages of templates have tensor parallelism alone, {layout.module!r} has "
                f"cp {layout.cp}, ep {layout.ep}; want 1"
            )
    return job.cluster.nodes[0]
