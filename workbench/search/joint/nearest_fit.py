"""How much memory plans lack if none fits, as made and with more recomputation or sharding."""

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

ROOMIER = 2**20  # factor on the memory, with which every plan fits
MOST = 4  # strategies that plan again


class _Shortage(NamedTuple):
    """Bytes missing on `rank`'s memory, negative if the plan of `strategy` with `change` fits."""

    num_bytes: int
    rank: int
    strategy: str
    change: str

    def __str__(self) -> str:
        with_what = f" with {self.change}" if self.change else ""
        lacks = f"needs {gib(self.num_bytes):+.3g} GiB on rank {self.rank}" if self.num_bytes > 0 else "fits"
        return f"{self.strategy}'s plan{with_what} {lacks}"


class _AnyPlan:
    """A judge that accepts every plan."""

    def value(self, plan: Plan) -> float:
        return 0.0

    def timeline(self, plan: Plan) -> Timeline:
        raise NotImplementedError


def nearest_fit(job: Job, cost: CostModel, tasks: Iterable[Task]) -> str:
    """Name the plan that lacks least memory, and the first change that makes one fit or lacks least.

    The plans are those that some strategies make for the same machines with ample memory. Empty if there
    are none.

    Complexity: `MOST` strategies, and for each plan a memory table per module plus two.
    """
    nodes = tuple(replace(node, memory_bytes=node.memory_bytes * ROOMIER) for node in job.cluster.nodes)
    roomy = replace(job, cluster=replace(job.cluster, nodes=nodes))
    shortages: list[_Shortage] = []
    num_planned = 0
    for task in tasks:
        start = start_of(task._replace(job=replace(task.job, cluster=roomy.cluster)), cost, _AnyPlan())
        if start.choice is not None:
            shortages += _shortages(job, roomy, start.name, start.choice, cost)
            num_planned += 1
        if num_planned == MOST:
            break
    as_made = [shortage for shortage in shortages if not shortage.change]
    if not as_made:
        return ""
    changed = [shortage for shortage in shortages if shortage.change]
    best = next((shortage for shortage in changed if shortage.num_bytes <= 0), None)
    best = best or min(changed, key=attrgetter("num_bytes"), default=None)
    nearest = [min(as_made, key=attrgetter("num_bytes")), *([best] if best else [])]
    return f"nearest: {'; '.join(map(str, nearest))}"


def _shortages(job: Job, roomy: Job, name: str, choice: Choice, cost: CostModel) -> Iterator[_Shortage]:
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
        yield _Shortage(worst[0], -worst[1], name, change)


def _changes(job: Job, choice: Choice) -> Iterator[tuple[str, Choice]]:
    """The choice itself; each module recomputed, then all; all, with sharded optimizer state."""
    yield "", choice
    settings = [choice.settings.of(module.name) for module in job.model.modules]
    recomputed = [module_settings.recomputing(Recompute.FULL) for module_settings in settings]
    for module_settings in recomputed:
        yield f"recomputation of {module_settings.module}", with_settings(choice, module_settings)
    if len(recomputed) > 1:
        yield "recomputation of all modules", _with_all(choice, recomputed)
    sharded = [module_settings.sharded(Sharding.OPTIMIZER) for module_settings in recomputed]
    yield "recomputation and sharded optimizer state of all modules", _with_all(choice, sharded)


def _with_all(choice: Choice, settings: Iterable[ModuleSettings]) -> Choice:
    for module_settings in settings:
        choice = with_settings(choice, module_settings)
    return choice
