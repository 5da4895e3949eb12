"""A training step on context-parallel ranks is that of one process: any owners, any mask, in a pipeline."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtime.pool import Pool
from tests.plans import finish
from tests.test_parity import assert_same, mixed
from workbench.data.sample import Sample, Segment
from workbench.graph.model_graph import ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.plan import (
    Microbatch,
    ModuleSettings,
    Plan,
    Precision,
    Recompute,
    Settings,
    Stage,
    TokenShard,
)
from workbench.plan.routing import Routing
from workbench.plan.token_owners import row_tokens

BLOCK = 2
CP, NARROW = "cp", "narrow"


def prepended(index: int, mask: str) -> Sample:
    """EP: encoder outputs first."""
    segments = (Segment("image", 0, 16, 16), Segment("audio", 0, 6, 6), Segment("text", 0, 7, 7))
    return Sample(index, segments, mask)


def embedded(index: int, mask: str) -> Sample:
    """EE: encoder outputs among text."""
    segments = (
        Segment("text", 0, 3, 3),
        Segment("image", 0, 16, 16),
        Segment("text", 1, 2, 2),
        Segment("audio", 0, 6, 6),
        Segment("text", 2, 4, 4),
    )
    return Sample(index, segments, mask)


def short(index: int, mask: str) -> Sample:
    """Text that fits one block: all but one rank have nothing of it."""
    return Sample(index, (Segment("text", 0, BLOCK, BLOCK),), mask)


BATCHES = {
    "causal": (embedded(0, "causal"), short(1, "causal"), prepended(2, "causal")),
    "ep": (prepended(0, "multimodal"), prepended(1, "multimodal_items")),
    "ee": (embedded(0, "multimodal"), embedded(1, "multimodal")),
    "mp": (embedded(0, "multimodal"), prepended(1, "multimodal"), short(2, "causal"), embedded(3, "gemma")),
    "full": (embedded(0, "full"), short(1, "full")),
}


def stages_of(model: ModelGraph, cp: int, llm: Sequence[int]) -> list[Stage]:
    """Two encoders on a rank each, then LLM stages of cp ranks, the second grid in reverse order."""
    stages = [
        Stage(id=0, module="vision", replica=0, layers=(0, 5), ranks=((0,),)),
        Stage(id=1, module="audio", replica=0, layers=(0, 4), ranks=((1,),)),
    ]
    first, rank = 0, 2
    for count in llm:
        ranks = [(rank + place,) for place in range(cp)]
        layers = (first, first + count)
        stages.append(
            Stage(
                id=len(stages),
                module="llm",
                replica=0,
                layers=layers,
                ranks=tuple(ranks if first == 0 else reversed(ranks)),
            )
        )
        first, rank = first + count, rank + cp
    return stages


def plan_of(mix: str, batch: str, *, cp: int = 2, llm: Sequence[int] = (3, 3)) -> Plan:
    """Two samples, packed into one row, to an LLM microbatch; encoder items one by one."""
    model = mixed(mix)
    samples = BATCHES[batch]
    plan = finish(model, samples, stages_of(model, cp, llm))
    items = [m.rows[0] for m in plan.microbatches_of["llm", 0]]
    packed = tuple(
        Microbatch(
            module="llm",
            replica=0,
            index=index,
            rows=(tuple(item for row in items[i : i + 2] for item in row),),
        )
        for index, i in enumerate(range(0, len(items), 2))
    )
    others = tuple(m for m in plan.microbatches if m.module != "llm")
    return with_programs(replace(plan, microbatches=(*others, *packed), programs=()))


def with_owners(plan: Plan, distribution: str) -> Plan:
    """Explicit owners of every row of the LLM; `lpt` deals the longest causal blocks first."""
    cp = plan.stages[-1].cp
    shards = []
    for microbatch in plan.microbatches_of["llm", 0]:
        for row, tokens in enumerate(row_tokens(Routing(plan), microbatch)):
            owners = owners_of(distribution, -(-tokens // BLOCK), cp)
            shards.append(
                TokenShard(
                    module="llm",
                    replica=0,
                    microbatch=microbatch.index,
                    row=row,
                    block_tokens=BLOCK,
                    owners=owners,
                )
            )
    return replace(plan, token_shards=tuple(shards))


def owners_of(distribution: str, blocks: int, cp: int) -> tuple[int, ...]:
    if distribution == "contiguous":
        return tuple(block * cp // blocks for block in range(blocks))
    if distribution == "stripe":
        return tuple(block % cp for block in range(blocks))
    if distribution == "random":
        return tuple(block * 7919 // 13 % cp for block in range(blocks))
    loads, owners = [0] * cp, [0] * blocks
    for block in reversed(range(blocks)):
        owners[block] = loads.index(min(loads))
        loads[owners[block]] += block + 1
    return tuple(owners)


DISTRIBUTIONS = ["zigzag", "contiguous", "stripe", "random", "lpt"]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("batch", ["causal", "ep", "ee", "mp"])
def test_two_ranks_in_a_pipeline_of_two_stages(batch: str, distribution: str, pool: Pool) -> None:
    plan = plan_of("projectors-and-llm", batch)
    if distribution != "zigzag":  # which is what a plan without shards means
        plan = with_owners(plan, distribution)
    assert_same(plan, pool)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_four_ranks(distribution: str, pool: Pool) -> None:
    plan = plan_of("everything", "mp", cp=4, llm=(6,))
    assert_same(plan if distribution == "zigzag" else with_owners(plan, distribution), pool)


@pytest.mark.parametrize("mix", ["projectors", "encoders", "llm", "vision-frozen"])
def test_frozen_parts(mix: str, pool: Pool) -> None:
    """A rank whose tokens ask for no gradient still takes part in the backward of the others' keys."""
    assert_same(with_owners(plan_of(mix, "causal", llm=(1, 5)), "contiguous"), pool)
    assert_same(with_owners(plan_of(mix, "ep", cp=4, llm=(6,)), "contiguous"), pool)


def test_float32(pool: Pool) -> None:
    assert_same(with_owners(plan_of("everything", "ee"), "lpt"), pool, Precision.FLOAT32)


def test_recompute_gathers_again(pool: Pool) -> None:
    plan = with_owners(plan_of("everything", "ee"), "stripe")
    modules = tuple(ModuleSettings(module=m.name, recompute=Recompute.FULL) for m in plan.model.modules)
    assert_same(replace(plan, settings=Settings(precision=Precision.FLOAT32, modules=modules)), pool)


def test_masks_without_context_parallelism(pool: Pool) -> None:
    for batch in ("ep", "mp", "full"):
        assert_same(plan_of("projectors-and-llm", batch, cp=1), pool)
