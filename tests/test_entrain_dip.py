"""DIP's static form: encoders in even sub-microbatches before the LLM, and the same training."""

from dataclasses import replace
from itertools import pairwise

import pytest

from runtime.world.pool import Pool
from tests.test_data_strategies import CLIPS, COST, IMAGES, skewed_job
from tests.test_parity import assert_same
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.schedule.action import Pass
from workbench.schedule.choice import ScheduleKind
from workbench.strategies import dip


def colocated_job(mix: str = "projectors-and-llm", *, replicas: int = 1) -> Job:
    """Two stages of every module on the same ranks."""
    layouts = tuple(ModuleLayout(module=module, pp=2) for module in ("vision", "audio", "llm"))
    return replace(skewed_job(mix, replicas=replicas), layouts=layouts)


def test_encoders_run_before_the_llm_forward_and_after_it_backward():
    plan = dip.plan(colocated_job("everything"), COST)
    llm = {stage.id for stage in plan.chain["llm", 0]}
    for program in plan.programs:
        passes = [a for a in program.actions if a.kind in (Pass.F, Pass.B)]
        assert {a.stage in llm for a in passes} == {True, False}
        inside = [index for index, action in enumerate(passes) if action.stage in llm]
        assert inside == list(range(inside[0], inside[-1] + 1))
        assert {a.kind for a in passes[: inside[0]]} == {Pass.F}
        assert {a.kind for a in passes[inside[-1] + 1 :]} == {Pass.B}


def test_sub_microbatches_stay_inside_their_microbatch_and_share_its_items():
    job = colocated_job()
    plan = dip.plan(job, COST)
    whole = [{item.sample for item in m.items} for m in plan.microbatches_of["llm", 0]]
    for module, counts in (("vision", IMAGES), ("audio", CLIPS)):
        parts = plan.microbatches_of[module, 0]
        assert all(any({item.sample for item in m.items} <= of for of in whole) for m in parts)
        items = [item for m in parts for item in m.items]
        assert len(items) == len(set(items)) == sum(counts)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_is_the_same_under_dip(replicas: int, pool: Pool):
    assert_same(dip.plan(colocated_job("everything", replicas=replicas), COST), pool)


def test_a_module_without_pp_takes_all_ranks():
    layouts = tuple(ModuleLayout(module=module, tp=tp) for module, tp in (("vision", 1), ("audio", 1)))
    job = replace(skewed_job(), layouts=(*layouts, ModuleLayout(module="llm", tp=1)), max_ranks=2)
    plan = dip.plan(job, COST)
    assert {len(chain) for chain in plan.chain.values()} == {2}
    assert plan.ranks == (0, 1)


def test_what_cannot_be_shared_is_refused():
    layouts = tuple(ModuleLayout(module=module) for module in ("vision", "audio", "llm"))
    open_job = replace(skewed_job(replicas=2), layouts=layouts, max_ranks=3)
    with pytest.raises(ValueError, match=r"3 ranks must divide by the 2 .* nearest: max_ranks 2"):
        dip.plan(open_job, COST)
    with pytest.raises(ValueError, match="want 1 replicas of 'vision', got dp 2"):
        dip.plan(replace(skewed_job(), layouts=(ModuleLayout(module="vision", dp=2),)), COST)


def test_a_schedule_of_three_phases_is_kept():
    job = colocated_job()
    windowed = replace(job.schedule, kind=ScheduleKind.THREE_PHASE, window=2)
    plan = dip.plan(replace(job, schedule=windowed), COST)
    llm = plan.chain["llm", 0][0].id
    (program, *_) = [p for p in plan.programs if any(a.stage == llm for a in p.actions)]
    changes = [a.stage == llm for a in program.actions if a.kind in (Pass.F, Pass.B)]
    assert sum(before != after for before, after in pairwise(changes)) > 2
