"""Every layout that a mode allows on a number of ranks, with a lower bound on its step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod

import numpy as np

from workbench.float_sum import float_sum
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import Module
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Recompute
from workbench.plan.runnable_degrees import may_divide
from workbench.planner.expert_choices import expert_choices, expert_counts, joint_choices
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice, recomputations
from workbench.planner.layout_combinations import (
    Bounded,
    Family,
    Layouts,
    Part,
    combination,
    joined_s,
    part_of,
)
from workbench.planner.layout_step import LayoutSteps, moves_s
from workbench.units import gib_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What a search may vary besides degrees.

    Args:
        recompute: modes of recomputation of modules for which the job states none.
        instances: numbers of optimizer instances; those that do not divide a module's holders are left out.
        offload: of colocated encoders; fixed where the job asks for it or its schedule has windows.
    """

    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.FULL)
    instances: tuple[int, ...] = (1, 2, 4, 8)
    offload: tuple[bool, ...] = (False, True)


_FITTING: LruCache[list[ModuleChoice]] = LruCache(100_000, lambda choices: len(choices) + 1)


class LayoutSpace:
    """The layouts of one job on exactly `num_ranks` ranks.

    A module with a layout in the job keeps its tp and cp, and pp and dp where these are given, and one whose
    recomputation the job states keeps that. All others are free: tp inside a node and dividing the heads,
    with experts cut by tp or distributed, except in colocated layouts also over replicas without cp, cp a
    power of two, dp a divisor of the batch for the LLM, and for colocated encoders a multiple or divisor of
    the LLM's.

    Args:
        steps: prices the job's layouts.
        num_ranks: ranks of every layout.
        freedom: what varies besides degrees.
    """

    def __init__(self, steps: LayoutSteps, num_ranks: int, freedom: Freedom | None = None) -> None:
        self._steps, self._job, self.num_ranks = steps, steps.job, num_ranks
        self._freedom = freedom or Freedom()
        model = self._job.model
        self._llm = model.llm
        self._encoders = model.encoders
        self._least_s: dict[tuple[str, int, int], tuple[float, float]] = {}
        self._heads = {module.name: module.kv_heads for module in model.modules}
        self._experts = {module.name: expert_counts(module) for module in model.modules}
        modes, settings = self._freedom.recompute, self._job.settings
        self._recomputed = {
            each.name: recomputations(settings.of(each.name), modes) for each in model.modules
        }

    def families(self, mode: Mode) -> Iterator[Family]:
        """All layouts, family by family, unordered.

        Raises:
            ValueError: a module behind the LLM, in a mode whose steps count the modules in front of it alone.
        """
        if mode not in (Mode.SHARDED, Mode.HYBRID):  # there a rank does all modules, whatever their order
            self._check_encoders()
        return {
            Mode.HOMOGENEOUS: self._homogeneous,
            Mode.COLOCATED: self._colocated,
            Mode.APART: self._apart,
            Mode.SHARDED: self._sharded,
            Mode.HYBRID: self._hybrid,
        }[mode]()

    def layouts(self, mode: Mode) -> Iterator[Bounded]:
        """All layouts, each with its bound."""
        for family in self.families(mode):
            layouts = family.layouts()
            for index, bound_s in enumerate(layouts.bounds_s.tolist()):
                yield bound_s, layouts.at(index)

    def obstacle(self) -> str | None:
        """Why some module has no layout even on all ranks; None where each has one."""
        for module in (self._llm, *self._encoders):
            choices = self._all(module, self.num_ranks)
            if not choices:
                return self._wrong_degrees(module)
            if module is self._llm and not self._divided(choices):
                tried_dp = sorted({choice.dp for choice in choices})
                return (
                    f"no dp of {module.name!r} among {tried_dp} gives its replicas equal shares of "
                    f"{len(self._job.batch)} samples in microbatches of {self._job.microbatch_samples}; "
                    f"nearest: {self._nearest_batch(tried_dp)} samples"
                )
            least = round(min(map(self._steps.state_bytes, choices)))
            if least > self._steps.memory_bytes:
                limit = gib_text(self._steps.memory_bytes)
                return (
                    f"weights, gradients and optimizer state of {module.name!r} take {gib_text(least)} a "
                    f"rank at least, of {limit}; nearest: that memory, or more ranks"
                )
        return None

    def _wrong_degrees(self, module: Module) -> str:
        given = next((layout for layout in self._job.layouts if layout.module == module.name), None)
        if given is None:
            return (
                f"no degrees of {module.name!r} take {self.num_ranks} ranks with a tp that divides "
                f"{sorted(self._heads[module.name])} key/value heads and a replica for each of "
                f"{len(self._job.batch)} samples at most; nearest: a larger batch, or fewer ranks"
            )
        size = given.tp * given.cp * (given.pp or 1) * (given.dp or 1)
        if given.pp and given.dp:
            taken = f"takes {size} ranks, got {self.num_ranks}"
            return f"the layout of {module.name!r} {taken}; nearest: one without dp"
        below = self.num_ranks // size * size
        nearest = f"{below} or {below + size}" if below else str(size)
        return (
            f"the layout of {module.name!r} takes a multiple of {size} ranks, got {self.num_ranks}; "
            f"nearest: {nearest} ranks"
        )

    def _nearest_batch(self, replicas: list[int]) -> int:
        total, unit = len(self._job.batch), self._job.microbatch_samples
        sizes = [max(1, round(total / (dp * unit))) * dp * unit for dp in replicas]
        return min(sizes, key=lambda size: (abs(size - total), size))

    def _check_encoders(self) -> None:
        for edge in self._job.model.edges:
            if edge.target != self._llm.name:
                raise ValueError(
                    f"job {self._job.name!r}: layouts are searched for encoders that feed the LLM, module "
                    f"{edge.target!r} reads {edge.source!r}; nearest: strategy fsdp, cornstarch or "
                    "megatron-heterogeneous"
                )

    def _homogeneous(self) -> Iterator[Family]:
        of_grid: dict[tuple[int, ...], list[list[ModuleChoice]] | None] = {}  # by tp, cp, dp of all
        for llm in self._with_joint(self.num_ranks):
            grid = llm.tp, llm.cp, llm.dp, llm.joint_replicas
            if grid not in of_grid:
                of_grid[grid] = self._like(llm)
            parts = of_grid[grid]
            if parts is not None:
                layouts = partial(self._joint, llm, parts)
                closer_s = partial(self._steps.llm_s, llm)
                yield Family(self._steps.llm_bound_s(llm), prod(map(len, parts)), closer_s, layouts)

    def _joint(self, llm: ModuleChoice, grids: list[list[ModuleChoice]]) -> Layouts:
        parts = [part_of(choices, self._steps.passes_s) for choices in grids]
        return Layouts(
            self._steps.joint_s(llm, joined_s(np.add, parts)),
            partial(combination, Mode.HOMOGENEOUS, llm, parts),
        )

    def _colocated(self) -> Iterator[Family]:
        spread = [[c for c in self._choices(e, self.num_ranks) if c.pp == 1] for e in self._encoders]
        of_dp: dict[int, list[Part]] = {}  # phases and nested replicas depend on nothing else of the LLM
        for llm in self._llm_choices(self.num_ranks):
            if llm.dp not in of_dp:
                nested = ([c for c in choices if _nests(c.dp, llm.dp)] for choices in spread)
                phase_s = partial(self._steps.phases_s, llm=llm)
                of_dp[llm.dp] = [part_of(choices, phase_s) for choices in nested]
            parts = of_dp[llm.dp]
            if all(part.choices for part in parts):
                phases_s = float_sum(float(part.seconds.min()) for part in parts)
                yield Family(
                    self._steps.llm_bound_s(llm) + phases_s,
                    prod(len(part.choices) for part in parts) * len(self._offloads()),
                    partial(self._phased_s, llm, phases_s),
                    partial(self._phased, llm, parts),
                )

    def _phased_s(self, llm: ModuleChoice, phases_s: float) -> float:
        return self._steps.llm_s(llm) + phases_s

    def _phased(self, llm: ModuleChoice, parts: Sequence[Part]) -> Layouts:
        """Colocated layouts: modules run one after the other, each combination with every offload option."""
        phases_s, offloads = self._steps.llm_s(llm) + joined_s(np.add, parts), self._offloads()
        bounds_s = [phases_s] * len(offloads)
        if True in offloads:
            moved = [part_of(part.choices, self._steps.prices.moved_bytes) for part in parts]
            bounds_s[offloads.index(True)] = phases_s + moves_s(joined_s(np.add, moved))

        def at(index: int) -> LayoutChoice:
            index, option = divmod(index, len(offloads))
            return combination(Mode.COLOCATED, llm, parts, index, offload=offloads[option])

        return Layouts(np.stack(bounds_s, axis=-1).ravel(), at)

    def _offloads(self) -> tuple[bool, ...]:
        schedule = self._job.schedule
        if schedule.offload or schedule.window is not None or not self._encoders:
            return (schedule.offload,)
        return self._freedom.offload

    def _apart(self) -> Iterator[Family]:
        for sizes in self._island_sizes():
            islands = [self._choices(e, size) for e, size in zip(self._encoders, sizes, strict=True)]
            if not all(islands):
                continue
            for llm in self._with_joint(self.num_ranks - sum(sizes)):
                least = [self._least_beside_s(island, llm) for island in islands]
                busy_s = max((of_island for of_island, _ in least), default=0.0)
                round_s = max((of_island for _, of_island in least), default=0.0)
                yield Family(
                    max(self._steps.llm_bound_s(llm) + round_s, busy_s),
                    prod(map(len, islands)),
                    partial(self._beside_s, llm, busy_s, round_s),
                    partial(self._beside, llm, islands),
                )

    def _beside_s(self, llm: ModuleChoice, busy_s: float, round_s: float) -> float:
        return max(self._steps.llm_s(llm) + round_s, busy_s)

    def _least_beside_s(self, island: list[ModuleChoice], llm: ModuleChoice) -> tuple[float, float]:
        """The least busy seconds and round of an island; they depend on the LLM's replicas alone."""
        key = (island[0].module, island[0].num_ranks, llm.num_replicas)
        if key not in self._least_s:
            distinct = dict.fromkeys(replace(choice, instances=1) for choice in island)
            busy_s = min(self._steps.busy_s(choice, llm) for choice in distinct)
            self._least_s[key] = busy_s, min(self._steps.round_s(choice, llm) for choice in distinct)
        return self._least_s[key]

    def _beside(self, llm: ModuleChoice, islands: list[list[ModuleChoice]]) -> Layouts:
        """Layouts in mode APART: modules run side by side, except in the LLM's first and last round."""
        busy = [part_of(island, partial(self._steps.busy_s, llm=llm)) for island in islands]
        rounds = [part_of(island, partial(self._steps.round_s, llm=llm)) for island in islands]
        in_turn_s = self._steps.llm_s(llm) + joined_s(np.maximum, rounds)
        bounds_s = np.maximum(joined_s(np.maximum, busy), in_turn_s)
        return Layouts(bounds_s, partial(combination, Mode.APART, llm, busy))

    def _sharded(self) -> Iterator[Family]:
        for llm, parts in self._alike():
            yield Family(
                0.0, prod(map(len, parts)), lambda: 0.0, partial(self._flat, Mode.SHARDED, llm, parts)
            )

    def _hybrid(self) -> Iterator[Family]:
        """HSDP: parameter instances of two ranks or more each."""
        for llm, parts in self._alike():
            for count in divisors(llm.dp):
                if 1 < count < llm.num_holders:
                    several = [[replace(c, instances=count) for c in part] for part in parts]
                    flat = partial(self._flat, Mode.HYBRID, replace(llm, instances=count), several)
                    yield Family(0.0, prod(map(len, parts)), lambda: 0.0, flat)

    def _alike(self) -> Iterator[tuple[ModuleChoice, list[list[ModuleChoice]]]]:
        """Choices of the LLM without tp and pp, each with the encoders' choices on the same grid."""
        choices = (*self._all(self._llm, self.num_ranks), *self._all_joint(self.num_ranks))
        for llm in self._divided(choices):
            parts = self._like(llm) if llm.tp == llm.pp == llm.instances == 1 else None
            if parts is not None:
                yield llm, [[c for c in part if c.instances == 1] for part in parts]

    def _flat(self, mode: Mode, llm: ModuleChoice, parts: list[list[ModuleChoice]]) -> Layouts:
        layouts = [LayoutChoice(mode=mode, encoders=encoders, llm=llm) for encoders in product(*parts)]
        return Layouts(np.array([self._steps.step(choice).step_s for choice in layouts]), layouts.__getitem__)

    def _like(self, llm: ModuleChoice) -> list[list[ModuleChoice]] | None:
        """Choices of every encoder with the LLM's tp, cp and dp; None where an encoder forbids them."""
        shape = ModuleChoice(
            module=llm.module, tp=llm.tp, cp=llm.cp, dp=llm.dp, joint_replicas=llm.joint_replicas
        )
        grids = [replace(shape, module=encoder.name) for encoder in self._encoders]
        allowed = [self._allows(e, g) for e, g in zip(self._encoders, grids, strict=True)]
        return [self._settings(grid) for grid in grids] if all(allowed) else None

    @property
    def island_unit(self) -> int:
        """Ranks of the smallest island: a whole node where there are several."""
        node = self._job.cluster.nodes[0].num_ranks
        return node if self.num_ranks > node else 1

    def _island_sizes(self) -> Iterator[tuple[int, ...]]:
        """Ranks of each encoder, in pools that take every module; at least one unit is left for the LLM."""
        counts = range(self.island_unit, self.num_ranks, self.island_unit)
        for sizes in product(counts, repeat=len(self._encoders)):
            if sum(sizes) < self.num_ranks and self._are_taken(sizes):
                yield sizes

    def _are_taken(self, sizes: tuple[int, ...]) -> bool:
        """Whether consecutive islands, in the model's order, lie in pools that take them."""
        widths = dict(zip((encoder.name for encoder in self._encoders), sizes, strict=True))
        first = 0
        for module in self._job.model.modules:
            end = first + widths.get(module.name, self.num_ranks - sum(sizes))
            if any(not p.takes(module.name) and p.overlaps(first, end) for p in self._job.pools):
                return False
            first = end
        return True

    def _llm_choices(self, num_ranks: int) -> list[ModuleChoice]:
        return self._divided(self._choices(self._llm, num_ranks))

    def _divided(self, choices: Iterable[ModuleChoice]) -> list[ModuleChoice]:
        """The choices whose replicas get equal numbers of microbatches."""
        samples, total = self._job.microbatch_samples, len(self._job.batch)
        return [choice for choice in choices if total % (choice.num_replicas * samples) == 0]

    def _choices(self, module: Module, num_ranks: int) -> list[ModuleChoice]:
        """All choices of a module on `num_ranks` ranks whose state can fit."""
        key = Identity(self._steps.prices), self._job.layouts, self._freedom, module.name, num_ranks
        return _FITTING.get_or(
            key, lambda: [c for c in self._all(module, num_ranks) if self._steps.state_fits(c)]
        )

    def _with_joint(self, num_ranks: int) -> list[ModuleChoice]:
        """Choices of the LLM on `num_ranks` ranks, last those with experts distributed over replicas."""
        return [*self._llm_choices(num_ranks), *self._divided(self._joint_choices(num_ranks))]

    def _joint_choices(self, num_ranks: int) -> list[ModuleChoice]:
        """Choices of the LLM with experts distributed over replicas whose state can fit."""
        return [choice for choice in self._all_joint(num_ranks) if self._steps.state_fits(choice)]

    def _all_joint(self, num_ranks: int) -> list[ModuleChoice]:
        """Choices of the LLM with experts distributed over replicas."""
        llm, counts = self._llm, self._experts[self._llm.name]
        grids = (
            ModuleChoice(module=llm.name, tp=tp, pp=pp, dp=dp * tp // ep, ep=ep, joint_replicas=ep // tp)
            for tp, cp, pp in (self._degrees(llm, num_ranks) if counts else ())
            if cp == 1
            for dp in (num_ranks // (tp * pp),)
            for ep in joint_choices(counts, tp, dp)
        )
        return [c for grid in grids if self._allows(llm, grid) for c in self._settings(grid)]

    def _all(self, module: Module, num_ranks: int) -> list[ModuleChoice]:
        grids = (
            ModuleChoice(module=module.name, tp=tp, cp=cp, pp=pp, dp=num_ranks // (tp * cp * pp), ep=ep)
            for tp, cp, pp in self._degrees(module, num_ranks)
            for ep in expert_choices(self._experts[module.name], tp * cp)
        )
        return [c for grid in grids if self._allows(module, grid) for c in self._settings(grid)]

    def _degrees(self, module: Module, num_ranks: int) -> Iterator[tuple[int, int, int]]:
        node = self._job.cluster.nodes[0].num_ranks
        for tp in divisors(num_ranks):
            if node % tp == 0:
                for cp in (degree for degree in divisors(num_ranks // tp) if degree.bit_count() == 1):
                    for pp in divisors(num_ranks // (tp * cp)):
                        if pp <= len(module.stage_starts):
                            yield tp, cp, pp

    def _allows(self, module: Module, grid: ModuleChoice) -> bool:
        """Whether heads, batch size and the job's layout, or what the module can run, allow the grid."""
        given = next((layout for layout in self._job.layouts if layout.module == module.name), None)
        return (
            grid.num_replicas <= len(self._job.batch)
            and all(heads % grid.tp == 0 for heads in self._heads[module.name])
            and (may_divide(module, tp=grid.tp, cp=grid.cp) if given is None else _agrees(given, grid))
        )

    def _settings(self, grid: ModuleChoice) -> list[ModuleChoice]:
        return [
            replace(grid, recompute=recompute, recompute_layers=num_layers, instances=instances)
            for recompute, num_layers in self._recomputed[grid.module]
            for instances in self._freedom.instances
            if grid.num_holders % instances == 0 == grid.num_expert_holders % instances
        ]


def _agrees(given: ModuleLayout, grid: ModuleChoice) -> bool:
    return (
        (given.tp, given.cp, given.ep) == (grid.tp, grid.cp, grid.ep)
        and given.pp in (None, grid.pp)
        and given.dp in (None, grid.num_replicas)
    )


def _nests(first: int, second: int) -> bool:
    return max(first, second) % min(first, second) == 0


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
