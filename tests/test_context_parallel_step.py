"""A training step on context-parallel ranks is that of one process: any owners, any mask, in a pipeline."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from runtime.world.pool import Pool
from sim.step.engine import simulate
from tests.plans import cluster, finish
from tests.test_parity import assert_parity, assert_same, execute, mixed
from tests.tiny_valm import tiny_batch
from workbench.balance.tokens.policies import Policy, contiguous, longest_first, random_blocks, stripe, zigzag
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import ModelGraph
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.plan import Microbatch, ModuleSettings, Plan, Precision, Recompute, Settings, TokenShard
from workbench.plan.stage import Stage
from workbench.plan.token_shards import Scope, token_shards
from workbench.schedule.action import COMPUTE, Action
from workbench.strategies import cornstarch
from workbench.timing.accept import accept
from workbench.trace import Trace

BLOCK = 2


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
    "windows": (
        embedded(0, "gemma(window=5)"),
        prepended(1, "global_window(before=6, after=3, tokens=2)"),
        embedded(2, "causal_document(lengths=4)"),
        prepended(3, "two_sided_window(before=4, after=9)"),
    ),
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
        ranks = [(rank + index,) for index in range(cp)]
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


DISTRIBUTIONS: dict[str, Policy] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "stripe": stripe,
    "random": partial(random_blocks, seed=5),
    "lpt": longest_first,
}


def with_owners(plan: Plan, distribution: str) -> Plan:
    """Explicit owners of every row of the LLM, in blocks of two tokens."""
    policy = DISTRIBUTIONS[distribution]
    shards = token_shards(plan, "llm", policy, block_tokens=BLOCK, scope=Scope.ROW)
    sharded = replace(plan, token_shards=shards)
    check(sharded)
    return sharded


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("batch", ["causal", "ep", "ee", "mp", "windows"])
def test_two_ranks_in_a_pipeline_of_two_stages(batch: str, distribution: str, pool: Pool) -> None:
    assert_same(with_owners(plan_of("projectors-and-llm", batch), distribution), pool)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_four_ranks(distribution: str, pool: Pool) -> None:
    assert_same(with_owners(plan_of("everything", "mp", cp=4, llm=(6,)), distribution), pool)


def test_without_token_shards_rows_are_cut_zigzag(pool: Pool) -> None:
    assert_same(plan_of("everything", "causal"), pool)


def modality_alone(plan: Plan) -> tuple[TokenShard, ...]:
    """Rank 0 gets the features, rank 1 the text, any other rank nothing."""
    shards = []
    for microbatch in plan.microbatches_of["llm", 0]:
        segments = [s for item in microbatch.items for s in plan.sample[item.sample].segments]
        owners = tuple(int(s.modality == "text") for s in segments for _ in range(s.tokens_out))
        shards.append(
            TokenShard(
                module="llm", replica=0, microbatch=microbatch.index, row=0, block_tokens=1, owners=owners
            )
        )
    return tuple(shards)


@pytest.mark.parametrize(("cp", "cuts"), [(2, (1, 5)), (3, (6,))])
@pytest.mark.parametrize("mix", ["projectors", "encoders", "llm", "vision-frozen"])
def test_frozen_parts(mix: str, cp: int, cuts: Sequence[int], pool: Pool) -> None:
    """A rank whose tokens ask for no gradient still takes part in the backward of the others' keys."""
    plan = plan_of(mix, "causal", cp=cp, llm=cuts)
    assert_same(replace(plan, token_shards=modality_alone(plan)), pool)


def test_float32(pool: Pool) -> None:
    assert_same(with_owners(plan_of("everything", "ee"), "lpt"), pool, Precision.FLOAT32)


def test_recompute_gathers_again(pool: Pool) -> None:
    plan = with_owners(plan_of("everything", "ee"), "stripe")
    modules = tuple(ModuleSettings(module=m.name, recompute=Recompute.FULL) for m in plan.model.modules)
    assert_same(replace(plan, settings=Settings(precision=Precision.FLOAT32, modules=modules)), pool)


def test_masks_without_context_parallelism(pool: Pool) -> None:
    for batch in ("ep", "mp", "full"):
        assert_same(plan_of("projectors-and-llm", batch, cp=1), pool)


def test_two_replicas_of_two_ranks_with_a_tied_weight_and_clipping(pool: Pool) -> None:
    """One gradient group over replicas, ranks and both ends of the model; each weight once in the norm."""
    stages: list[Stage] = []
    for replica, first in enumerate((0, 4)):
        grid = ((first + 3,), (first + 2,))
        for module, layers, ranks in (
            ("vision", (0, 5), ((first,),)),
            ("audio", (0, 4), ((first + 1,),)),
            ("llm", (0, 3), grid),
            ("llm", (3, 6), grid),
        ):
            stages.append(Stage(id=len(stages), module=module, replica=replica, layers=layers, ranks=ranks))
    batch = (*BATCHES["causal"], embedded(3, "multimodal"))
    plan = finish(mixed("everything", tied=True), batch, stages, replicas=2)
    result, reference = execute(plan, pool, clip_norm=0.01)
    assert_parity(plan, result, reference, Precision.FLOAT64)


def test_a_strategy_with_a_context_parallel_language_model(pool: Pool) -> None:
    """Planned, checked, simulated and executed: the same order everywhere, and one process's step."""
    layouts = (
        ModuleLayout(module="vision", pp=1),
        ModuleLayout(module="audio", pp=1),
        ModuleLayout(module="llm", pp=2, cp=2),
    )
    job = Job(
        name="cp",
        model=mixed("projectors-and-llm"),
        cluster=cluster(8),
        batch=tiny_batch(),
        microbatch_samples=2,
        replicas=1,
        layouts=layouts,
        settings=Settings(precision=Precision.FLOAT32),
        profile="A40",
    )
    plan = cornstarch.plan(job, CostModel(load_profile("A40")))
    assert {stage.cp for stage in plan.stages if stage.module == "llm"} == {2}
    lowered, _ = accept(plan)
    trace = simulate(lowered, lambda action: 1.0)
    result, reference = execute(plan, pool)
    assert_parity(plan, result, reference, Precision.FLOAT64)
    for rank in plan.ranks:
        assert computed(trace, rank) == computed(result.traces[0], rank)


def computed(trace: Trace, rank: int) -> list[Action]:
    return [action for action in trace.order(rank) if action.kind in COMPUTE]
