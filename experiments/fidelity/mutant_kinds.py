"""Valid plans whose stages also shard weights, divide experts, are offloaded, or use cross-attention."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.fidelity.memory import tiny_job
from workbench.cost.hardware import Cluster
from workbench.cost.model import CostModel
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.job.other_layouts import with_layouts as with_other_layouts
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT
from workbench.plan.build import with_programs
from workbench.plan.parameter_shards import in_units
from workbench.plan.plan import ModuleSettings, Plan, Settings, Sharding
from workbench.plan.stage import Stage
from workbench.planner.assembly import draft_plan
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.sharded import ReshardAfter
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated

NUM_SAMPLES = 4
NUM_RANKS = 8
EXAMPLES = Path(__file__).parents[2] / "examples"
OFFLOADED = Schedule(kind=ScheduleKind.THREE_PHASE, offload=True)


def small(mix: str) -> Job:
    """The tour's job with few samples, on a node with more ranks."""
    return roomy(tiny_job(mix))


def roomy(job: Job) -> Job:
    """Few samples on a node of `NUM_RANKS` ranks, without layouts."""
    node = replace(job.cluster.nodes[0], num_ranks=NUM_RANKS)
    cluster = Cluster(name="pool", nodes=(node,), intra=job.cluster.intra, inter=job.cluster.inter)
    return replace(job, batch=job.batch[:NUM_SAMPLES], cluster=cluster, layouts=(), max_ranks=None)


def with_layouts(job: Job, *, encoders: int, llm: int, **degrees: Any) -> Job:
    """Set the stages of every encoder and of the LLM, and the LLM's other degrees."""
    layouts = [
        ModuleLayout(module=module.name, pp=llm, **degrees)
        if module.modality == TEXT
        else ModuleLayout(module=module.name, pp=encoders)
        for module in job.model.modules
    ]
    return replace(job, layouts=tuple(layouts))


def newer_plans(cost: CostModel) -> Iterator[tuple[str, Plan]]:
    """Names and plans."""
    yield from _sharded_parameters()
    yield from _expert_parallel(cost)
    yield from _offloaded(cost)
    yield from _read_aside(cost)
    yield from _tied(cost)
    job = with_layouts(small("all"), encoders=1, llm=2, tp=2)
    divided = (ModuleSettings(module=job.model.modules[-1].name, sequence_parallel=True),)
    yield "tp 2", cornstarch.plan(job, cost)
    yield (
        "sequence parallel",
        cornstarch.plan(replace(job, settings=replace(job.settings, modules=divided)), cost),
    )


def _sharded_parameters() -> Iterator[tuple[str, Plan]]:
    for mix in ("projectors", "all"):
        yield f"{mix}, shared out", sharded_parameters(small(mix), replicas=2)
    job = small("all")
    yield "LLM shared out, encoders whole", sharded_parameters(job, replicas=2, modules=("llm",))
    yield "shared out, 2 instances of 2", sharded_parameters(job, replicas=4, instances=2)
    yield "shared out, 2 stages", sharded_parameters(job, replicas=2, stages=2)
    yield "shared out, cp 2", sharded_parameters(job, replicas=1, cp=2)
    yield "shared out, cp 2, 2 replicas", sharded_parameters(job, replicas=2, cp=2, modules=("llm",))
    yield "resharded after a backward", sharded_parameters(job, replicas=2, after=ReshardAfter.BACKWARD)
    yield (
        "resharded after a step, 2 instances",
        sharded_parameters(job, replicas=4, instances=2, after=ReshardAfter.STEP),
    )


def sharded_parameters(
    job: Job,
    *,
    replicas: int,
    modules: Sequence[str] | None = None,
    instances: int = 1,
    stages: int = 1,
    cp: int = 1,
    after: ReshardAfter = ReshardAfter.PASS,
) -> Plan:
    """Plan with every module on every rank of a replica, those of `modules` sharded layer by layer.

    Args:
        stages: of the LLM; the encoders share ranks with the first.
        cp: of the LLM; the encoders then use its first ranks.
        after: how long gathered parameters stay.
    """
    names = [module.name for module in job.model.modules]
    chosen = names if modules is None else modules
    built: list[Stage] = []
    for replica in range(replicas):
        first = replica * stages * cp
        for module in job.model.modules:
            num = stages if module.modality == TEXT else 1
            bounds = [len(module.layers) * index // num for index in range(num + 1)]
            for index in range(num):
                start = first + index * cp
                ranks = tuple((start + shard,) for shard in range(cp))
                layers = (bounds[index], bounds[index + 1])
                built.append(
                    Stage(id=len(built), module=module.name, replica=replica, layers=layers, ranks=ranks)
                )
    sharded = ModuleSettings(
        module="", sharding=Sharding.PARAMETERS, instances=instances, reshard_after=after
    )
    settings = [replace(sharded, module=name) for name in chosen]
    chosen_job = replace(
        job,
        replicas=replicas,
        microbatch_samples=1,
        settings=Settings(precision=job.settings.precision, modules=tuple(settings)),
    )
    return with_programs(in_units(replace(draft_plan(chosen_job, "shared out"), stages=tuple(built))))


def _expert_parallel(cost: CostModel) -> Iterator[tuple[str, Plan]]:
    job = roomy(load_job(EXAMPLES / "experts.yaml"))
    yield (
        "experts, tp 2, cp 2, ep 4",
        cornstarch.plan(with_layouts(job, encoders=1, llm=1, tp=2, cp=2, ep=4), cost),
    )
    yield (
        "experts, cp 2, ep 2, 2 stages",
        cornstarch.plan(with_layouts(job, encoders=1, llm=2, cp=2, ep=2), cost),
    )
    shared = replace(with_layouts(job, encoders=1, llm=1, tp=2, ep=2), replicas=2)
    yield "experts, tp 2, ep 2, 2 replicas", cornstarch.plan(shared, cost)
    yield (
        "experts, tp 2, cp 2, ep 2",
        cornstarch.plan(with_layouts(job, encoders=1, llm=1, tp=2, cp=2, ep=2), cost),
    )
    for degrees in ({"llm": 2, "ep": 2}, {"llm": 1, "tp": 2, "ep": 4}):
        yield _over_replicas(job, cost, **degrees)
    llm = job.model.llm.name
    parameters = replace(job.settings, modules=(ModuleSettings(module=llm, sharding=Sharding.PARAMETERS),))
    sharded = replace(job, settings=parameters)
    for degrees in ({"llm": 1, "ep": 2}, {"llm": 1, "tp": 2, "ep": 2}):
        name, plan = _over_replicas(sharded, cost, **degrees)
        yield f"{name}, shared out", plan


def _over_replicas(job: Job, cost: CostModel, *, llm: int, ep: int, tp: int = 1) -> tuple[str, Plan]:
    """Experts over two data-parallel replicas or in each; encoders have images in some microbatches only."""
    layouts = with_layouts(job, encoders=1, llm=llm, tp=tp).layouts
    joint = with_other_layouts(
        replace(job, replicas=2),
        [replace(each, ep=ep) if each.module == job.model.llm.name else each for each in layouts],
    )
    batch = tuple(
        replace(sample, segments=sample.of(TEXT)) if index in {0, 3} else sample
        for index, sample in enumerate(joint.batch)
    )
    plan = cornstarch.plan(replace(joint, batch=batch), cost)
    return f"experts, tp {tp}, ep {ep}, 2 {'joint ' if ep > tp else ''}replicas", plan


def _offloaded(cost: CostModel) -> Iterator[tuple[str, Plan]]:
    for mix in ("projectors", "all"):
        job = with_layouts(small(mix), encoders=2, llm=2)
        colocated = encoders_colocated.plan(job, cost)
        yield f"{mix}, offload", with_programs(replace(colocated, programs=()), OFFLOADED)
    job = with_layouts(small("all"), encoders=1, llm=2)
    replicated = encoders_replicated.plan(job, cost)
    yield "offload, encoders replicated", with_programs(replace(replicated, programs=()), OFFLOADED)


def _read_aside(cost: CostModel) -> Iterator[tuple[str, Plan]]:
    job = roomy(load_job(EXAMPLES / "cross_attention.yaml"))
    yield "cross-attention, 3 stages", cornstarch.plan(with_layouts(job, encoders=1, llm=3), cost)
    yield "cross-attention, cp 2", cornstarch.plan(with_layouts(job, encoders=2, llm=2, cp=2), cost)
    beside = with_layouts(job, encoders=1, llm=2)
    yield "cross-attention, 2 replicas", cornstarch.plan(replace(beside, replicas=2), cost)
    yield "cross-attention, encoders replicated", encoders_replicated.plan(beside, cost)
    split = replace(beside, schedule=Schedule(kind=ScheduleKind.ZB_H1))
    yield "cross-attention, zb-h1", cornstarch.plan(split, cost)
    yield "cross-attention, shared out", sharded_parameters(job, replicas=2)


def _tied(cost: CostModel) -> Iterator[tuple[str, Plan]]:
    """Tie the LLM's embedding and head."""
    job = small("all")
    *encoders, last = job.model.modules
    assert last.source is not None, "the tour's modules come from configurations"
    config = json.loads(last.source.config) | {"tie_word_embeddings": True}
    llm = module_from_config(config, name=last.name, modality=last.modality)
    job = replace(job, model=replace(job.model, modules=(*encoders, llm)))
    apart = with_layouts(job, encoders=1, llm=2)
    yield "tied, 2 replicas", cornstarch.plan(replace(apart, replicas=2), cost)
    for kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V):  # the ends on two ranks, and on one
        turns = Schedule(kind=kind, virtual_stages=2)
        yield f"tied, {kind}", cornstarch.plan(replace(apart, schedule=turns), cost)
    yield "tied, tp 2", cornstarch.plan(with_layouts(job, encoders=1, llm=2, tp=2), cost)
    beside = replace(with_layouts(job, encoders=1, llm=1), replicas=2)
    yield "tied, encoders replicated", encoders_replicated.plan(beside, cost)
    yield "tied, shared out", sharded_parameters(job, replicas=2)
    yield "tied, shared out, 2 stages", sharded_parameters(job, replicas=2, stages=2, modules=("llm",))
    yield "tied, shared out, 2 instances", sharded_parameters(job, replicas=4, instances=2, modules=("llm",))
