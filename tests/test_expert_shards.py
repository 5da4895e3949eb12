"""Sharded weights with distributed experts: experts are sharded among those who hold the same ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.launch import run_lowered
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from sim.step.engine import simulate
from tests import joint_jobs
from tests.forced_routes import build_in_turn
from tests.joint_jobs import joint_job
from tests.plans import LINK, cluster
from tests.test_fsdp import (
    THREE_STEPS,
    assert_exports_train_alike,
    assert_goes_on,
    assert_same_bits,
    assert_trains_as_one,
    narrow,
)
from tests.test_joint_replicas_run import frozen
from tests.test_parity import SEED
from tests.test_sim_sweep import assert_equal_times
from workbench.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.export.megatron import arguments_of
from workbench.export.registry import BY_NAME
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.check import check
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.plan.stage import Stage
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_plan import job_with
from workbench.planner.layout_space import Freedom, LayoutSpace
from workbench.planner.layout_step import steps_of
from workbench.schedule.action import Action, Pass
from workbench.search.joint.choice import choice_of
from workbench.search.joint.evaluate import plan_of
from workbench.search.joint.move import Space
from workbench.search.joint.setting_moves import Keep, shardings
from workbench.strategies import fsdp, megatron_heterogeneous
from workbench.timing.accept import accept
from workbench.timing.price import pass_prices, price

A40 = CostModel(load_profile("A40"))
SHARDED = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS)
FLOAT64_BYTES = 8
ADAM_BYTES = 3 * FLOAT64_BYTES  # of a weight and two moments
DENSE, EXPERTS = 4288, 4 * 4608  # elements of a layer: attention, norms and router; four experts


def sharded(settings: ModuleSettings = SHARDED, **layout: object) -> Plan:
    modules = (settings, replace(settings, module="vision")) if "images" in layout else (settings,)
    return megatron_heterogeneous.plan(joint_job(settings=modules, **layout), A40)


def block(plan: Plan, replica: int = 0) -> Stage:
    """The stage of the first layer with experts."""
    return plan.chain["llm", replica][1]


@pytest.mark.parametrize(
    ("layout", "holders", "expert_holders"),
    [
        pytest.param({"ep": 2, "dp": 2}, ((0, 1),), ((0,), (1,)), id="one-holder"),
        pytest.param({"ep": 2, "dp": 4}, ((0, 1, 2, 3),), ((0, 2), (1, 3)), id="joint-stages"),
        pytest.param({"cp": 2, "ep": 2, "dp": 2}, ((0, 1, 2, 3),), ((0, 2), (1, 3)), id="in-a-replica"),
        pytest.param({"tp": 2, "ep": 2, "dp": 2}, ((0, 2), (1, 3)), ((0, 2), (1, 3)), id="tp"),
        pytest.param({"tp": 2, "ep": 4, "dp": 2}, ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,)), id="tp-joint"),
    ],
)
def test_who_shards_what(layout: dict[str, int], holders: object, expert_holders: object) -> None:
    """As torchtitan's meshes: dense weights over all copies, experts over the holders of the same ones."""
    plan = sharded(**layout)
    unit = next(unit for unit in shard_units(plan) if block(plan).id in unit.stages)
    assert (unit.holders, unit.expert_holders) == (holders, expert_holders)
    of_experts = next(flat for flat in unit.trained if flat.experts)
    assert of_experts.num_elements * layout["ep"] == EXPERTS
    assert unit.part(of_experts) * sum(map(len, expert_holders)) == EXPERTS


@pytest.mark.parametrize(
    "layout",
    [
        {"ep": 2, "dp": 2, "pp": 2},
        {"ep": 2, "dp": 4},
        {"cp": 2, "ep": 4, "dp": 2},
        {"cp": 2, "ep": 2, "dp": 2},
        {"ep": 2, "dp": 2, "images": (1, 2, 0, 1)},
    ],
    ids=str,
)
def test_trains_as_one_process(layout: dict[str, object], pool: Pool) -> None:
    assert_trains_as_one(sharded(replace(SHARDED, recompute=Recompute.FULL), **layout), pool)


@pytest.mark.parametrize(
    ("layout", "divides"),
    [
        pytest.param({"tp": 2, "ep": 2, "dp": 2}, True, id="in-a-replica"),
        pytest.param({"tp": 2, "ep": 4, "dp": 2}, False, id="joint"),
        pytest.param({"tp": 2, "dp": 2}, True, id="cut-experts"),
    ],
)
def test_tensor_parallel_ranks(layout: dict[str, int], divides: bool, pool: Pool) -> None:
    """Gradients that each has in part are summed, and weights that each has whole count once in the norm."""
    assert_trains_as_one(sharded(replace(SHARDED, sequence_parallel=divides), **layout), pool)


def test_tensor_parallel_parts_of_unequal_cuts(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 67: shards of the two ranks have other borders, so parts are summed before."""
    monkeypatch.setattr(joint_jobs, "LLM", joint_jobs.LLM | {"vocab_size": 67})
    assert_trains_as_one(sharded(replace(SHARDED, sequence_parallel=True), tp=2, ep=2, dp=2), pool)


def test_instances_add_up_their_parts_of_experts(pool: Pool) -> None:
    plan = sharded(replace(SHARDED, instances=2), ep=2, dp=4)
    assert_trains_as_one(plan, pool)
    of_experts = {group.ranks for group in lower(plan).groups if group.weights[0].experts}
    assert of_experts == {(0, 2), (1, 3)}


def test_a_frozen_language_model(pool: Pool) -> None:
    """Frozen experts are gathered, and nothing of them is reduced."""
    job = joint_job(ep=2, dp=4, samples=8, images=(1, 0, 1, 1, 2, 0, 1, 1), settings=(SHARDED,))
    modules = tuple(frozen(module, module.name == "llm") for module in job.model.modules)
    model = replace(job.model, modules=modules)
    plan = megatron_heterogeneous.plan(replace(job, model=model), A40)
    unit = next(unit for unit in shard_units(plan) if block(plan).id in unit.stages)
    assert [flat.experts for flat in unit.frozen] == [False, True]
    assert_trains_as_one(plan, pool)


@pytest.mark.parametrize(("dp", "num_holders"), [(2, 1), (4, 2)])
def test_a_round_costs_the_bytes_of_both(dp: int, num_holders: int) -> None:
    """Experts with one holder cost nothing."""
    plan = sharded(ep=2, dp=dp)
    prices = pass_prices(plan, CostModel(ideal_profile()))
    for kind, seconds in ((Pass.ALL_GATHER, all_gather_s), (Pass.REDUCE_SCATTER, reduce_scatter_s)):
        action = next(a for a in plan.program[0] if a.kind is kind and a.stage == block(plan).id)
        dense_s = seconds(DENSE * FLOAT64_BYTES, dp, LINK)
        experts_s = seconds(EXPERTS / 2 * FLOAT64_BYTES, num_holders, LINK)
        assert prices.round_s(action) == pytest.approx(dense_s + experts_s, rel=1e-12)


def test_a_round_sums_what_ranks_that_split_tokens_have_in_part() -> None:
    """Two norms of 32 beside the router of 4 x 32, which ranks sum anyway; in the reduce-scatter alone."""
    parts, whole = (
        sharded(replace(SHARDED, sequence_parallel=is_so), tp=2, ep=2, dp=2) for is_so in (True, False)
    )
    action = Action(block(parts).id, Pass.REDUCE_SCATTER, 0)
    divided_s, undivided_s = (
        pass_prices(plan, CostModel(ideal_profile())).round_s(action) for plan in (parts, whole)
    )
    all_s, router_s = (all_reduce_s(num * FLOAT64_BYTES, 2, LINK) for num in (64 + 128, 128))
    assert divided_s - undivided_s == pytest.approx(all_s - router_s)


@pytest.mark.parametrize("layout", [{"ep": 2, "dp": 4, "pp": 2}, {"tp": 2, "ep": 4, "dp": 4}], ids=str)
def test_sweep_equals_engine(layout: dict[str, int]) -> None:
    lowered, _ = accept(sharded(**layout, samples=8))
    prices = price(lowered, A40)
    assert_equal_times(lowered, prices.duration_s, prices.step_s)


def test_holds_the_shards_that_are_predicted(pool: Pool) -> None:
    """At rest a rank holds weight and moments of its shards; at its peak no more than its account."""
    for dp, num_holders in ((2, 1), (4, 2)):
        plan = sharded(ep=2, dp=dp, samples=dp)
        plan = replace(plan, settings=replace(plan.settings, kernels=Kernels.EAGER))
        lowered = lower(plan)
        table = memory_table(lowered)
        held = 2 * (DENSE / dp + EXPERTS / 2 / num_holders) + (2048 + 2080) / dp  # two blocks, table and head
        assert table.static_bytes == dict.fromkeys(plan.ranks, pytest.approx(held * ADAM_BYTES, rel=1e-3))
        settings = RunSettings(
            seed=SEED, warmup=1, precision=Precision.FLOAT64, timeout_s=30.0, collect=Collect.MEMORY
        )
        (trace,) = run_lowered(lowered, settings, pool=pool, build=build_in_turn).traces
        for rank, most in peak_bytes(lowered, table).items():
            sizes = [sample.num_bytes for sample in trace.memory if sample.rank == rank]
            assert table.static_bytes[rank] <= min(sizes)
            assert 0.8 * most <= max(sizes) <= most


def test_a_wide_optimizer_of_shards_equals_that_of_whole_weights(pool: Pool) -> None:
    """bfloat16 weights, float32 optimizer: three steps, experts with one holder."""
    levels = (Sharding.PARAMETERS, Sharding.OPTIMIZER, Sharding.NONE)
    plans = (narrow(sharded(replace(SHARDED, sharding=level), ep=2, dp=2)) for level in levels)
    assert_same_bits(*(run_lowered(lower(plan), THREE_STEPS, pool=pool) for plan in plans))


def test_a_run_goes_on_from_shards_of_experts_to_the_last_bit(tmp_path: Path, pool: Pool) -> None:
    """bfloat16 weights and float32 states, whole experts and sharded ones."""
    for dp in (2, 4):
        assert_goes_on(narrow(sharded(ep=2, dp=dp)), tmp_path / str(dp), pool)


def test_an_export_is_of_whole_experts(tmp_path: Path, pool: Pool) -> None:
    levels = (Sharding.PARAMETERS, Sharding.NONE)
    plans = (sharded(replace(SHARDED, sharding=level), ep=2, dp=4) for level in levels)
    assert_exports_train_alike(plans, tmp_path, pool)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"ep": 1}, r"different degrees of expert parallelism \[1, 2\] are refused", id="ep"),
        pytest.param(
            {"ranks": ((4, 5),)}, r"different tensor-parallel degrees \[1, 2\] are refused", id="tp"
        ),
    ],
)
def test_replicas_that_hold_unlike_shards_are_refused(changed: dict[str, object], message: str) -> None:
    plan = sharded(cp=2, ep=2, dp=2)
    second = {stage.id for stage in plan.chain["llm", 1]}
    stages = tuple(replace(s, **changed) if s.id in second else s for s in plan.stages)
    with pytest.raises(ValueError, match=message):
        check(replace(plan, stages=stages))


def test_the_strategy_distributes_experts_and_trusts_its_formula() -> None:
    """Over ranks of a replica and over replicas, with one holder and several."""
    job = replace(joint_job(samples=8), layouts=(), cluster=cluster(4))
    steps = steps_of(job, A40)
    tried = set()
    for mode in (Mode.SHARDED, Mode.HYBRID):
        for _, choice in LayoutSpace(steps, 4, Freedom(recompute=(Recompute.NONE,))).layouts(mode):
            llm, step = choice.llm, steps.step(choice)
            tried.add((llm.cp, llm.ep, llm.joint_replicas, llm.instances))
            plan = fsdp.sharded_plan(job_with(job, choice, step), A40, llm.instances)
            lowered, _ = accept(plan)
            prices = price(lowered, A40)
            simulated_s = simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s
            assert simulated_s == pytest.approx(step.step_s, rel=0.02)
    assert {(1, 4, 4, 1), (1, 2, 2, 1), (1, 2, 2, 2), (2, 2, 1, 1), (4, 2, 1, 1)} <= tried
    assert block(fsdp.plan(job, A40)).ep == 4


def test_the_joint_search_offers_shards_of_experts() -> None:
    job = joint_job(ep=2, dp=4, samples=8)
    choice = choice_of(job, megatron_heterogeneous.plan(job, A40), A40)
    space = Space(job, A40, {})
    offered = [each for each in shardings(choice, plan_of(space, choice)) if is_of_weights(each)]
    assert {each.instances for each in offered} == {1, 2}
    for each in offered:
        assert any(unit.expert_holders for unit in shard_units(plan_of(space, each.apply(space, choice))))


def is_of_weights(move: Keep) -> bool:
    return move.sharding is Sharding.PARAMETERS


def test_an_export_to_megatron_shards_experts_and_others_refuse_them() -> None:
    plan = sharded(ep=2, dp=4)
    arguments = arguments_of(plan)
    assert arguments["--expert-model-parallel-size"] == "2"
    assert arguments["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert BY_NAME["fsdp2"].refuses(plan) == "ep 2 of 'llm'"
    assert BY_NAME["torchtitan"].refuses(plan) == "experts of 'llm'"


def test_a_rank_that_goes_on_after_the_others_is_refused() -> None:
    """Its order begins as theirs does, and has one more round at its end."""
    plan = sharded(ep=2, dp=2)
    (program,) = plan.programs
    last = next(action for action in reversed(program.actions) if action.kind is Pass.FREE)
    again = [
        last._replace(kind=kind, microbatch=last.microbatch + 1) for kind in (Pass.ALL_GATHER, Pass.FREE)
    ]
    longer = (*program.actions[:-1], *again, program.actions[-1])
    programs = (replace(program, ranks=(0,)), replace(program, ranks=(1,), actions=longer))
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 share stage 0 but differ in order: nothing and 0ALL_GATHER"
    ):
        check(replace(plan, programs=programs))
