"""The optimizer's part of a searched layout's step is its plan's: measured rates, and tied weights once."""

from dataclasses import replace

import pytest

from tests.test_layout_search import LEAST, job_on
from tests.test_muon_search import by_muon, with_layouts
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.job.job import Job
from workbench.memory.stage import state_of
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_search import fastest_layout
from workbench.planner.layout_step import LayoutSteps
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.price import price

H100 = load_profile("H100")
STRATEGY_OF = {
    Mode.HOMOGENEOUS: "megatron-homogeneous",
    Mode.COLOCATED: "megatron-colocated",
    Mode.APART: "megatron-islands",
}


def measured(seconds: float, factor: float) -> Profile:
    """A machine with a measured rate of AdamW, and a STEP that is slower in a pipeline."""
    return replace(H100, optimizer_s_per_parameter=(("bfloat16", seconds),), in_pipeline=(("STEP", factor),))


def plan_of(job: Job, cost: CostModel, mode: Mode) -> Plan:
    if mode in STRATEGY_OF:
        return PLANNERS[STRATEGY_OF[mode]](job, cost)
    return fsdp.fastest_of_size(job, cost, mode)[1]


def update_s(plan: Plan, profile: Profile) -> float:
    """Seconds of the plan's longest update: its STEP, less that of a machine that updates at once."""
    at_once = CostModel(replace(profile, optimizer_s_per_parameter=(("bfloat16", 0.0),)))
    steps_s, others_s = (price(lower(plan), cost).steps_s for cost in (CostModel(profile), at_once))
    return max(steps_s[rank] - others_s[rank] for rank in plan.ranks)


TIED = job_on(8)  # Llama 3.2's head is its table of tokens


@pytest.mark.parametrize("profile", [H100, measured(3e-11, 1.5)], ids=["bytes", "measured"])
@pytest.mark.parametrize(
    ("mode", "job"),
    [
        pytest.param(Mode.HOMOGENEOUS, with_layouts(TIED, tp=2, dp=4, pp=1), id="homogeneous"),
        pytest.param(Mode.COLOCATED, with_layouts(TIED, tp=4, dp=2, pp=1), id="colocated"),
        pytest.param(Mode.APART, with_layouts(TIED, tp=2, dp=2, pp=1), id="islands"),
        pytest.param(Mode.APART, with_layouts(TIED, tp=1, dp=2, pp=2), id="table-and-head-apart"),
        pytest.param(Mode.APART, with_layouts(TIED, tp=4, dp=1, pp=1), id="whole-state"),
        pytest.param(Mode.SHARDED, TIED, id="fsdp"),
        pytest.param(Mode.HYBRID, TIED, id="hsdp"),
    ],
)
def test_adamw_takes_as_long_as_in_the_plan(mode: Mode, job: Job, profile: Profile) -> None:
    cost = CostModel(profile)
    step = fastest_layout(job, cost, mode).step
    assert step.update_s == pytest.approx(update_s(plan_of(job, cost, mode), profile), rel=1e-6)


def test_muon_takes_as_long_as_in_the_plan_where_a_pipeline_is_slower() -> None:
    """Its products and its part of the update are slower, not what ranks send to owners."""
    job = by_muon(with_layouts(TIED, tp=2, dp=4, pp=1))
    found = []
    for factor in (1.0, 1.5):
        cost = CostModel(measured(3e-11, factor))
        plan = plan_of(job, cost, Mode.COLOCATED)
        found.append(
            (fastest_layout(job, cost, Mode.COLOCATED).step.update_s, price(lower(plan), cost).steps_s)
        )
    (alone_s, plan_alone_s), (slower_s, plan_slower_s) = found
    assert slower_s - alone_s == pytest.approx(
        max(plan_slower_s.values()) - max(plan_alone_s.values()), rel=1e-6
    )


@pytest.mark.parametrize(("pp", "dp"), [(1, 4), (2, 2), (2, 1)])
def test_state_of_a_tied_weight_is_that_of_the_plan(pp: int, dp: int) -> None:
    """Each stage that holds it has its weights and gradients; all their ranks shard its optimizer state."""
    job = with_layouts(job_on(8), tp=8 // (2 * pp * dp), dp=dp, pp=pp)
    found = fastest_layout(job, CostModel(H100), Mode.APART, freedom=LEAST)
    plan = plan_of(job, CostModel(H100), Mode.APART)
    steps, llm = LayoutSteps(job, CostModel(H100)), found.choice.llm
    chain = steps._chain(llm)
    believed = [steps.prices.state_bytes(llm, stage.held) for stage in chain.stages]
    held = [
        sum(num_bytes for owner, _, num_bytes in state_of(plan, stage.flat_ranks[0]) if owner.id == stage.id)
        for stage in plan.chain["llm", 0]
    ]
    assert believed == pytest.approx(held, rel=1e-6)
