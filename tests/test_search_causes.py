"""What a step goes into: all of every rank's time, and the cause that a plan is known for."""

from dataclasses import replace

import pytest

from experiments.search.compared import KERNELS, causes_of
from tests.test_strategies import cost, job
from tests.tiny_valm import tiny_batch
from workbench.explain.idle import IdleCause
from workbench.strategies.registry import PLANNERS

BATCH = tiny_batch(images=(1, 2, 0, 1, 2, 0, 1, 1), clips=(1, 0, 0, 2, 1, 1, 0, 2))


def plan_of(name, **changes):
    asked = replace(job(batch=BATCH), **changes)
    return PLANNERS[name](asked, cost())


@pytest.mark.parametrize("name", ["cornstarch", "encoders-colocated", "megatron-homogeneous", "fsdp"])
def test_causes_are_all_of_every_ranks_time(name):
    changes = (
        {"layouts": (), "replicas": 1, "max_ranks": 8} if name in ("fsdp", "megatron-homogeneous") else {}
    )
    causes = causes_of(plan_of(name, **changes), cost())
    assert sum(causes.values()) == pytest.approx(1.0)
    assert min(causes.values()) > 0
    assert list(causes.values()) == sorted(causes.values(), reverse=True)


def test_a_pipeline_fills_and_ranks_that_all_hold_everything_do_not():
    free = {"layouts": (), "replicas": 1, "max_ranks": 8}
    pipeline, sharded = causes_of(plan_of("cornstarch"), cost()), causes_of(plan_of("fsdp", **free), cost())
    assert pipeline[IdleCause.FILL] > 0
    assert IdleCause.FILL not in sharded
    assert sharded[KERNELS] > 0
