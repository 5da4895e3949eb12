"""What a process is while a world lasts: what a step held goes with it, and no collector has to find it."""

import gc
import pickle
import weakref
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from experiments.oobleck.chaos_job import batch, elastic_job
from runtime.elastic.job import ElasticJob, plan_step
from runtime.elastic.replan import start_layout
from runtime.elastic.world import World
from runtime.world.communicators import build_mesh
from runtime.world.pool import Place, Pool
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Sharding

STEPS = 4
RANKS_OF_NODES = {"two stages": (1, 1), "two replicas": (1, 1), "sharded": (2,)}


def job_of(name: str) -> ElasticJob:
    """Of two ranks."""
    if name == "sharded":
        job = elastic_job(1, num_faults=0, ranks_per_node=2, ranks_per_stage=2)
        return replace(job, sharding=Sharding.PARAMETERS)
    return elastic_job(2, num_faults=0, layers_per_rank=4 if name == "two stages" else 8)


class Left(NamedTuple):
    """Which executors, wires, gradients and plans of so many steps live after them, by step; which modules
    live after their world."""

    executors: list[bool]
    wires: list[bool]
    gradients: list[bool]
    num_plans: int
    modules: list[bool]


def trained(place: Place, name: str, plans: list[bytes]) -> Left:
    """Steps in a world, with the collector off."""
    job = job_of(name)
    gc.collect()
    gc.disable()
    try:
        first: Lowered = pickle.loads(plans[0])
        world = World(job, first.plan, build_mesh(first, torch.device("cpu"), 30.0))
        del first
        held, seen = world.empty(), []
        for step, content in enumerate(plans):
            lowered: Lowered = pickle.loads(content)
            world.run_step(lowered, held, step, progress=lambda position: None, vote=lambda loss: None)
            executor = world._executor
            assert executor is not None
            seen.append([weakref.ref(each) for each in (executor, executor._wires, executor._gradients)])
            del lowered, executor
        modules = [weakref.ref(module) for module in world.modules.values()]
        by_step = [[each() is not None for each in step] for step in seen]
        num_plans = sum(type(each) is Lowered for each in gc.get_objects())
        assert world._wires is not None
        world._wires.close()
        del world, held
        executors, wires, gradients = (list(column) for column in zip(*by_step, strict=True))
        return Left(executors, wires, gradients, num_plans, [each() is not None for each in modules])
    finally:
        gc.enable()


@pytest.mark.parametrize("name", RANKS_OF_NODES)
def test_a_replaced_executor_its_plan_and_the_modules_of_a_past_world_die_uncollected(
    name: str, pool: Pool
) -> None:
    """On the commit before, every step's stayed until the collector came: it held its own methods."""
    job = job_of(name)
    layout = start_layout(job, ("a", "b")[: len(RANKS_OF_NODES[name])])
    plans = [pickle.dumps(lower(plan_step(job, layout, batch(step)))) for step in range(STEPS)]
    only_last = [*[False] * (STEPS - 1), True]
    for left in pool.run(trained, 2, name, plans):
        assert (left.executors, left.wires, left.gradients) == (only_last, only_last, only_last)
        assert left.num_plans == 1
        assert left.modules
        assert not any(left.modules)
