"""What plans lack in memory where none fits, as strategies make them and with less kept or more sharded."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from workbench.cost.model import CostModel
from workbench.explain.timeline import Timeline
from workbench.job.job import Job
from workbench.memory.account import memory_groups, memory_table, peak_bytes
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Recompute, Sharding
from workbench.search.joint.choice import Choice, build
from workbench.search.joint.setting_moves import with_settings
from workbench.search.joint.starts import Task, start_of
from workbench.units import gib

ROOMIER = 2**20  # times the memory: whatever a strategy does fits
MOST = 4  # strategies that are asked


class _Lack(NamedTuple):
    """Bytes beyond the memory that `rank` is on, negative where all fits; of whose plan, and with what."""

    num_bytes: int
    rank: int
    strategy: str
    change: str

    def __str__(self) -> str:
        with_what = f" with {self.change}" if self.change else ""
        lacks = f"needs {gib(self.num_bytes):+.3g} GiB on rank {self.rank}" if self.num_bytes > 0 else "fits"
        return f"{self.strategy}'s plan{with_what} {lacks}"


class _AnyPlan:
    """A judge that takes every plan."""

    def value(self, plan: Plan) -> float:
        return 0.0

    def timeline(self, plan: Plan) -> Timeline:
        raise NotImplementedError


def nearest_fit(job: Job, cost: CostModel, tasks: Iterable[Task]) -> str:
    """The plan that lacks least, and the first change of settings with which one fits, or that lacks least.

    Of the plans that some strategies make for the same machines with memory enough. Empty where these have
    none either.

    Complexity: `MOST` strategies, and of each plan a memory table for every module and two more.
    """
    nodes = tuple(replace(node, memory_bytes=node.memory_bytes * ROOMIER) for node in job.cluster.nodes)
    roomy = replace(job, cluster=replace(job.cluster, nodes=nodes))
    lacks: list[_Lack] = []
    asked = 0
    for task in tasks:
        start = start_of(task._replace(job=replace(task.job, cluster=roomy.cluster)), cost, _AnyPlan())
        if start.choice is not None:
            lacks += _lacks(job, roomy, start.name, start.choice, cost)
            asked += 1
        if asked == MOST:
            break
    as_made = [lack for lack in lacks if not lack.change]
    if not as_made:
        return ""
    changed = [lack for lack in lacks if lack.change]
    best = next((lack for lack in changed if lack.num_bytes <= 0), None)
    best = best or min(changed, key=attrgetter("num_bytes"), default=None)
    found = [min(as_made, key=attrgetter("num_bytes")), *([best] if best else [])]
    return f"nearest: {'; '.join(map(str, found))}"


def _lacks(job: Job, roomy: Job, name: str, choice: Choice, cost: CostModel) -> Iterator[_Lack]:
    for change, changed in _changes(job, choice):
        try:
            plan = build(roomy, changed, cost)
            lowered = lower(plan)
        except ValueError:  # settings that these stages do not take
            continue
        peaks = peak_bytes(lowered, memory_table(lowered))
        worst = max(
            (sum(peaks[rank] for rank in group) - job.cluster.nodes[node].memory_bytes, -min(group))
            for node, group in memory_groups(plan)
        )
        yield _Lack(worst[0], -worst[1], name, change)


def _changes(job: Job, choice: Choice) -> Iterator[tuple[str, Choice]]:
    """As it is; each module computed again, then all; all of them and the optimizer's state sharded."""
    yield "", choice
    every = [choice.settings.of(module.name) for module in job.model.modules]
    again = [replace(own, recompute=Recompute.FULL) for own in every]
    for own in again:
        yield f"recomputation of {own.module}", with_settings(choice, own)
    if len(again) > 1:
        yield "recomputation of all modules", _with_all(choice, again)
    sharded = [replace(own, sharding=Sharding.OPTIMIZER, instances=1) for own in again]
    yield "recomputation and sharded optimizer state of all modules", _with_all(choice, sharded)


def _with_all(choice: Choice, settings: Iterable[ModuleSettings]) -> Choice:
    for own in settings:
        choice = with_settings(choice, own)
    return choice
