"""The garbage collector is paused while plans are made, and collects them afterwards."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.oobleck import chaos_job
from runtime.elastic.replan import start_layout, write_plan
from sim.predict import IterationJudge
from tests.test_alike import PLANS
from tests.test_joint_search import searched, small
from tests.test_strategies import cost
from workbench.collector import collector_paused
from workbench.plan.lru_cache import clear_caches
from workbench.plan.plan import Plan

STEPS = 160


class Chained:
    """An object that the collector knows."""

    def __init__(self, before: "Chained | None") -> None:
        self.before = before


def chain(length: int) -> Chained:
    last = Chained(None)
    for _ in range(length - 1):
        last = Chained(last)
    return last


def num_plans() -> int:
    """That have programs: drafts are small."""
    return sum(type(each) is Plan and bool(each.programs) for each in gc.get_objects())


def is_old(thing: object) -> bool:
    return any(each is thing for each in gc.get_objects(generation=2))


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Without what the suite keeps frozen, which the pause leaves alone."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def stopped() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("unfrozen")
def test_many_objects_count_as_old_at_once_and_few_do_not():
    with collector_paused(many=5_000):
        assert not gc.isenabled()
        many = chain(6_000)
    assert gc.isenabled()
    assert is_old(many)
    gc.collect(0)
    with collector_paused(many=5_000):
        few = Chained(None)
    assert not is_old(few)


@pytest.mark.usefixtures("unfrozen")
def test_what_was_made_before_a_pause_does_not_count():
    gc.collect(0)
    before = chain(6_000)
    with collector_paused(many=5_000):
        few = Chained(None)
    assert not is_old(before)
    assert not is_old(few)


def test_plans_of_step_after_step_are_collected(tmp_path: Path):
    job = chaos_job.elastic_job(2)
    layout = start_layout(job, ("a", "b"))
    gc.collect()
    before = num_plans()
    for step in range(STEPS):
        write_plan(job, layout, step, tmp_path / "plan")
    assert num_plans() - before < STEPS / 2


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("plan_of", PLANS.values(), ids=PLANS)
def test_a_plan_that_was_judged_goes_at_once_when_it_is_dropped(plan_of: Callable[[], Plan]):
    """It is in no cycle with what is kept of it; what plans share is forgotten first."""
    plan, judge = replace(plan_of()), IterationJudge(cost())
    judge.value(plan)
    judge.timeline(plan)
    dropped = weakref.ref(plan)
    del plan
    clear_caches()
    assert dropped() is None


@pytest.mark.usefixtures("stopped")
def test_a_search_leaves_no_plans_behind():
    searched(small(), candidates=1)  # what is made once and stays
    clear_caches()
    before = num_plans()
    found = searched(small())
    assert num_plans() > before
    del found
    clear_caches()
    assert num_plans() == before
