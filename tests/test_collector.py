"""The garbage collector is paused while plans are made, and collects them afterwards."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.oobleck import chaos_job
from runtime.elastic.replan import start_layout, write_plan
from workbench.collector import collector_paused
from workbench.plan.plan import Plan

PLANS = 160


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
    return sum(type(each) is Plan for each in gc.get_objects())


def is_old(thing: object) -> bool:
    return any(each is thing for each in gc.get_objects(generation=2))


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Without what the suite keeps frozen, which the pause leaves alone."""
    gc.unfreeze()
    yield
    gc.freeze()


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


def test_plans_of_step_after_step_are_collected(tmp_path: Path):
    job = chaos_job.elastic_job(2)
    layout = start_layout(job, ("a", "b"))
    gc.collect()
    before = num_plans()
    for step in range(PLANS):
        write_plan(job, layout, step, tmp_path / "plan")
    assert num_plans() - before < PLANS / 2
