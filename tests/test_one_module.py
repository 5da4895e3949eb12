"""A job of one language model, without encoders, under the strategies that search layouts."""

from dataclasses import replace

import pytest

from experiments.doors.export_jobs import export_jobs
from sim.predict import predict
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.strategies.registry import BY_NAME
from workbench.timing.accept import accept


@pytest.fixture(scope="module")
def job() -> Job:
    """With no layout, so that all degrees are free."""
    found = next(job for job in export_jobs() if job.name == "qwen2")
    assert len(found.model.modules) == 1
    return replace(found, layouts=())


def iteration_s(job: Job, strategy: str) -> float:
    cost = cost_of(job, None, None)
    plan = BY_NAME[strategy].planner(job, cost, lambda *_: None)
    assert len(plan.ranks) == job.cluster.num_ranks
    return predict(*accept(plan), cost).iteration_s


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_sharded_strategies_take_it(job, strategy):
    assert iteration_s(job, strategy) > 0


def test_encoders_beside_before_or_with_it_make_no_difference_where_there_are_none(job):
    searched = ("megatron-homogeneous", "megatron-islands", "megatron-colocated")
    assert len({iteration_s(job, strategy) for strategy in searched}) == 1
