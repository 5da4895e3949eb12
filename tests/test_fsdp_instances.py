"""Several instances of shared-out weights: where they add up their parts, and what that costs."""

import pytest

from tests.plans import LINK
from tests.test_fsdp_plan import assert_equal_times, of_layers
from workbench.cost.collectives import all_reduce_s, reduce_scatter_s
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.plan.lower import lower
from workbench.plan.price import price
from workbench.schedule.action import STEP, Action, Pass
from workbench.schedule.sharded import waits_of


def test_sums_over_instances_stand_behind_the_next_layer_s_reduction() -> None:
    """Two instances of two ranks, three layers, one microbatch each: nothing waits for a sum but STEP."""
    plan = of_layers(3, replicas=4, num_samples=4, instances=2)
    first, second, third = (stage.id for stage in plan.chain["llm", 0])
    told = " ".join(str(a) for a in plan.program[0] if a.kind in (Pass.B, Pass.REDUCE_GRAD, Pass.STEP))
    assert told == (
        f"{third}B0 {third}REDUCE_GRAD0 {second}B0 {second}REDUCE_GRAD1 {third}REDUCE_GRAD "
        f"{first}B0 {first}REDUCE_GRAD1 {second}REDUCE_GRAD {first}REDUCE_GRAD STEP"
    )
    waits = waits_of(plan.program[0], {first, second, third})
    assert waits[Action(third, Pass.REDUCE_GRAD)] == (Action(third, Pass.REDUCE_GRAD, 0),)
    assert Action(third, Pass.REDUCE_GRAD, 0) in waits[Action(first, Pass.B, 0)]


@pytest.mark.parametrize("num_layers", [2, 5])
def test_sums_over_instances_hide_but_for_the_last(num_layers: int) -> None:
    """L layers of passes of 1 s: each sum follows its reduction, beside the backward of the layer before."""
    plan = of_layers(num_layers, replicas=4, num_samples=4, instances=2)
    lowered = lower(plan)
    seconds = {Pass.UNSHARD: 0.25, Pass.F: 1.0, Pass.B: 1.0}

    def duration_s(action: Action) -> float:
        sums = 0.125 if action.microbatch is None and action != STEP else 0.5
        return seconds.get(action.kind, sums if action.kind is Pass.REDUCE_GRAD else 0.0)

    assert assert_equal_times(lowered, duration_s) == 0.25 + 2 * num_layers + 0.5 + 0.125


def test_sums_over_instances_are_all_reduces_of_parts() -> None:
    plan = of_layers(2, replicas=4, num_samples=4, instances=2)
    prices = price(lower(plan), CostModel(ideal_profile(flop_per_s=1e12)))
    stage = plan.chain["llm", 0][0].id
    assert prices.duration_s(Action(stage, Pass.REDUCE_GRAD)) == all_reduce_s(32 * 4, 2, LINK)
    assert prices.duration_s(Action(stage, Pass.REDUCE_GRAD, 1)) == reduce_scatter_s(64 * 4, 2, LINK)
