"""Jobs next to a job: one thing changed, or two where ranks move from one degree to another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations, product
from typing import Any

from workbench.job.job import Job, ModuleLayout
from workbench.model.experts import num_experts
from workbench.model.layer import Layer
from workbench.model.model_graph import TEXT
from workbench.plan.plan import KeyExchange, Recompute, Sharding
from workbench.planner.assembly import dp_of, layout_of
from workbench.schedule.choice import ScheduleKind, usual

Edit = Callable[[Job], Job]


class ChangeKind(StrEnum):
    """What a change is of, in the order in which they are tried: the quickest to plan first."""

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
        edit: makes the job; ValueError where it cannot be.
        strategy: that plans it; None: as before.
    """

    kind: ChangeKind
    about: str
    edit: Edit
    strategy: str | None = None


def neighbours(job: Job, strategies: Sequence[str] = (), asked: Job | None = None) -> Iterator[Change]:
    """All changes, by kind: degrees of every module, microbatches, schedule, activations, sharding, strategy.

    A degree is doubled or halved, stages also go up or down by one; ranks that a degree gives up may go to
    another of the module, to stages of another module, or between the LLM and its replicas. Which of these
    are legal, and take no more ranks than there are, says the planner.

    Args:
        job: with layouts of every module.
        strategies: others to try.
        asked: the job that they are to plan, as it was before a strategy filled it in; None: the job with
            open stage counts, or what of `looser` they plan first.

    Complexity: O(modules squared + schedules + strategies).
    """
    yield from _layouts(job)
    yield from _microbatches(job)
    for kind in ScheduleKind:
        if kind != job.schedule.kind:
            yield Change(ChangeKind.SCHEDULE, f"schedule {job.schedule.kind} -> {kind}", _scheduled(kind))
    yield from _activations(job)
    yield from _sharding(job)
    for name in strategies:
        yield Change(
            ChangeKind.STRATEGY, f"strategy {name}", _open_counts if asked is None else _always(asked), name
        )


Degrees = Mapping[str, int]  # tp, cp, pp, ep of a layout, or dp


def _layouts(job: Job) -> Iterator[Change]:
    for module in job.model.modules:
        layout = layout_of(job, module.name)
        for degrees in (*_degrees(layout), *_experts(layout, module.layers)):
            yield _of_module(layout, degrees)
    yield from _between_modules(job)
    yield from _replicas(job)


def _degrees(layout: ModuleLayout) -> Iterator[Degrees]:
    """One degree of a module, or one against another at equal ranks."""
    now = {name: getattr(layout, name) or 1 for name in ("tp", "cp", "pp")}
    for name, value in now.items():
        yield {name: 2 * value}
        if value % 2 == 0:
            yield {name: value // 2}
    for pp in (now["pp"] + 1, now["pp"] - 1):
        if pp >= 1 and pp not in (2 * now["pp"], now["pp"] / 2):
            yield {"pp": pp}
    for up, down in permutations(now, 2):
        if now[down] % 2 == 0:
            yield {up: 2 * now[up], down: now[down] // 2}


def _experts(layout: ModuleLayout, layers: Sequence[Layer]) -> Iterator[Degrees]:
    if any(map(num_experts, layers)):
        yield {"ep": 2 * layout.ep}
        if layout.ep % 2 == 0:
            yield {"ep": layout.ep // 2}


def _of_module(layout: ModuleLayout, degrees: Degrees) -> Change:
    return Change(ChangeKind.LAYOUT, _told(layout, degrees), _with_degrees({layout.module: degrees}))


def _told(layout: ModuleLayout, degrees: Degrees) -> str:
    """`llm tp 4 -> 2, pp 2 -> 4`."""
    words = (f"{name} {getattr(layout, name) or 1} -> {value}" for name, value in degrees.items())
    return f"{layout.module} {', '.join(words)}"


def _between_modules(job: Job) -> Iterator[Change]:
    """A stage of one module less, of another one more."""
    for down, up in permutations([layout_of(job, module.name) for module in job.model.modules], 2):
        more, less = {"pp": (up.pp or 1) + 1}, {"pp": (down.pp or 1) - 1}
        if less["pp"]:
            about = f"{_told(up, more)}, {_told(down, less)}"
            yield Change(ChangeKind.LAYOUT, about, _with_degrees({up.module: more, down.module: less}))


def _replicas(job: Job) -> Iterator[Change]:
    """Replicas of all modules doubled or halved, the LLM's or every module's degrees against that."""
    layouts = [layout_of(job, module.name) for module in job.model.modules]
    llm = [layout for layout in layouts if job.model.module(layout.module).modality == TEXT]
    if any(dp_of(job, layout.module) != job.replicas for layout in layouts):
        return
    for replicas in (2 * job.replicas, job.replicas // 2):
        if not replicas or len(job.batch) % replicas:
            continue
        told = f"dp {job.replicas} -> {replicas}"
        yield Change(ChangeKind.LAYOUT, told, _with_replicas(replicas, {}))
        for name, changed in product(("tp", "cp", "pp"), (llm, layouts) if len(layouts) > 1 else (llm,)):
            values = [_against(getattr(layout, name) or 1, job.replicas, replicas) for layout in changed]
            if all(values):
                degrees = {
                    layout.module: {name: value}
                    for layout, value in zip(changed, values, strict=True)
                    if value
                }
                also = (_told(layout, degrees[layout.module]) for layout in changed)
                yield Change(ChangeKind.LAYOUT, ", ".join((told, *also)), _with_replicas(replicas, degrees))


def _against(value: int, was: int, replicas: int) -> int | None:
    """A degree that takes the ranks which replicas gave up, or gives them; None: it cannot."""
    if replicas < was:
        return 2 * value
    return value // 2 if value % 2 == 0 else None


def _with_degrees(degrees: Mapping[str, Degrees]) -> Edit:
    def edit(job: Job) -> Job:
        layouts = (layout_of(job, module.name) for module in job.model.modules)
        return replace(job, layouts=tuple(_changed(each, degrees.get(each.module, {})) for each in layouts))

    return edit


def _changed(layout: ModuleLayout, degrees: Degrees) -> ModuleLayout:
    """Another number of stages has other layers in each."""
    values: dict[str, Any] = dict(degrees)
    return replace(layout, **values | ({"stage_layers": ()} if "pp" in degrees else {}))


def _with_replicas(replicas: int, degrees: Mapping[str, Degrees]) -> Edit:
    return lambda job: replace(_with_degrees(degrees)(job), replicas=replicas)


def _microbatches(job: Job) -> Iterator[Change]:
    now = job.microbatch_samples
    for samples in (2 * now, now // 2):
        if samples:
            about = f"samples of a microbatch {now} -> {samples}"
            yield Change(ChangeKind.MICROBATCHES, about, _with_samples(samples))


def _with_samples(samples: int) -> Edit:
    return lambda job: replace(job, microbatch_samples=samples)


def _scheduled(kind: ScheduleKind) -> Edit:
    return lambda job: replace(job, schedule=usual(kind))


def _activations(job: Job) -> Iterator[Change]:
    for module in job.model.modules:
        own, layout = job.settings.of(module.name), layout_of(job, module.name)
        other = Recompute.NONE if own.recompute is Recompute.FULL else Recompute.FULL
        yield _setting(module.name, "recompute", own.recompute, other)
        if layout.tp > 1:
            told = "sequence_parallel"
            yield _setting(module.name, told, own.sequence_parallel, not own.sequence_parallel)
        if layout.cp > 1:
            for way in KeyExchange:
                if way is not own.key_exchange:
                    yield _setting(module.name, "key_exchange", own.key_exchange, way)


def _sharding(job: Job) -> Iterator[Change]:
    for module in job.model.modules:
        now = job.settings.of(module.name).sharding
        for other in (Sharding.NONE, Sharding.OPTIMIZER):
            if now in (Sharding.NONE, Sharding.OPTIMIZER) and other is not now:
                yield _setting(module.name, "sharding", now, other)


def _setting(module: str, name: str, now: object, value: object) -> Change:
    kind = ChangeKind.SHARDING if name == "sharding" else ChangeKind.ACTIVATIONS
    told = (str(word).lower() for word in (now, value))
    return Change(kind, f"{module} {name} {' -> '.join(told)}", _with_setting(module, name, value))


def _with_setting(module: str, name: str, value: object) -> Edit:
    def edit(job: Job) -> Job:
        values: dict[str, Any] = {name: value}
        changed = replace(job.settings.of(module), **values)
        return replace(job, settings=job.settings.with_module(changed))

    return edit


def _open_counts(job: Job) -> Job:
    """Degrees as they are, stage counts and places left to the strategy."""
    layouts = (replace(layout, pp=None, rank_offset=None, stage_layers=()) for layout in job.layouts)
    return replace(job, layouts=tuple(layouts))


def _always(asked: Job) -> Edit:
    return lambda _: asked


def looser(job: Job) -> Iterator[Job]:
    """The job with every degree left to the strategy, then with half, a quarter, ... of its replicas."""
    while True:
        yield replace(job, layouts=())
        if job.replicas == 1:
            return
        job = replace(job, replicas=job.replicas // 2)
