"""The next batch of plans whose modules share it out by degrees of their own."""

from dataclasses import replace

import pytest

from tests.layout_jobs import APART, layout_job, planned, three_phase, vision_language
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.plan.following import next_plan
from workbench.strategies import megatron_heterogeneous
from workbench.timing.accept import accept

BEFORE, AFTER = (1, 1, 2, 1, 1, 0, 1, 1), (0, 2, 1, 1, 3, 1, 1, 2)


@pytest.mark.parametrize(
    ("layouts", "schedule"),
    [
        pytest.param({"vision": (3, 1, 1), "llm": (2, 2, 1)}, APART, id="apart-3-2"),
        pytest.param({"vision": (1, 1, 1), "llm": (2, 2, 1)}, APART, id="apart-1-2"),
        pytest.param({"vision": (4, 1, 1), "llm": (2, 2, 1)}, three_phase(), id="colocated-4-2"),
        pytest.param({"vision": (4, 1, 1), "llm": (2, 2, 1)}, three_phase(window=2), id="in-windows"),
    ],
)
def test_it_is_the_plan_that_the_strategy_makes(layouts, schedule):
    model = vision_language()
    job = layout_job(model, layouts, microbatch=1, images=BEFORE, schedule=schedule)
    plan = planned(model, layouts, microbatch=1, images=BEFORE, schedule=schedule)
    batch = tiny_batch(AFTER, (0,) * len(AFTER))
    wanted = megatron_heterogeneous.plan(replace(job, batch=batch), CostModel(load_profile("A40")))
    followed = next_plan(plan, batch)
    accept(followed)
    assert set(followed.microbatches) == set(wanted.microbatches)
    assert followed.programs == wanted.programs


def test_what_is_not_sharded_needs_its_strategy():
    layouts = {"vision": (3, 1, 1), "llm": (2, 2, 1)}
    plan = planned(vision_language(), layouts, microbatch=1, images=BEFORE, schedule=APART)
    lost = replace(plan, microbatches=tuple(m for m in plan.microbatches if m.module == "llm"))
    with pytest.raises(ValueError, match="plan every batch by its strategy"):
        next_plan(lost, tiny_batch(AFTER, (0,) * len(AFTER)))
