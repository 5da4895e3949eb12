"""Joint replicas, whose ranks distribute experts among all of them, train as one process does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from runtime.launch import run_lowered
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from tests.joint_jobs import joint_job
from tests.test_parity import assert_parity, assert_same, execute
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.model.layer import Layer
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Precision, Recompute, Sharding, TokenShard
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import cornstarch, encoders_replicated, megatron_heterogeneous, megatron_homogeneous

COST = CostModel(load_profile("A40"))


def heterogeneous(job: Job) -> Plan:
    return megatron_heterogeneous.plan(job, COST)


def homogeneous(job: Job) -> Plan:
    return megatron_homogeneous.plan(job, COST)


@pytest.mark.parametrize(
    "degrees",
    [
        {"ep": 2, "dp": 2},
        {"ep": 4, "dp": 4},
        {"tp": 2, "ep": 4, "dp": 2},
        {"ep": 2, "dp": 2, "pp": 2},
        {"ep": 2, "dp": 4},
        {"cp": 2, "ep": 4, "dp": 2},
        {"cp": 2, "ep": 4, "dp": 2, "pp": 2},
    ],
    ids=str,
)
def test_a_language_model(degrees: dict[str, int], pool: Pool) -> None:
    assert_same(heterogeneous(joint_job(**degrees)), pool)


@pytest.mark.parametrize("images", [(1, 1, 1, 1), (2, 0, 1, 1), (0, 0, 1, 0), (1, 0, 0, 0)], ids=str)
def test_encoders_on_ranks_of_their_own(images: tuple[int, ...], pool: Pool) -> None:
    """Also where a replica of the encoder has no image in a microbatch, and skips its passes."""
    job = joint_job(ep=2, dp=2, images=images)
    plan = heterogeneous(job)
    assert [stage.joint_replicas for stage in plan.stages] == [2, 2]
    assert_same(plan, pool)


@pytest.mark.parametrize("images", [(1, 1, 1, 1), (0, 2, 1, 0)], ids=str)
def test_encoders_on_the_ranks_of_the_first_stage(images: tuple[int, ...], pool: Pool) -> None:
    assert_same(homogeneous(joint_job(ep=2, dp=2, pp=2, images=images, shares_ranks=True)), pool)


def test_an_encoder_with_replicas_of_its_own(pool: Pool) -> None:
    """One encoder rank feeds two joint replicas, and two feed one."""
    job = joint_job(ep=2, dp=2, images=(1, 2, 1, 0), encoder_dp=1)
    assert_same(heterogeneous(job), pool)
    job = joint_job(ep=2, dp=2, images=(1, 2, 1, 2), encoder_dp=4)
    assert_same(heterogeneous(job), pool)


@pytest.mark.parametrize("exchange", KeyExchange)
def test_context_parallel_ranks_inside_each_replica(exchange: KeyExchange, pool: Pool) -> None:
    """Of the language model and the encoder; each replica exchanges the keys of its own samples."""
    settings = (ModuleSettings(module="llm", key_exchange=exchange),)
    job = joint_job(cp=2, ep=4, dp=2, images=(1, 2, 0, 1), encoder_cp=2, settings=settings)
    assert_same(heterogeneous(job), pool)


def test_tokens_given_to_context_parallel_ranks(pool: Pool) -> None:
    """By token shards, which hand rows to the other replica than their turn."""
    plan = heterogeneous(joint_job(cp=2, ep=4, dp=2, samples=6, microbatch=3))
    assert_same(with_owners(plan, ((2, 3, 3), (0, 0, 1), (1, 0), (2, 3), (3, 2), (0, 1))), pool)


def test_cornstarch_balances_the_tokens_of_each_replica(pool: Pool) -> None:
    plan = cornstarch.plan(joint_job(cp=2, ep=4, dp=2, samples=6, microbatch=3), COST)
    assert {owner for shard in plan.token_shards for owner in shard.owners} == {0, 1, 2, 3}
    assert_same(plan, pool)


def test_encoders_on_every_stage(pool: Pool) -> None:
    assert_same(
        encoders_replicated.plan(joint_job(ep=2, dp=2, pp=2, images=(1, 2, 0, 1), shares_ranks=True), COST),
        pool,
    )


def test_a_frozen_language_model(pool: Pool) -> None:
    """A replica without an image needs no gradient, but others wait for it in the experts' exchanges."""
    plan = heterogeneous(joint_job(ep=2, dp=2, images=(1, 0, 1, 0)))
    model = replace(
        plan.model, modules=tuple(frozen(each, each.name == "llm") for each in plan.model.modules)
    )
    assert_same(with_programs(replace(plan, model=model, programs=())), pool)


def frozen(module: Any, is_frozen: bool) -> Any:
    def of(layer: Layer) -> Layer:
        return replace(layer, trainable=False)

    return replace(module, layers=tuple(map(of, module.layers))) if is_frozen else module


def with_owners(plan: Plan, owners: Sequence[tuple[int, ...]]) -> Plan:
    """The plan of one microbatch, whose rows are cut into equal blocks with these owners."""
    sizes = [sample.num_tokens for sample in plan.batch]
    shards = (
        TokenShard(
            module="llm",
            replica=0,
            microbatch=0,
            row=row,
            block_tokens=-(-size // len(of_row)),
            owners=of_row,
        )
        for row, (size, of_row) in enumerate(zip(sizes, owners, strict=True))
    )
    return replace(plan, token_shards=tuple(shards))


def test_rows_given_by_token_shards(pool: Pool) -> None:
    plan = heterogeneous(joint_job(ep=2, dp=2, samples=6, microbatch=3))
    assert_same(with_owners(plan, ((1,), (0,), (1,), (1,), (0,), (1,))), pool)


def test_sharded_recomputed_split_and_clipped(pool: Pool) -> None:
    settings = ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER, recompute=Recompute.FULL)
    plan = heterogeneous(joint_job(ep=2, dp=4, samples=8, settings=(settings,)))
    split = with_programs(replace(plan, programs=()), Schedule(kind=ScheduleKind.ZB_H1))
    assert any(action.kind is Pass.W for action in split.program_actions)
    result, reference = execute(split, pool, clip_norm=0.01)
    assert_parity(split, result, reference, Precision.FLOAT64)


def test_tokens_that_tensor_parallel_ranks_divide(pool: Pool) -> None:
    """As recipes for Qwen3-VL with experts have it: tp 2 with sequence parallelism, ep over replicas."""
    divided = ModuleSettings(module="llm", sequence_parallel=True)
    assert_same(heterogeneous(joint_job(tp=2, ep=4, dp=2, settings=(divided,))), pool)


def test_losses_are_those_of_replicas_with_all_experts(pool: Pool) -> None:
    """The same batch on the same ranks, experts distributed or not."""
    settings = RunSettings(precision=Precision.FLOAT64, timeout_s=30.0)
    joint = run_lowered(lower(heterogeneous(joint_job(ep=2, dp=2))), settings, pool=pool)
    apart = run_lowered(lower(heterogeneous(joint_job(dp=2))), settings, pool=pool)
    assert joint.losses[0] == pytest.approx(apart.losses[0], rel=1e-12)
