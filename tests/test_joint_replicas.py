"""Joint replicas: what job files mean by ep beyond tp x cp, and what plans of them are, cost and hold."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.attention.price import attention_of
from tests.joint_jobs import joint_job
from tests.test_sim_sweep import assert_equal_times
from workbench.cost.expert_parallel import on_rank
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, operator_tokens
from workbench.data.sample import Item, Sample, Segment
from workbench.job.job import Job, load_job
from workbench.job.joint_layouts import join
from workbench.job.module_layout import ModuleLayout
from workbench.job.other_layouts import apart, with_layouts
from workbench.memory.account import memory_table
from workbench.model.experts import is_of_expert
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT
from workbench.plan.check import check
from workbench.plan.codec import dumps, loads, plan_hash
from workbench.plan.gradient_groups import gradient_groups
from workbench.plan.joint import own_rows, replicas_apart, row_replicas
from workbench.plan.lower import lower
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, TokenShard
from workbench.plan.routing import routing_of
from workbench.plan.token_owners import held_runs
from workbench.plan.work import even_work_of, works_of
from workbench.schedule.action import COMPUTE, Action, Pass
from workbench.strategies import megatron_heterogeneous
from workbench.timing.price import pass_prices, price

COST = CostModel(load_profile("A40"))
EXAMPLE = Path(__file__).parents[1] / "examples" / "experts.yaml"


def plan_of(job: Job) -> Plan:
    return megatron_heterogeneous.plan(job, COST)


def joined(*layouts: ModuleLayout, dp: int, samples: int = 1) -> tuple[object, ...]:
    return join(layouts, "llm", replicas=dp, microbatch_samples=samples, where="job 'j'")


def test_ep_beyond_a_stage_joins_replicas() -> None:
    llm, vision = ModuleLayout(module="llm", tp=2, ep=8), ModuleLayout(module="vision")
    layouts, replicas, samples, num_joint = joined(llm, vision, dp=8, samples=3)
    assert (replicas, samples, num_joint) == (2, 12, 4)
    assert layouts == (replace(llm, joint_replicas=4), replace(vision, joint_replicas=4))


def test_ep_inside_a_stage_changes_nothing() -> None:
    llm = ModuleLayout(module="llm", tp=2, cp=2, ep=4)
    assert joined(llm, dp=8) == ((llm,), 8, 1, 1)


def test_an_encoder_joins_as_many_as_divide_both() -> None:
    llm, vision = ModuleLayout(module="llm", ep=4), ModuleLayout(module="vision", dp=6)
    (_, joint_vision), replicas, _, _ = joined(llm, vision, dp=8)
    assert (joint_vision.dp, joint_vision.joint_replicas, replicas) == (3, 2, 2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"tp": 2, "ep": 3},
            r"ep must divide tp x cp = 2, or be that times a divisor of its 8 replicas, got 3",
        ),
        ({"ep": 16}, r"got 16; nearest: 8"),
        ({"tp": 2, "ep": 12}, r"got 12; nearest: 8"),
    ],
    ids=str,
)
def test_refused_degrees(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined(ModuleLayout(module="llm", **layout), dp=8)


def test_a_job_file_counts_each_replica(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("pp: 1, tp: 2, cp: 2, ep: 4", "pp: 1, ep: 4")
    file = tmp_path / "job.yaml"
    file.write_text(
        text.replace("  samples: 4", "  samples: 8\n  replicas: 4").replace("ranks: 5", "ranks: 8")
    )
    job = load_job(file)
    assert (job.replicas, job.microbatch_samples, job.joint_replicas) == (1, 4, 4)
    layouts, *counts = apart(job)
    assert counts == [4, 1, 1]
    assert {layout.joint_replicas for layout in layouts} == {1}
    assert with_layouts(job, layouts) == job
    assert (
        with_layouts(job, [replace(layout, ep=2) for layout in layouts if layout.module == "llm"]).replicas
        == 2
    )


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]), st.integers(1, 3))
def test_layouts_apart_are_those_joined(tp: int, ep: int, dp: int, samples: int) -> None:
    if ep > tp * dp:
        return
    job = joint_job(tp=tp, ep=ep, dp=dp, samples=samples * dp, microbatch=samples)
    each = apart(job)
    assert (each.replicas, each.microbatch_samples) == (dp, samples)
    assert with_layouts(job, each.layouts) == job


def test_rows_of_a_microbatch_are_taken_in_turn() -> None:
    plan = plan_of(joint_job(ep=2, dp=2, samples=6, microbatch=3))
    (microbatch,) = plan.microbatches
    assert row_replicas(plan, microbatch) == (0, 1, 0, 1, 0, 1)
    assert own_rows(plan, microbatch, 1).items == (Item(1, 0), Item(3, 0), Item(5, 0))
    runs = held_runs(routing_of(plan), microbatch, TokenCount.IN)
    assert [[run.item.sample for run in of_share] for of_share in runs] == [[0, 2, 4], [1, 3, 5]]


def test_plans_are_read_back_and_others_keep_their_hash() -> None:
    plan, alone = plan_of(joint_job(ep=2, dp=2)), plan_of(joint_job(dp=2))
    assert loads(dumps(plan)) == plan
    assert "joint_replicas" not in dumps(alone)
    assert plan_hash(loads(dumps(alone))) == plan_hash(alone)


def test_experts_have_one_holder_and_other_weights_all() -> None:
    plan = plan_of(joint_job(ep=2, dp=4, samples=8))
    sizes = {(group.weights[0].experts, len(group.ranks)) for group in gradient_groups(plan)}
    assert sizes == {(True, 2), (False, 4)}  # two replicas of two joint ones


def test_a_pass_takes_the_slowest_replica() -> None:
    plan = plan_of(joint_job(ep=2, dp=2, samples=4, microbatch=2))
    (microbatch,) = plan.microbatches
    parts = [even_work_of(plan, own_rows(plan, microbatch, replica)) for replica in range(2)]
    (slowest,) = works_of(plan, microbatch)  # longer rows, so more tokens and pairs
    assert slowest.rows == parts[1].rows


def test_experts_get_the_rows_of_all_replicas() -> None:
    """10 and 30 tokens, twice, are as many as four times 20."""
    plan = plan_of(joint_job(ep=4, dp=4, samples=4))
    uneven, even = ((10, 30, 10, 30), (20, 20, 20, 20))
    loads = []
    for lengths in (uneven, even):
        batch = tuple(Sample(i, (Segment(TEXT, 0, n, n),)) for i, n in enumerate(lengths))
        sized = replace(plan, batch=batch)
        (work,) = works_of(sized, sized.microbatches[0])
        layer = on_rank(plan.model.llm.layers[1], work, Grid(1, 1, 4))
        expert = next(each for each in layer.operators if is_of_expert(each))
        loads.append(operator_tokens(expert, work, Grid(1, 1, 4)))
    assert loads[0] == pytest.approx(loads[1], rel=1e-12)


def test_dense_layers_cost_what_they_cost_apart() -> None:
    """The only stage without an expert is as fast as that of a replica by itself."""
    job = joint_job(ep=2, dp=2, pp=4, samples=2)
    joint, alone = plan_of(job), plan_of(joint_job(dp=1, pp=4, samples=1))
    first = (plan.program_actions for plan in (joint, alone))
    forwards = [next(action for action in actions if str(action).startswith("0F")) for actions in first]
    longest = replace(alone, batch=(replace(joint.batch[1], id=0),))
    assert pass_prices(joint, COST).duration_s(forwards[0]) == pytest.approx(
        pass_prices(longest, COST).duration_s(forwards[1]), rel=1e-12
    )


@pytest.mark.parametrize("exchange", KeyExchange)
@pytest.mark.parametrize("profile", ["A40", "H100"])
def test_attention_of_joint_replicas_costs_what_it_costs_apart(exchange: KeyExchange, profile: str) -> None:
    """An encoder, whose layers have no experts; keys are exchanged among the ranks of each replica."""
    settings = (ModuleSettings(module="vision", key_exchange=exchange),)
    joint = plan_of(joint_job(cp=2, ep=4, dp=2, images=(2, 1, 0, 1), encoder_cp=2, settings=settings))
    cost, apart = CostModel(load_profile(profile)), replicas_apart(joint)
    (slowest_s,), seconds = (
        [
            pass_prices(plan, cost, attention_of(plan, cost)).duration_s(Action(stage.id, Pass.F, 0))
            for stage in plan.stages
            if stage.module == "vision"
        ]
        for plan in (joint, apart)
    )
    assert len(set(seconds)) == 2 or exchange is KeyExchange.RING  # whose steps are launches at this size
    assert slowest_s == pytest.approx(max(seconds), rel=1e-12)


def test_memory_is_that_of_the_replica_with_most_tokens() -> None:
    """Of the stage without an expert, what a forward allocates; weights are as many."""
    joint, alone = plan_of(joint_job(ep=2, dp=2, pp=4, samples=2)), plan_of(joint_job(pp=4, samples=1))
    longest = replace(alone, batch=(replace(joint.batch[1], id=0),))
    tables = [memory_table(lower(plan)) for plan in (joint, longest)]
    assert tables[0].acquired_bytes[1][0] == tables[1].acquired_bytes[0][0]
    assert tables[0].acquired_bytes[0][0] < tables[0].acquired_bytes[1][0]  # it sends fewer tokens
    assert tables[0].static_bytes[1] == tables[1].static_bytes[0]


def test_engine_and_sweep_agree_and_a_pass_occupies_all_replicas() -> None:
    lowered = lower(plan_of(joint_job(ep=2, dp=2, pp=2, images=(1, 0, 2, 1))))
    prices = price(lowered, COST)
    iteration_s = assert_equal_times(lowered, prices.duration_s, prices.step_s)
    busiest = max(lowered.plan.stages, key=lambda stage: stage.layers[1])
    passes = [action for action in lowered.plan.program[busiest.flat_ranks[1]] if action.kind in COMPUTE]
    assert iteration_s > sum(map(prices.duration_s, passes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"joint_replicas": 3}, r"joint_replicas must divide the 2 rows of its grid, got 3; nearest: 2"),
        ({"joint_replicas": 1}, r"cp must not change inside a replica"),
    ],
    ids=str,
)
def test_unsound_stages(change: dict[str, int], message: str) -> None:
    plan = plan_of(joint_job(ep=2, dp=2, pp=2))
    first, *others = plan.stages
    with pytest.raises(ValueError, match=message):
        check(replace(plan, stages=(replace(first, **change), *others)))


def test_a_replica_without_a_row_is_refused_where_experts_are() -> None:
    plan = plan_of(joint_job(ep=2, dp=2))
    shard = TokenShard(module="llm", replica=0, microbatch=0, row=1, block_tokens=64, owners=(0,))
    with pytest.raises(ValueError, match=r"each of 2 joint replicas wants a row, number 1 has none"):
        check(replace(plan, token_shards=(shard,)))


def test_a_row_of_two_replicas_is_refused() -> None:
    plan = plan_of(joint_job(ep=2, dp=2))
    shard = TokenShard(module="llm", replica=0, microbatch=0, row=1, block_tokens=4, owners=(0, 1))
    with pytest.raises(ValueError, match=r"belongs to one of the 2 joint replicas, got owners \[0, 1\]"):
        check(replace(plan, token_shards=(shard,)))
