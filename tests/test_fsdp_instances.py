"""Several instances of sharded weights: where they add up their parts, and what that costs."""

from dataclasses import replace

import pytest

from sim.step.engine import simulate
from tests.plans import LINK
from tests.test_fsdp_plan import A40, fsdp_job, of_layers
from tests.test_sim_sweep import assert_equal_times
from workbench.cost.collectives import all_reduce_s, reduce_scatter_s
from workbench.cost.hardware import Cluster, Link, Node
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.lower import lower
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_search import fastest_layout
from workbench.schedule.action import Action, Pass
from workbench.schedule.sharded import waits_of
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept
from workbench.timing.price import price


def test_sums_over_instances_stand_behind_the_next_layer_s_reduction() -> None:
    """Two instances of two ranks, three layers, one microbatch each: nothing waits for a sum but STEP."""
    plan = of_layers(3, replicas=4, num_samples=4, instances=2)
    first, second, third = (stage.id for stage in plan.chain["llm", 0])
    kinds = (Pass.B, Pass.REDUCE_SCATTER, Pass.REDUCE_GRAD, Pass.STEP)
    told = " ".join(str(a) for a in plan.program[0] if a.kind in kinds)
    assert told == (
        f"{third}B0 {third}REDUCE_SCATTER0 {second}B0 {second}REDUCE_SCATTER1 {third}REDUCE_GRAD "
        f"{first}B0 {first}REDUCE_SCATTER1 {second}REDUCE_GRAD {first}REDUCE_GRAD STEP"
    )
    waits = waits_of(plan.program[0])
    assert waits[Action(third, Pass.REDUCE_GRAD)] == (Action(third, Pass.REDUCE_SCATTER, 0),)
    assert Action(third, Pass.REDUCE_SCATTER, 0) in waits[Action(first, Pass.B, 0)]


@pytest.mark.parametrize("num_layers", [2, 5])
def test_sums_over_instances_hide_but_for_the_last(num_layers: int) -> None:
    """L layers of passes of 1 s: each sum follows its reduction, beside the backward of the layer before."""
    plan = of_layers(num_layers, replicas=4, num_samples=4, instances=2)
    lowered = lower(plan)
    seconds = {
        Pass.ALL_GATHER: 0.25,
        Pass.F: 1.0,
        Pass.B: 1.0,
        Pass.REDUCE_SCATTER: 0.5,
        Pass.REDUCE_GRAD: 0.125,
    }

    def duration_s(action: Action) -> float:
        return seconds.get(action.kind, 0.0)

    assert assert_equal_times(lowered, duration_s) == 0.25 + 2 * num_layers + 0.5 + 0.125


def test_sums_over_instances_are_all_reduces_of_parts() -> None:
    plan = of_layers(2, replicas=4, num_samples=4, instances=2)
    prices = price(lower(plan), CostModel(ideal_profile(flop_per_s=1e12)))
    stage = plan.chain["llm", 0][0].id
    assert prices.duration_s(Action(stage, Pass.REDUCE_GRAD)) == all_reduce_s(32 * 4, 2, LINK)
    assert prices.duration_s(Action(stage, Pass.REDUCE_SCATTER, 1)) == reduce_scatter_s(64 * 4, 2, LINK)


def two_nodes(uplink_bytes_per_s: float) -> Job:
    """Eight samples on two nodes of two ranks."""
    node = Node(device="A40", num_ranks=2, memory_bytes=2**34)
    near = Link(name="near", bytes_per_s=50e9, latency_s=1e-6)
    far = Link(name="far", bytes_per_s=uplink_bytes_per_s, latency_s=1e-5)
    return replace(fsdp_job(1), cluster=Cluster(name="two", nodes=(node, node), intra=near, inter=far))


def test_instances_stay_in_a_node_where_the_link_between_is_slow() -> None:
    """The formula says what is simulated, and which of the two is faster on all ranks."""
    layouts = tuple(ModuleLayout(module=name, dp=4) for name in ("vision", "llm"))
    job = replace(two_nodes(1e8), layouts=layouts)
    simulated = {}
    for strategy, mode in (("fsdp", Mode.SHARDED), ("hsdp", Mode.HYBRID)):
        plan = PLANNERS[strategy](job, A40)
        lowered, _ = accept(plan)
        prices = price(lowered, A40)
        simulated[mode] = simulate(lowered, prices.duration_s, step_s=prices.step_s).iteration_s
        samples = len(plan.microbatches[0].items)
        formula = fastest_layout(replace(job, microbatch_samples=samples), A40, mode).step.step_s
        assert simulated[mode] == pytest.approx(formula, rel=0.05)
        assert {module.instances for module in plan.settings.modules} == {1 if mode is Mode.SHARDED else 2}
    assert simulated[Mode.HYBRID] < simulated[Mode.SHARDED]


def test_two_ranks_are_no_two_instances() -> None:
    with pytest.raises(ValueError, match="no hybrid layout"):
        PLANNERS["hsdp"](fsdp_job(1, num_ranks=2), A40)
