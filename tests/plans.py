"""Small plans for tests: layers that only have a width, modules that only have a trainable flag."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from workbench.cost.hardware import Cluster, Link, Node
from workbench.data.sample import Sample, Segment
from workbench.model.layer import Layer, LayerKind, Matmul, TokenCount
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.plan.build import with_programs
from workbench.plan.codec import _plan_of, plan_hash
from workbench.plan.microbatches import batched_microbatches
from workbench.plan.parameter_shards import in_units
from workbench.plan.plan import Plan, Precision, Settings
from workbench.plan.stage import Stage
from workbench.schedule.choice import Schedule

WIDTH = 8
LINK = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)
FLOAT32 = Settings(precision=Precision.FLOAT32)


def chain_module(name: str, modality: str, trainable: Sequence[bool]) -> Module:
    """A module of linear layers; the last one emits OUT tokens."""
    layers = tuple(
        Layer(
            name=f"layer.{index}",
            kind=LayerKind.BLOCK,
            operators=(Matmul(name="linear", in_features=WIDTH, out_features=WIDTH),),
            out_width=WIDTH,
            emits=TokenCount.OUT if index == len(trainable) - 1 else TokenCount.IN,
            trainable=flag,
        )
        for index, flag in enumerate(trainable)
    )
    return Module(name=name, modality=modality, layers=layers)


def two_encoders(
    vision: Sequence[bool] = (False, False, True),
    audio: Sequence[bool] = (False, True),
    llm: Sequence[bool] = (False, False, False, False),
) -> ModelGraph:
    modules = chain_module("vision", "image", vision), chain_module("audio", "sound", audio)
    text = chain_module("llm", "text", llm)
    return connect("two-encoders", (modules[0], text), (modules[1], text))


def sample(index: int, *, images: int = 1, sounds: int = 1, text: int = 5) -> Sample:
    segments = [Segment("text", 0, text, text)]
    segments += [Segment("image", k, 8, 4) for k in range(images)]
    segments += [Segment("sound", k, 6, 3) for k in range(sounds)]
    return Sample(index, (*segments, Segment("text", 1, 2, 2)))


def cluster(num_ranks: int, link: Link = LINK) -> Cluster:
    node = Node(device="toy", num_ranks=num_ranks, memory_bytes=2**34)
    return Cluster(name="toy", nodes=(node,), intra=link, inter=link)


def disjoint_plan(
    model: ModelGraph,
    batch: Sequence[Sample],
    cuts: Mapping[str, Sequence[int]] | None = None,
    *,
    grids: Mapping[str, tuple[int, int]] | None = None,
    replicas: int = 1,
) -> Plan:
    """Every stage on ranks of its own.

    Args:
        cuts: module -> number of layers of each stage; without them a module is one stage.
        grids: module -> (cp, tp) of its stages; (1, 1) where it is left out.
    """
    stages: list[Stage] = []
    rank = 0
    for replica in range(replicas):
        for module in model.modules:
            counts = (len(module.layers),) if cuts is None else cuts[module.name]
            cp, tp = (grids or {}).get(module.name, (1, 1))
            for layers in pairwise(accumulate(counts, initial=0)):
                ranks = tuple(tuple(range(rank + row * tp, rank + (row + 1) * tp)) for row in range(cp))
                stage = Stage(id=len(stages), module=module.name, replica=replica, layers=layers, ranks=ranks)
                stages.append(stage)
                rank += cp * tp
    return finish(model, batch, stages, replicas=replicas)


def finish(
    model: ModelGraph,
    batch: Sequence[Sample],
    stages: Sequence[Stage],
    *,
    replicas: int = 1,
    samples: int = 1,
    link: Link = LINK,
    settings: Settings = FLOAT32,
    schedule: Schedule | None = None,
) -> Plan:
    """The plan of these stages, with `samples` in a microbatch; units of sharded parameters are stages."""
    draft = Plan(
        strategy="test",
        model=model,
        cluster=cluster(1 + max(rank for stage in stages for rank in stage.flat_ranks), link),
        batch=tuple(batch),
        stages=tuple(stages),
        microbatches=(),
        programs=(),
        settings=settings,
    )
    microbatches = batched_microbatches(draft, samples_per_microbatch=samples, replicas=range(replicas))
    return with_programs(in_units(replace(draft, microbatches=microbatches)), schedule)


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """A plan file's content with the hash of the plan that stands in it; as it is, where there is none."""
    with suppress(ValueError):
        return document | {"hash": plan_hash(_plan_of(document))}
    return document
