"""What holds of every plan, whoever made it: bounds of its step, and its step on other links and machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.predict import predict, prices_of, step_s
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, Table
from workbench.explain.explanation import account_of
from workbench.job.job import job_from_spec
from workbench.job.machines import cost_of
from workbench.job.schema import JobSpec
from workbench.memory.account import memory_table
from workbench.metrics import busy_s
from workbench.plan.lowered import Lowered
from workbench.planner.stage_counts import silent
from workbench.schedule.action import COMPUTE
from workbench.schedule.choice import ScheduleKind
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import checked

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 224,
    "patch_size": 14,
    "vision_use_head": False,
}
LLM = {
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
}
SIZES = {"seed": 0, "text_tokens": [64, 512], "items": {"vision": {"most": 2, "missing": 0.25}}}
QUICK = [name for name in PLANNERS if not name.startswith(("entrain", "auto"))]
two = st.sampled_from([1, 2])


@st.composite
def plans(draw: st.DrawFn, nodes: st.SearchStrategy[int] = two) -> tuple[Lowered, CostModel]:
    """A small model by any strategy and schedule, with any degrees and frozen parts that they take."""
    profile, trained = draw(st.sampled_from(["H100", "A40", "V100-32GB"])), st.sampled_from(["all", "none"])
    cluster: dict[str, Any] = {"device": profile, "nodes": draw(nodes), "ranks_per_node": 8}
    if draw(st.booleans()):
        cluster["intra"] = {"gb_per_s": 50, "latency_us": draw(st.sampled_from([1, 20]))}
    llm = {"pp": 2, "tp": draw(two), "cp": draw(two), "recompute": draw(st.sampled_from(["none", "full"]))}
    sharding = draw(st.sampled_from(["none", "optimizer", "parameters"]))
    spec = {
        "name": "physics",
        "model": {
            "modules": {
                "vision": {"config": VISION, "trainable": draw(trained), "projector": "mlp"},
                "llm": {"config": LLM, "trainable": draw(trained)},
            }
        },
        "cluster": cluster,
        "batch": {"samples": 4, "replicas": draw(two), "mixture": SIZES},
        "layouts": {"vision": {"pp": 1}, "llm": llm | {"sharding": sharding}},
        "schedule": {"kind": draw(st.sampled_from(list(ScheduleKind))).value},
        "profile": profile,
    }
    job, strategy = job_from_spec(JobSpec.model_validate(spec), folder=Path()), draw(st.sampled_from(QUICK))
    cost, lowered = cost_of(job, None, None), None
    try:
        lowered = checked(PLANNERS[strategy](job, cost, silent))
    except ValueError:  # not for this strategy
        assume(lowered is not None)
    assert lowered is not None
    return lowered, cost


few = settings(max_examples=8, deadline=None)


def on_links(lowered: Lowered, *, faster: float = 1.0, later: float = 1.0) -> Lowered:
    """The plan on links of other bandwidths and latencies."""

    def other(link: Link) -> Link:
        return replace(link, bytes_per_s=faster * link.bytes_per_s, latency_s=later * link.latency_s)

    cluster = lowered.plan.cluster
    linked = replace(cluster, intra=other(cluster.intra), inter=other(cluster.inter))
    return replace(lowered, plan=replace(lowered.plan, cluster=linked))


@given(plans())
@few
def test_a_step_is_at_least_its_busiest_rank_and_at_most_everything_in_turn(drawn):
    lowered, cost = drawn
    prices, trace = prices_of(lowered, cost), predict(lowered, memory_table(lowered), cost)
    busiest_s = max(
        sum(prices.duration_s(each) for each in actions if each.kind in COMPUTE) + prices.step_s(rank)
        for rank, actions in lowered.plan.program.items()
    )
    in_turn_s = sum(prices.durations_s.values()) + sum(prices.steps_s.values())
    in_turn_s += sum(message.end_s - message.start_s for message in trace.messages)
    assert busiest_s * (1 - 1e-9) <= trace.iteration_s <= in_turn_s * (1 + 1e-9)


@given(plans())
@few
def test_every_second_of_a_step_has_a_cause(drawn):
    lowered, cost = drawn
    trace = predict(lowered, memory_table(lowered), cost)
    account, num_ranks = account_of(lowered, trace, cost, prices_of), lowered.plan.cluster.num_ranks
    assert sum(each.seconds for each in account.path) == pytest.approx(trace.iteration_s)
    idle_s = sum(each.seconds for each in account.idle)
    assert idle_s + sum(busy_s(trace).values()) / num_ranks == pytest.approx(trace.iteration_s)


@given(plans(), st.sampled_from([0.5, 0.9, 1.1, 2.0]))
@few
def test_other_links_change_a_step_as_they_must(drawn, factor: float):
    """Whether their collectives were measured at that rate or not."""
    lowered, cost = drawn
    own_s = step_s(lowered, cost)
    faster_s, later_s = (step_s(on_links(lowered, **{how: factor}), cost) for how in ("faster", "later"))
    assert (faster_s - own_s) * (factor - 1) <= 1e-6 * own_s
    assert (later_s - own_s) * (factor - 1) >= -1e-6 * own_s


def times_as_fast(profile: Profile, factor: float) -> Profile:
    """The machine with all rates times a factor, and all times through it."""

    def rates(table: Table) -> Table:
        points = tuple((*at, factor * rate) for *at, rate in table.points)
        return replace(table, points=points)

    launch, peak = profile.launch, profile.peak_bytes_per_s
    assert launch is not None
    assert peak is not None
    return replace(
        profile,
        peak_flop_per_s=tuple((name, factor * rate) for name, rate in profile.peak_flop_per_s),
        peak_bytes_per_s=factor * peak,
        matmul=rates(profile.matmul),
        attention=rates(profile.attention),
        pointwise=rates(profile.pointwise),
        normalization=rates(profile.normalization),
        sustained_products=tuple(
            replace(each, table=rates(each.table)) for each in profile.sustained_products
        ),
        sustained_attention=tuple(
            replace(each, forward=rates(each.forward), backward=rates(each.backward))
            for each in profile.sustained_attention
        ),
        kernel_floor_s=profile.kernel_floor_s / factor,
        launch=replace(
            launch,
            kernel_gap_s=launch.kernel_gap_s / factor,
            graph_gap_s=launch.graph_gap_s / factor,
            host_kernel_s=launch.host_kernel_s / factor,
            host_collective_s=launch.host_collective_s / factor,
        ),
        links=tuple(
            replace(each, bytes_per_s=factor * each.bytes_per_s, latency_s=each.latency_s / factor)
            for each in profile.links
        ),
        collectives=tuple(replace(each, table=rates(each.table)) for each in profile.collectives),
    )


@given(plans(nodes=st.just(1)))
@few
def test_a_machine_four_times_as_fast_takes_a_quarter(drawn):
    lowered, cost = drawn
    fast = CostModel(times_as_fast(cost.profile, 4.0))
    fast_s = step_s(on_links(lowered, faster=4.0, later=0.25), fast)
    assert fast_s == pytest.approx(step_s(lowered, cost) / 4.0, rel=1e-6)
