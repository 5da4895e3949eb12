"""Neighbours of a job: one thing changed, or two if ranks move from one degree to another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations, product
from typing import Any

from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.job.other_layouts import apart, with_layouts
from workbench.model.experts import num_experts
from workbench.model.layer import Layer
from workbench.model.model_graph import TEXT
from workbench.plan.plan import KeyExchange, ModuleSettings, Recompute, Sharding
from workbench.plan.recomputed_layers import recompute_text, recomputed_layers
from workbench.planner.assembly import layout_of
from workbench.planner.layer_cost import alike_layers
from workbench.schedule.choice import ScheduleKind, usual
from workbench.schedule.sharded import ReshardAfter

Edit = Callable[[Job], Job]


class ChangeKind(StrEnum):
    """What a change is about, in the order of trying: the quickest to plan first."""

    LAYOUT = "layout"
    MICROBATCHES = "microbatches"
    SCHEDULE = "schedule"
    ACTIVATIONS = "activations"
    SHARDING = "sharding"
    STRATEGY = "strategy"


@dataclass(frozen=True, slots=True)
class Change:
    """A neighbour.

    Args:
        kind: what is changed.
        about: in words: `llm tp 4 -> 2, pp 2 -> 4`.
        edit: applies it to the job; ValueError where that is impossible.
        strategy: plans it; None: as before.
    """

    kind: ChangeKind
    about: str
    edit: Edit
    strategy: str | None = None


def neighbours(job: Job, strategies: Sequence[str] = (), requested: Job | None = None) -> Iterator[Change]:
    """All changes, by kind: degrees of every module, microbatches, schedule, activations, sharding, strategy.

    A degree is doubled or halved, stage counts also change by one; ranks freed by a degree may go to
    another of the module, to stages of another module, or between the LLM and its replicas. As in a job
    file each replica counts by itself: an ep beyond tp x cp joins replicas. Whether these are valid and fit
    on the ranks is left to the planner.

    Args:
        job: with layouts of every module.
        strategies: others to try.
        requested: the job that these are to plan, as it was before a strategy filled it in; None: the job
            with open stage counts, or the first of `looser` that they can plan.

    Complexity: O(modules squared + schedules + strategies).
    """
    yield from layout_neighbours(job)
    yield from _microbatches(job)
    for kind in ScheduleKind:
        if kind != job.schedule.kind:
            yield Change(ChangeKind.SCHEDULE, f"schedule {job.schedule.kind} -> {kind}", _scheduled(kind))
    yield from memory_neighbours(job)
    for name in strategies:
        yield Change(
            ChangeKind.STRATEGY,
            f"strategy {name}",
            _open_counts if requested is None else _always(requested),
            name,
        )


Degrees = Mapping[str, int]  # tp, cp, pp, ep of a layout, or dp


def layout_neighbours(job: Job) -> Iterator[Change]:
    """Changes of degrees, as in `neighbours`."""
    layouts, replicas = _each_replica(job), apart(job).replicas
    for module, layout in zip(job.model.modules, layouts, strict=True):
        num_ranks = layout.tp * layout.cp * (layout.dp or replicas)
        for degrees in (*_degrees(layout), *_experts(layout, module.layers, num_ranks)):
            yield _layout_change(layout, degrees)
    yield from _between_modules(layouts)
    yield from _replicas(job)


def _each_replica(job: Job) -> tuple[ModuleLayout, ...]:
    """The layout of every module, which counts each replica by itself."""
    given = {layout.module: layout for layout in apart(job).layouts}
    return tuple(given.get(each.name, ModuleLayout(module=each.name)) for each in job.model.modules)


def _degrees(layout: ModuleLayout) -> Iterator[Degrees]:
    """One degree of a module, or two traded at equal ranks."""
    current = {name: getattr(layout, name) or 1 for name in ("tp", "cp", "pp")}
    for name, value in current.items():
        yield {name: 2 * value}
        if value % 2 == 0:
            yield {name: value // 2}
    for pp in (current["pp"] + 1, current["pp"] - 1):
        if pp >= 1 and pp not in (2 * current["pp"], current["pp"] / 2):
            yield {"pp": pp}
    for up, down in permutations(current, 2):
        if current[down] % 2 == 0:
            yield {up: 2 * current[up], down: current[down] // 2}


def _experts(layout: ModuleLayout, layers: Sequence[Layer], num_ranks: int) -> Iterator[Degrees]:
    """Half as many ranks with distributed experts, none, twice as many, ... up to those of all replicas."""
    if not any(map(num_experts, layers)):
        return
    yield {"ep": 2 * layout.ep}
    if layout.ep % 2 == 0:
        yield {"ep": layout.ep // 2}
    if layout.ep > 2:
        yield {"ep": 1}
    ep = 4 * layout.ep
    while ep <= num_ranks:
        yield {"ep": ep}
        ep *= 2


def _layout_change(layout: ModuleLayout, degrees: Degrees) -> Change:
    return Change(ChangeKind.LAYOUT, _degrees_text(layout, degrees), _with_degrees({layout.module: degrees}))


def _degrees_text(layout: ModuleLayout, degrees: Degrees) -> str:
    """`llm tp 4 -> 2, pp 2 -> 4`."""
    words = (f"{name} {getattr(layout, name) or 1} -> {value}" for name, value in degrees.items())
    return f"{layout.module} {', '.join(words)}"


def _between_modules(layouts: Sequence[ModuleLayout]) -> Iterator[Change]:
    """One stage fewer for one module, one more for another."""
    for down, up in permutations(layouts, 2):
        gained, lost = {"pp": (up.pp or 1) + 1}, {"pp": (down.pp or 1) - 1}
        if lost["pp"]:
            about = f"{_degrees_text(up, gained)}, {_degrees_text(down, lost)}"
            yield Change(ChangeKind.LAYOUT, about, _with_degrees({up.module: gained, down.module: lost}))


def _replicas(job: Job) -> Iterator[Change]:
    """All modules' replicas doubled or halved, alone or with the LLM's or every module's degrees in
    compensation.
    """
    layouts, current = _each_replica(job), apart(job).replicas
    llm = [layout for layout in layouts if job.model.module(layout.module).modality == TEXT]
    if any((layout.dp or current) != current for layout in layouts):
        return
    for replicas in (2 * current, current // 2):
        if not replicas or len(job.batch) % replicas:
            continue
        text = f"dp {current} -> {replicas}"
        yield Change(ChangeKind.LAYOUT, text, _with_degrees({}, replicas))
        for name, changed in product(("tp", "cp", "pp"), (llm, layouts) if len(layouts) > 1 else (llm,)):
            values = [_compensated(getattr(layout, name) or 1, current, replicas) for layout in changed]
            if all(values):
                degrees = {
                    layout.module: {name: value}
                    for layout, value in zip(changed, values, strict=True)
                    if value
                }
                texts = (_degrees_text(layout, degrees[layout.module]) for layout in changed)
                yield Change(ChangeKind.LAYOUT, ", ".join((text, *texts)), _with_degrees(degrees, replicas))


def _compensated(value: int, before: int, replicas: int) -> int | None:
    """A degree that takes the ranks which replicas free, or frees those they need; None: it cannot."""
    if replicas < before:
        return 2 * value
    return value // 2 if value % 2 == 0 else None


def _with_degrees(degrees: Mapping[str, Degrees], replicas: int | None = None) -> Edit:
    """Other degrees of modules, and other replicas of all; replicas are joined again as experts need."""

    def edit(job: Job) -> Job:
        layouts = [_changed(each, degrees.get(each.module, {})) for each in _each_replica(job)]
        return with_layouts(job, layouts, replicas)

    return edit


def _changed(layout: ModuleLayout, degrees: Degrees) -> ModuleLayout:
    """Another number of stages clears the layers per stage."""
    values: dict[str, Any] = dict(degrees)
    return replace(layout, **values | ({"stage_layers": ()} if "pp" in degrees else {}))


def _microbatches(job: Job) -> Iterator[Change]:
    current = apart(job).microbatch_samples
    for samples in (2 * current, current // 2):
        if samples:
            about = f"samples of a microbatch {current} -> {samples}"
            yield Change(ChangeKind.MICROBATCHES, about, _with_samples(samples))


def _with_samples(samples: int) -> Edit:
    return lambda job: replace(job, microbatch_samples=samples * job.joint_replicas)


def _scheduled(kind: ScheduleKind) -> Edit:
    return lambda job: replace(job, schedule=usual(kind))


def memory_neighbours(job: Job) -> Iterator[Change]:
    """Changes of activations and sharding, as in `neighbours`."""
    yield from _activations(job)
    yield from _sharding(job)


def _activations(job: Job) -> Iterator[Change]:
    for module in job.model.modules:
        settings, layout = job.settings.of(module.name), layout_of(job, module.name)
        yield from _recomputation(job, module.name)
        if layout.tp > 1:
            name = "sequence_parallel"
            yield _setting(module.name, name, settings.sequence_parallel, not settings.sequence_parallel)
        if layout.cp > 1:
            for exchange in KeyExchange:
                if exchange is not settings.key_exchange:
                    yield _setting(module.name, "key_exchange", settings.key_exchange, exchange)


def _recomputation(job: Job, module: str) -> Iterator[Change]:
    """Recompute nothing, all blocks, all layers, or some blocks if gradients run through any layer.

    Some layers, where the job recomputes some, are varied as layers. Parts of blocks are not proposed.
    """
    settings, needs = job.settings.of(module), alike_layers(job.model, module).needs
    yield from (
        _recomputed(settings, recompute)
        for recompute in Recompute
        if settings != _with_recompute(settings, recompute, None)
    )
    if any(need.any for need in needs):
        recompute = Recompute.BLOCKS if settings.recompute_layers is None else settings.recompute
        total = sum(recomputed_layers(recompute, None, job.model.module(module).layers))
        for count in _layer_counts(settings.recompute_layers, total):
            yield _recomputed(settings, recompute, count)


def _layer_counts(current: int | None, num_layers: int) -> list[int]:
    """Numbers of recomputed layers near the current one; None, none or all: a quarter, a half, three."""
    if current is None:
        counts = [round(num_layers * quarters / 4) for quarters in (1, 2, 3)]
    else:
        step = max(1, num_layers // 8)
        counts = [current - step, current + step]
    return [count for count in dict.fromkeys(counts) if 0 < count < num_layers]


def _recomputed(settings: ModuleSettings, recompute: Recompute, count: int | None = None) -> Change:
    before = recompute_text(settings.recompute, settings.recompute_layers, settings.computed_again)
    text = f"{settings.module} recompute {before} -> {recompute_text(recompute, count)}"

    def edit(job: Job) -> Job:
        changed = _with_recompute(job.settings.of(settings.module), recompute, count)
        return replace(job, settings=job.settings.with_module(changed))

    return Change(ChangeKind.ACTIVATIONS, text, edit)


def _with_recompute(settings: ModuleSettings, recompute: Recompute, count: int | None) -> ModuleSettings:
    return replace(settings.recomputing(recompute, count), computed_again=())


def _sharding(job: Job) -> Iterator[Change]:
    for module in job.model.modules:
        current = job.settings.of(module.name).sharding
        for other in (Sharding.NONE, Sharding.OPTIMIZER):
            if current in (Sharding.NONE, Sharding.OPTIMIZER) and other is not current:
                yield _setting(module.name, "sharding", current, other)
        if current is Sharding.PARAMETERS:
            after = job.settings.of(module.name).reshard_after
            for other_after in ReshardAfter:
                if other_after is not after:
                    yield _setting(module.name, "reshard_after", after, other_after)


def _setting(module: str, name: str, current: object, value: object) -> Change:
    kind = ChangeKind.SHARDING if name in ("sharding", "reshard_after") else ChangeKind.ACTIVATIONS
    texts = (str(word).lower() for word in (current, value))
    return Change(kind, f"{module} {name} {' -> '.join(texts)}", _with_setting(module, name, value))


def _with_setting(module: str, name: str, value: object) -> Edit:
    def edit(job: Job) -> Job:
        values: dict[str, Any] = {name: value}
        changed = replace(job.settings.of(module), **values)
        return replace(job, settings=job.settings.with_module(changed))

    return edit


def _open_counts(job: Job) -> Job:
    """The same degrees, with stage counts and positions left to the strategy."""
    layouts = (replace(layout, pp=None, rank_offset=None, stage_layers=()) for layout in job.layouts)
    return replace(job, layouts=tuple(layouts))


def _always(requested: Job) -> Edit:
    return lambda _: requested


def looser(job: Job) -> Iterator[Job]:
    """The job with every degree left to the strategy, then with half, a quarter, ... of its replicas."""
    while True:
        job = with_layouts(job, ())
        yield job
        if job.replicas == 1:
            return
        job = replace(job, replicas=job.replicas // 2)
