"""Clipping in STEP: gradients are read for the norm, which ranks add up, then read and written to scale."""

from dataclasses import replace

import pytest

from tests.plans import LINK, WIDTH, disjoint_plan, sample, two_encoders
from tests.test_muon_search import by_muon, with_layouts
from tests.test_update_estimate import H100, TIED, plan_of
from workbench.cost.collectives import all_reduce_s
from workbench.cost.eager_traffic import OptimizerKernels
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.cost.weight_update import Clipping
from workbench.plan.folded import judged_part
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Settings, Sharding
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_search import fastest_layout
from workbench.timing.price import Price, price

CUTS = {"vision": (1, 2), "audio": (2,), "llm": (2, 2)}
RATE = 1e9  # bytes a second
WEIGHTS = WIDTH * WIDTH  # of a layer
REST = "clipping of gradients: bytes over memory bandwidth"


def toy(replicas: int, settings: Settings) -> Plan:
    """Two encoders, whose last layers train, and a frozen LLM: ranks 1 and 2 of each replica train."""
    batch = [sample(i) for i in range(2 * replicas)]
    return replace(disjoint_plan(two_encoders(), batch, CUTS, replicas=replicas), settings=settings)


def priced(plan: Plan, clipping: Clipping, **run: OptimizerKernels) -> Price:
    execution = Execution(clipping=clipping, **run)
    return price(lower(plan), CostModel(ideal_profile(bytes_per_s=RATE), execution))


def clipped_s(plan: Plan, clipping: Clipping, **run: OptimizerKernels) -> list[float]:
    """Seconds that clipping adds to the STEP of every rank."""
    on, off = priced(plan, clipping, **run), priced(plan, Clipping.OFF, **run)
    return [on.steps_s[rank] - off.steps_s[rank] for rank in plan.ranks]


@pytest.mark.parametrize(("clipping", "moved"), [(Clipping.OFF, 0), (Clipping.NORM, 1), (Clipping.SCALED, 3)])
@pytest.mark.parametrize(
    ("settings", "kernels", "element"),
    [
        (Settings(precision=Precision.FLOAT32), OptimizerKernels.FUSED, 4),
        (Settings(precision=Precision.BFLOAT16), OptimizerKernels.FUSED, 2),
        (Settings(optimizer_precision=Precision.FLOAT32), OptimizerKernels.FUSED, 4),
        (Settings(precision=Precision.BFLOAT16), OptimizerKernels.EAGER, 4),
    ],
)
def test_a_rank_moves_its_gradients_and_all_that_train_add_up_a_number(
    clipping: Clipping, moved: int, settings: Settings, kernels: OptimizerKernels, element: int
) -> None:
    sum_s = all_reduce_s(8, 4, LINK) if moved else 0.0  # two trained stages of two replicas
    trained = [0, 1, 1, 0, 0] * 2
    expected = [sum_s + moved * element * WEIGHTS * is_trained / RATE for is_trained in trained]
    found = clipped_s(toy(2, settings), clipping, optimizer_kernels=kernels)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_of_a_sharded_optimizer_each_rank_clips_its_part() -> None:
    sharded = ModuleSettings(module="vision", sharding=Sharding.OPTIMIZER)
    plan = toy(2, Settings(precision=Precision.FLOAT32, modules=(sharded,)))
    found = clipped_s(plan, Clipping.SCALED)
    moved_s = 12 * WEIGHTS / RATE
    assert found[2] - found[1] == pytest.approx(moved_s / 2)
    assert found[1] - found[0] == pytest.approx(moved_s / 2)


def test_the_price_says_that_clipping_is_not_measured() -> None:
    plan = toy(1, Settings())
    assert REST in priced(plan, Clipping.NORM).unmeasured
    assert REST not in priced(plan, Clipping.OFF).unmeasured


def test_one_of_equal_replicas_waits_for_the_norm_of_all() -> None:
    whole = toy(4, Settings())
    part = judged_part(whole)
    assert len(part.ranks) < len(whole.ranks)
    of_whole, of_part = (priced(plan, Clipping.SCALED).steps_s for plan in (whole, part))
    assert of_part == {rank: of_whole[rank] for rank in part.ranks}


@pytest.mark.parametrize(
    ("mode", "job"),
    [
        pytest.param(Mode.COLOCATED, with_layouts(TIED, tp=4, dp=2, pp=1), id="colocated"),
        pytest.param(Mode.APART, with_layouts(TIED, tp=1, dp=2, pp=2), id="islands"),
        pytest.param(Mode.SHARDED, TIED, id="fsdp"),
        pytest.param(Mode.COLOCATED, by_muon(with_layouts(TIED, tp=4, dp=2, pp=1)), id="muon"),
        pytest.param(Mode.SHARDED, by_muon(TIED), id="muon-fsdp"),
    ],
)
def test_a_searched_layout_clips_as_its_plan_does(mode: Mode, job) -> None:
    """Scaling costs both a read and a write of the gradients of the fullest rank."""
    runs = [CostModel(H100, Execution(clipping=each)) for each in (Clipping.NORM, Clipping.SCALED)]
    norm_s, scaled_s = (fastest_layout(job, cost, mode).step.update_s for cost in runs)
    plan = plan_of(job, runs[0], mode)
    norms, scales = (price(lower(plan), cost).steps_s for cost in runs)
    assert scaled_s - norm_s == pytest.approx(max(scales[r] - norms[r] for r in plan.ranks), rel=1e-6)
    assert scaled_s > norm_s
