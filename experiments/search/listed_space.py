"""A small space of plans that vary in all four questions, listed exhaustively."""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.lru_cache import LruCache
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Settings
from workbench.planner.assembly import disjoint_stages
from workbench.planner.block_cuts import Cuts
from workbench.planner.groupings import Group, round_robin
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.search.joint.choice import Choice, TokenRule, build
from workbench.search.joint.evaluate import plan_of
from workbench.search.joint.move import Space

AWAY = 1  # layers by which a border may lie away from an even cut's
Shape = tuple[int, int, int]  # tensor- and context-parallel ranks of a stage, stages
_DIGESTS: LruCache[str] = LruCache(100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSpace:
    """A job, with the combined answers to each question.

    Args:
        name: of the space.
        job: on few ranks.
        cost: its machine.
        shapes: of every module: tensor- and context-parallel degree and number of stages.
        replicas: of all modules.
        microbatches: numbers of samples.
        schedules: orders of passes.
        rules: owners of tokens of context-parallel modules.
        ways: how keys travel between them.
    """

    name: str
    job: Job
    cost: CostModel
    shapes: Mapping[str, tuple[Shape, ...]]
    replicas: tuple[int, ...] = (1,)
    microbatches: tuple[int, ...] = (1,)
    schedules: tuple[Schedule, ...] = tuple(
        map(usual, (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.ZB_H1))
    )
    rules: tuple[TokenRule, ...] = tuple(TokenRule)
    ways: tuple[KeyExchange, ...] = (KeyExchange.ALL_GATHER, KeyExchange.RING)

    def choices(self) -> Iterator[Choice]:
        """Yield all choices, of which some with different answers have the same plan.

        Choices that differ only in owners are consecutive: they have one order. They are followed by choices
        that differ in cuts, whose rows and orders are cached.
        """
        ids = [sample.id for sample in self.job.batch]
        groupings = [groups for size in self.microbatches for groups in _groupings(ids, size)]
        for replicas, shapes in product(self.replicas, self._shapes()):
            if replicas * sum(tp * cp * pp for tp, cp, pp in shapes.values()) > self.job.cluster.num_ranks:
                continue
            counts = dict.fromkeys(shapes, replicas)
            grouped = [round_robin(self.job, each, counts) for each in groupings if len(each) % replicas == 0]
            for schedule in self.schedules:
                shaped_job = _with_shapes(self.job, shapes, replicas, schedule)
                cut = [disjoint_stages(shaped_job, cuts) for cuts in self._cuts(shapes)]
                for settings, microbatches, stages in product(self._settings(shapes), grouped, cut):
                    for rule in self.rules if _divided(shapes) else (TokenRule.ZIGZAG,):
                        yield Choice(
                            stages=stages,
                            microbatches=microbatches,
                            schedule=schedule,
                            settings=settings,
                            tokens=rule,
                        )

    def plans(self, choices: Iterable[Choice]) -> Iterator[Plan]:
        """Plans of choices as the search would build them, with one order for all that differ only in owners.

        Owners are refused where the rank by which a stage is priced has too few tokens, see `plan_of`.
        """
        ordered: Choice | None = None
        among = Space(self.job, self.cost, {})
        for choice in choices:
            bare = replace(choice, tokens=TokenRule.ZIGZAG)
            if ordered is None or replace(ordered, programs=()) != bare:
                try:
                    ordered = replace(bare, programs=build(self.job, bare, self.cost).programs)
                except ValueError:  # a schedule that is not for such stages
                    ordered = None
                    continue
            try:
                plan = plan_of(among, replace(choice, programs=ordered.programs))
            except ValueError:  # what the search refuses
                continue
            yield plan

    def _shapes(self) -> Iterator[dict[str, Shape]]:
        for combination in product(*self.shapes.values()):
            yield dict(zip(self.shapes, combination, strict=True))

    def _cuts(self, shapes: Mapping[str, Shape]) -> Iterator[dict[str, Cuts]]:
        cuts_of = {
            name: tuple(_near_even(len(self.job.model.module(name).layers), pp))
            for name, (_, _, pp) in shapes.items()
        }
        for combination in product(*cuts_of.values()):
            yield dict(zip(cuts_of, combination, strict=True))

    def _settings(self, shapes: Mapping[str, Shape]) -> Iterator[Settings]:
        for exchanges in product(self.ways, repeat=len(_divided(shapes))):
            modules = tuple(
                ModuleSettings(module=name, key_exchange=exchange)
                for name, exchange in zip(_divided(shapes), exchanges, strict=True)
                if exchange is not KeyExchange.ALL_GATHER
            )
            yield replace(self.job.settings, modules=modules)


@dataclass(frozen=True)
class Listed:
    """The plans of a space by key, with their values.

    Args:
        values: key -> value, see `key_of`; None: the plan does not fit, or can deadlock.
        answers: to every question, how many different ones feasible plans give.
    """

    values: Mapping[str, float | None]
    answers: Mapping[str, int]

    @cached_property
    def feasible(self) -> Mapping[str, float]:
        """The number of plans that have a value."""
        return {key: value for key, value in self.values.items() if value is not None}

    @cached_property
    def optimum(self) -> float:
        return min(self.feasible.values())

    @cached_property
    def digest(self) -> str:
        """A digest of all keys and values."""
        digest = hashlib.sha256()
        for key in sorted(self.feasible):
            digest.update(f"{key} {self.feasible[key]!r}\n".encode())
        return digest.hexdigest()


def key_of(plan: Plan) -> str:
    """The identity of a plan among those of one model, cluster and batch.

    Key exchange in modules without context parallelism does not count. Common parts of plans are digested
    once: `plan_hash` takes as long as a plan's value.
    """
    parts = (plan.stages, plan.microbatches, plan.programs, plan.token_shards, _settings_of(plan))
    return _digest("".join(map(_known, parts)))


def _settings_of(plan: Plan) -> Settings:
    if all(each.key_exchange is KeyExchange.ALL_GATHER for each in plan.settings.modules):
        return plan.settings
    travels = {stage.module for stage in plan.stages if stage.cp > 1}
    modules = tuple(
        each if each.module in travels else replace(each, key_exchange=KeyExchange.ALL_GATHER)
        for each in plan.settings.modules
    )
    return replace(plan.settings, modules=tuple(m for m in modules if m != ModuleSettings(module=m.module)))


def answers_of(plan: Plan) -> dict[str, str]:
    """The plan's answers to the four questions, as keys."""
    exchanges = tuple(sorted((each.module, each.key_exchange) for each in plan.settings.modules))
    return {
        "layout": _known(plan.stages),
        "order": _known(plan.programs),
        "grouping": _known(plan.microbatches),
        "tokens": _known((plan.token_shards, exchanges)),
    }


def _known(part: Hashable) -> str:
    return _DIGESTS.get_or(part, lambda: _digest(repr(part)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _divided(shapes: Mapping[str, Shape]) -> list[str]:
    """Names of modules with context-parallel ranks."""
    return sorted(name for name, (_, cp, _) in shapes.items() if cp > 1)


def _near_even(num_layers: int, num_stages: int) -> Iterator[Cuts]:
    """Cuts whose borders are close to those of equal parts."""
    even = [round(part * num_layers / num_stages) for part in range(1, num_stages)]
    for inner in combinations(range(1, num_layers), num_stages - 1):
        if all(abs(border - even_border) <= AWAY for border, even_border in zip(inner, even, strict=True)):
            yield tuple(pairwise((0, *inner, num_layers)))


def _groupings(ids: list[int], size: int) -> Iterator[tuple[Group, ...]]:
    """All groupings of samples into an ordered sequence of microbatches of one size."""
    if not ids:
        yield ()
        return
    for group in combinations(ids, size):
        remaining = [member for member in ids if member not in group]
        for other_groups in _groupings(remaining, size):
            yield (group, *other_groups)


def _with_shapes(job: Job, shapes: Mapping[str, Shape], replicas: int, schedule: Schedule) -> Job:
    layouts = tuple(ModuleLayout(module=name, tp=tp, cp=cp, pp=pp) for name, (tp, cp, pp) in shapes.items())
    return replace(job, layouts=layouts, replicas=replicas, schedule=schedule)
