"""DistTrain: ranks and degrees of every module by a formula, modules on ranks of their own.

Source: Z. Zhang et al., "DistTrain", sections 4.1 to 4.3: parallelism units, the formulation, adaptive
orchestration. Sample order is apart, in `reordered`.
"""

from dataclasses import replace

from workbench.balance.orchestration import orchestrate
from workbench.balance.orchestration_task import Orchestration, Task, Unit
from workbench.cost.memory import state_bytes
from workbench.cost.model import CostModel
from workbench.graph.model_graph import TEXT, Module
from workbench.job import Job, ModuleLayout
from workbench.plan.plan import Plan, Sharding
from workbench.strategies import megatron_heterogeneous
from workbench.strategies.layout_choice import ModuleChoice
from workbench.strategies.layout_search import usable_ranks
from workbench.strategies.module_price import ModulePrices
from workbench.strategies.stage_counts import Progress, silent

NAME = "disttrain"
TP_SIZES = (1, 2, 4, 8)


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """The fastest degrees by the formula, on the fewest ranks that are as fast, then balanced stages.

    Differs: the integers are the formula's exact optimum, where the source rounds a convex program's;
    layouts that the job gives are not kept, the formula decides all of them.

    Raises:
        ValueError: nothing fits, or a batch that the degrees found cannot share out.
    """
    found = orchestrate(task_of(job, cost))
    built = megatron_heterogeneous.plan(with_degrees(job, found), cost, progress)
    return replace(built, strategy=NAME)


def task_of(job: Job, cost: CostModel) -> Task:
    """The job in the formula's terms: mean seconds and bytes of a sample, module by module."""
    prices = ModulePrices(job, cost)
    llm = next(module for module in job.model.modules if module.modality == TEXT)
    return Task(
        units=tuple(_unit(job, prices, module) for module in job.model.modules),
        pacing=llm.name,
        batch_samples=len(job.batch),
        microbatch_samples=job.microbatch_samples,
        num_gpus=usable_ranks(job),
        gpu_bytes=float(job.cluster.nodes[0].memory_bytes),
        virtual_stages=job.schedule.virtual_stages,
        gpu_bytes_per_s=job.cluster.inter.bytes_per_s,
    )


def with_degrees(job: Job, found: Orchestration) -> Job:
    """The job with the layout of every module."""
    layouts = tuple(
        ModuleLayout(module=module.name, tp=degrees.tp, pp=degrees.pp, dp=degrees.dp)
        for module, degrees in zip(job.model.modules, found.degrees, strict=True)
    )
    return replace(job, layouts=layouts)


def _unit(job: Job, prices: ModulePrices, module: Module) -> Unit:
    settings = job.settings.of(module.name)
    widest = min(node.num_ranks for node in job.cluster.nodes)
    sample_s: list[tuple[int, float]] = []
    for tp in TP_SIZES:
        if tp > widest:
            break
        choice = ModuleChoice(module=module.name, tp=tp, recompute=settings.recompute)
        try:
            layers = prices.layers(choice, 1)
        except ValueError:  # heads that do not divide
            break
        sample_s.append((tp, sum(layer.forward_s + layer.backward_s for layer in layers)))
    whole = prices.layers(ModuleChoice(module=module.name, recompute=settings.recompute), 1)
    weights, trained = sum(layer.weights for layer in whole), sum(layer.trained for layer in whole)
    size = state_bytes(job.settings.precision.num_bytes, job.settings.kernels)
    shared = size.optimizer if settings.sharding is Sharding.OPTIMIZER else 0
    return Unit(
        name=module.name,
        sample_s=tuple(sample_s),
        num_layers=len(module.layers),
        weight_bytes=weights * size.weight + trained * (size.gradient + size.optimizer - shared),
        optimizer_bytes=trained * shared,
        activation_bytes=float(sum(layer.kept_bytes for layer in whole)),
        reduction_bytes=trained * (size.gradient + size.weight),
    )
