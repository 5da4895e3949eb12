"""Entrain's choice of degrees: data, tensor, context and pipeline parallelism, by a formula.

Source: Entrain (dissertation, section 4.4.3, Algorithm 3, Equations 4.1 and 4.2).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import gcd
from operator import attrgetter

from workbench.balance.orchestration.allocation import proportional_allocation
from workbench.balance.stages.partition import partition
from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.frozen import FrozenRule
from workbench.model.model_graph import Module
from workbench.plan.plan import Plan, Sharding
from workbench.planner.assembly import check_apart, draft_plan, layout_of, lowered_that_fits
from workbench.planner.boundary_price import crossing_bytes, num_readers
from workbench.planner.layer_cost import layer_costs
from workbench.planner.layout_choice import on_tensor_ranks
from workbench.planner.module_price import ModulePrices
from workbench.planner.stage_counts import PlannerStopped, Progress
from workbench.planner.strategy_spec import PLAIN_OR_SPLIT, Chooser, First, OwnSpace, StrategySpec
from workbench.strategies import entrain


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Degrees of every module and the formula's estimate.

    Args:
        replicas: dp.
        layouts: tp, cp and pp of every module.
        formula_s: Equation 4.2 with resharding.
        reshard_s: its resharding part.
        update_s: the optimizer's step of the slowest module's mean stage, which the formula leaves out.
    """

    replicas: int
    layouts: tuple[ModuleLayout, ...]
    formula_s: float
    reshard_s: float
    update_s: float

    @property
    def updated_s(self) -> float:
        """The formula's estimate with the optimizer's step."""
        return self.formula_s + self.update_s

    def job(self, job: Job) -> Job:
        """The job with these degrees."""
        return replace(job, replicas=self.replicas, layouts=self.layouts)


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """Entrain's plans under the first configurations, best by the formula, that fit in memory.

    Differs: where several are wanted, those follow that are best by the formula with the optimizer's step.

    Raises:
        ValueError: no configuration fits; names the best one's reason.
    """
    by_formula = configurations(job, cost)
    plans = _Plans(job, cost)
    chosen = list(plans.first(by_formula, progress, most))
    if not chosen:
        raise ValueError(f"job {job.name!r}: no configuration of {len(by_formula)} fits: {plans.refusal}")
    if most > 1:
        by_step = sorted(by_formula, key=attrgetter("updated_s"))
        with suppress(PlannerStopped):  # there is a plan to hand over
            for plan in plans.first(by_step, progress, most):
                if plan not in chosen:
                    chosen.append(plan)
    return tuple(chosen)


class _Plans:
    """Plans of configurations, each built once."""

    def __init__(self, job: Job, cost: CostModel) -> None:
        self._job, self._cost = job, cost
        self._built: dict[Configuration, Plan | None] = {}  # None: refused
        self.refusal: ValueError | None = None

    def first(self, ranked: Sequence[Configuration], progress: Progress, most: int) -> Iterator[Plan]:
        """Yield the plans of the first `most` configurations that fit."""
        fitting = 0
        for num_tried, configuration in enumerate(ranked, 1):
            progress(num_tried, len(ranked), configuration.formula_s)
            if configuration not in self._built:
                self._built[configuration] = self._plan(configuration)
            built = self._built[configuration]
            if built is not None:
                fitting += 1
                yield built
            if fitting == most:
                return

    def _plan(self, configuration: Configuration) -> Plan | None:
        try:
            candidate = entrain.plan(configuration.job(self._job), self._cost)
            lowered_that_fits(candidate)
        except ValueError as error:
            self.refusal = self.refusal or error
            return None
        return replace(candidate, strategy="entrain-search")


plan = First(shortlist)


def configurations(job: Job, cost: CostModel) -> tuple[Configuration, ...]:
    """All configurations that use the job's ranks, fastest by the formula first.

    GPUs of a replica are assigned by the batch's work with tp = cp = 1, each module's share is factorised
    into tp x cp x pp, and layers are cut by dynamic programming. Differs: cp stays 1, since Entrain's own
    microbatches have no token shards; allocations that move a GPU from one module to another count too,
    since a prime share has next to no factors; a share that is no product of valid degrees is lowered to
    the next that is, so ranks may stay idle; memory is checked on whole plans, in order of the formula; a
    layout's given tp or pp is kept, and a module gets at least the ranks that these need.

    Raises:
        ValueError: no configuration; names the nearest job that has one.

    Complexity: O(dp x product over modules of their factorisations), layers priced once per degree.
    """
    check_apart(job, "entrain-search")
    search = _Search(job, cost)
    unsorted = [configuration for replicas in search.replicas() for configuration in search.of(replicas)]
    if not unsorted:
        raise ValueError(
            f"job {job.name!r}: no configuration of {search.num_ranks} ranks for {len(job.batch)} samples "
            f"in microbatches of {job.microbatch_samples}; {search.refusal()}"
        )
    return tuple(sorted(unsorted, key=lambda each: (each.formula_s, each.replicas, str(each.layouts))))


class _Search:
    """Enumerates configurations, with layers priced once per degree."""

    def __init__(self, job: Job, cost: CostModel) -> None:
        self._job, self._cost = job, cost
        self.num_ranks = job.usable_ranks
        self._draft = draft_plan(replace(job, replicas=1, layouts=()), "entrain-search")
        self._layers_s: dict[tuple[str, int], tuple[float, ...]] = {}
        self._whole_update_s = cache(ModulePrices(job, cost).step_s)
        self._work = [float_sum(self._layers(module, 1)) for module in job.model.modules]
        given = [layout_of(job, module.name) for module in job.model.modules]
        self._least = [layout.tp * (layout.pp or 1) for layout in given]

    def replicas(self) -> Iterator[int]:
        """Numbers of replicas that divide the ranks and the batch."""
        job = self._job
        for count in range(1, self.num_ranks // len(job.model.modules) + 1):
            if self.num_ranks % count == 0 and len(job.batch) % (count * job.microbatch_samples) == 0:
                yield count

    def of(self, replicas: int) -> Iterator[Configuration]:
        """Configurations of the proportional allocation and of those that move a GPU between modules."""
        modules = self._job.model.modules
        if self.num_ranks // replicas < sum(self._least):
            return
        nearest = self._lifted(proportional_allocation(self._work, self.num_ranks // replicas))
        seen: set[tuple[ModuleLayout, ...]] = set()
        for moves in product((0, -1, 1), repeat=len(modules)):
            shares = [share + move for share, move in zip(nearest, moves, strict=True)]
            if sum(moves) or any(share < least for share, least in zip(shares, self._least, strict=True)):
                continue
            choices = [list(self._factors(*pair)) for pair in zip(modules, shares, strict=True)]
            for layouts in product(*choices):
                if layouts not in seen:
                    seen.add(layouts)
                    yield self._estimated(replicas, layouts)

    def _lifted(self, shares: Sequence[int]) -> list[int]:
        """Raise each module to its minimum, one rank at a time from whichever has most to spare."""
        lifted = [max(share, least) for share, least in zip(shares, self._least, strict=True)]
        while sum(lifted) > sum(shares):
            spare = [share - least for share, least in zip(lifted, self._least, strict=True)]
            lifted[spare.index(max(spare))] -= 1
        return lifted

    def refusal(self) -> str:
        """Why there is no configuration, and the nearest job that has one."""
        job, least = self._job, sum(self._least)
        if self.num_ranks < least:
            return f"nearest: {least} ranks, the fewest that the layouts need"
        stated = ", ".join(f"{x.module} tp {x.tp} pp {x.pp or 'open'}" for x in job.layouts)
        return f"no tp x pp fits heads, layers and nodes with the layouts given ({stated or 'none'})"

    def _estimated(self, replicas: int, layouts: tuple[ModuleLayout, ...]) -> Configuration:
        """Equation 4.2: every stage once, plus the slowest for each further microbatch."""
        job = self._job
        num_microbatches = len(job.batch) // (replicas * job.microbatch_samples)
        stages_s = [
            float_sum(layers_s[first:last])
            for layout, layers_s in (
                (each, self._layers(job.model.module(each.module), each.tp)) for each in layouts
            )
            for first, last in partition(layers_s, layout.pp or 1)
        ]
        reshard_s = num_microbatches * float_sum(self._reshard_s(layouts))
        formula_s = float_sum(stages_s) + (num_microbatches - 1) * max(stages_s) + reshard_s
        return Configuration(
            replicas=replicas,
            layouts=layouts,
            formula_s=formula_s,
            reshard_s=reshard_s,
            update_s=max(self._update_s(replicas, layout) for layout in layouts),
        )

    def _update_s(self, replicas: int, layout: ModuleLayout) -> float:
        """Seconds of the optimizer's step on a rank of the module's mean stage."""
        settings = self._job.settings.of(layout.module)
        sharing = 1 if settings.sharding is Sharding.NONE else replicas // gcd(replicas, settings.instances)
        return self._whole_update_s(on_tensor_ranks(settings, layout.tp)) / ((layout.pp or 1) * sharing)

    def _reshard_s(self, layouts: tuple[ModuleLayout, ...]) -> Iterator[float]:
        """Seconds per microbatch and edge whose ends differ in tp x cp: features forward, gradients back.

        The source does not print the formula; here a microbatch's features cross one link in either
        direction, once for every stage that reads them.
        """
        job = self._job
        degrees = {layout.module: layout.stage_ranks for layout in layouts}
        for edge in job.model.edges:
            if degrees[edge.source] == degrees[edge.target]:
                continue
            target = next(each for each in layouts if each.module == edge.target)
            cuts = partition(self._layers(job.model.module(edge.target), target.tp), target.pp or 1)
            readers = num_readers(edge, [last - first for first, last in cuts])
            num_bytes = crossing_bytes(job, edge, job.microbatch_samples)
            link = job.cluster.inter
            yield 2 * readers * (num_bytes / link.bytes_per_s + link.latency_s)

    def _layers(self, module: Module, tp: int) -> tuple[float, ...]:
        key = (module.name, tp)
        if key not in self._layers_s:
            layout = ModuleLayout(module=module.name, tp=tp)
            costs = layer_costs(self._job, self._draft, layout, self._cost, FrozenRule.EXACT)
            self._layers_s[key] = tuple(each.total_s for each in costs)
        return self._layers_s[key]

    def _factors(self, module: Module, share: int) -> Iterator[ModuleLayout]:
        """tp x cp x pp of a share, or of the next smaller one that has any."""
        for size in range(share, 0, -1):
            layouts = [
                layout
                for tp in range(1, size + 1)
                if size % tp == 0
                if (layout := self._layout(module, tp, size // tp)) is not None
            ]
            if layouts:
                yield from layouts
                return

    def _layout(self, module: Module, tp: int, pp: int) -> ModuleLayout | None:
        stated = next((each for each in self._job.layouts if each.module == module.name), None)
        node_ranks = min(node.num_ranks for node in self._job.cluster.nodes)
        fits = (
            tp <= node_ranks
            and all(count % tp == 0 for count in module.kv_heads)
            and pp <= len(module.stage_starts)
        )
        is_compatible = stated is None or ((stated.tp in (1, tp)) and stated.pp in (None, pp))
        return ModuleLayout(module=module.name, tp=tp, pp=pp) if fits and is_compatible else None


SPEC = StrategySpec(
    name="entrain-search",
    planner=plan,
    shortlist=shortlist,
    searches_layouts=True,
    summary="Entrain, Algorithm 3: degrees of encoder and LLM by its formula",
    batch_level=True,
    regroup=entrain.regroup,
    own_space=OwnSpace(
        degrees=Chooser.ITSELF, where="Entrain, sections 4.4.3 and 4.6", schedules=PLAIN_OR_SPLIT, effort=4.0
    ),
)
