"""Random jobs from the space that a registered strategy's own paper searches."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import TEXT, Module
from workbench.plan.plan import ModuleSettings, Recompute, Sharding
from workbench.plan.runnable_degrees import may_divide
from workbench.planner.strategy_spec import Chooser, OwnSpace
from workbench.schedule.sharded import ReshardAfter
from workbench.strategies.registry import STRATEGIES

TP_SIZES, CP_SIZES, MICROBATCHES = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)
OPEN_SHARE = 0.1  # share of draws in which the strategy chooses its stage counts

OWN_SPACES: Mapping[str, OwnSpace] = {spec.name: spec.own_space for spec in STRATEGIES}


def tensor_sizes(job: Job, module: Module) -> list[int]:
    """Runnable tensor-parallel degrees within a node that divide the module's numbers of key-value heads."""
    node = min(node.num_ranks for node in job.cluster.nodes)
    dividing = [tp for tp in TP_SIZES if tp <= node and all(count % tp == 0 for count in module.kv_heads)]
    return [tp for tp in dividing if may_divide(module, tp=tp, cp=1)]


def token_sizes(module: Module) -> list[int]:
    """Runnable context-parallel degrees."""
    return [cp for cp in CP_SIZES if may_divide(module, tp=1, cp=cp)]


def shared_grids(job: Job) -> list[tuple[int, int]]:
    """The (tp, cp) that all modules support."""
    modules = job.model.modules
    tps = set.intersection(*(set(tensor_sizes(job, module)) for module in modules))
    return list(product(tps, set.intersection(*(set(token_sizes(module)) for module in modules))))


@dataclass(frozen=True, slots=True)
class Draws:
    """Jobs that users of a strategy could write for one job's devices and batch.

    Args:
        job: with layouts left open.
        space: the strategy's own space.
        open_share: share of draws in which the strategy chooses its stage counts.
    """

    job: Job
    space: OwnSpace
    open_share: float = OPEN_SHARE

    def fresh(self, rng: random.Random) -> Job:
        """Draw everything anew."""
        job = replace(
            self.job,
            microbatch_samples=rng.choice(self._microbatches()),
            schedule=rng.choice(self.space.schedules),
        )
        job = self._with_layouts(job, rng)
        return self._with_settings(job, rng)

    def near(self, job: Job, rng: random.Random) -> Job:
        """Draw one thing anew; ValueError where the job does not allow it."""
        changes = (self._with_microbatch, self._with_schedule, self._with_settings, self._nudged)
        return rng.choice(changes)(job, rng)

    def has_ranks_for(self, job: Job) -> bool:
        """Whether a drawn job's layouts fit on the available ranks, as far as their stages are counted."""
        ranks_per_replica = [layout.stage_ranks * (layout.pp or 1) for layout in job.layouts]
        needed = max(ranks_per_replica, default=1) if self.space.shares_ranks else sum(ranks_per_replica)
        return job.replicas * needed <= job.usable_ranks

    def _microbatches(self) -> list[int]:
        return [size for size in MICROBATCHES if len(self.job.batch) % size == 0]

    def _with_microbatch(self, job: Job, rng: random.Random) -> Job:
        return replace(job, microbatch_samples=rng.choice(self._microbatches()) * job.joint_replicas)

    def _with_schedule(self, job: Job, rng: random.Random) -> Job:
        return replace(job, schedule=rng.choice(self.space.schedules))

    def _with_settings(self, job: Job, rng: random.Random) -> Job:
        """Draw recomputation by module; sharding of optimizer state and sequence parallelism for all.

        Of a strategy that shards parameters only how long they stay gathered.
        """
        if self.space.reshards:
            settings = replace(job.settings, modules=self._resharded(rng.choice(list(ReshardAfter))))
            return replace(job, settings=settings)
        sharding = rng.choice((Sharding.NONE, Sharding.OPTIMIZER))
        by_sequence = rng.choice((False, True))
        modules = tuple(
            ModuleSettings(
                module=module.name,
                recompute=rng.choice((Recompute.NONE, Recompute.FULL)),
                sharding=sharding,
                sequence_parallel=by_sequence,
                products=job.settings.of(module.name).products,
            )
            for module in job.model.modules
        )
        return replace(job, settings=replace(job.settings, modules=modules))

    def _resharded(self, after: ReshardAfter) -> tuple[ModuleSettings, ...]:
        return tuple(
            ModuleSettings(
                module=module.name,
                sharding=Sharding.PARAMETERS,
                reshard_after=after,
                products=self.job.settings.of(module.name).products,
            )
            for module in self.job.model.modules
        )

    def _with_layouts(self, job: Job, rng: random.Random) -> Job:
        if self.space.degrees is Chooser.ITSELF:
            return job
        replicas = rng.choice(self._replicas(job))
        degrees = {module.name: self._degrees(module, rng) for module in job.model.modules}
        if self.space.degrees is Chooser.ALIKE:
            tp, cp = min(degrees.values())
            degrees = dict.fromkeys(
                degrees, (tp, min(cp, *(max(token_sizes(each)) for each in job.model.modules)))
            )
        layouts = self._counted(degrees, job.usable_ranks // replicas, rng)
        return replace(job, replicas=replicas, layouts=layouts)

    def _nudged(self, job: Job, rng: random.Random) -> Job:
        """Give one module a stage more or fewer, or other degrees on as many ranks."""
        if not job.layouts:
            return self._with_layouts(job, rng)
        index = rng.randrange(len(job.layouts))
        current = job.layouts[index]
        if current.pp is None or rng.random() < 0.5:
            tp, cp = self._degrees(job.model.module(current.module), rng)
            pp = None if current.pp is None else max(1, current.pp * current.tp * current.cp // (tp * cp))
            layout = replace(current, tp=tp, cp=cp, pp=pp)
        else:
            layout = replace(current, pp=max(1, current.pp + rng.choice((-1, 1))))
        return replace(job, layouts=(*job.layouts[:index], layout, *job.layouts[index + 1 :]))

    def _replicas(self, job: Job) -> list[int]:
        most = max(1, job.usable_ranks // len(job.model.modules))
        unit = job.microbatch_samples
        return [dp for dp in range(1, most + 1) if len(job.batch) % (dp * unit) == 0]

    def _degrees(self, module: Module, rng: random.Random) -> tuple[int, int]:
        cp_sizes = token_sizes(module) if self.space.has_cp else [1]
        return rng.choice(tensor_sizes(self.job, module)), rng.choice(cp_sizes)

    def _counted(
        self, degrees: Mapping[str, tuple[int, int]], num_ranks: int, rng: random.Random
    ) -> tuple[ModuleLayout, ...]:
        """Stages per module: left open, or drawn, with the LLM's on the remaining ranks."""
        if rng.random() < self.open_share:
            return tuple(ModuleLayout(module=name, tp=tp, cp=cp) for name, (tp, cp) in degrees.items())
        modules = sorted(self.job.model.modules, key=lambda module: module.modality == TEXT)
        counts: dict[str, int] = {}
        left = num_ranks
        for remaining_modules, module in enumerate(modules, 1 - len(modules)):
            tp, cp = degrees[module.name]
            most = max(1, min(left // (tp * cp), len(module.layers)))
            counts[module.name] = most if remaining_modules == 0 else rng.randint(1, max(1, most // 2))
            left -= tp * cp * counts[module.name]
        return tuple(
            ModuleLayout(module=name, tp=tp, cp=cp, pp=counts[name]) for name, (tp, cp) in degrees.items()
        )
