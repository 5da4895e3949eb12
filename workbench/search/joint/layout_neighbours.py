"""Neighbours of an arrangement: one step of degrees, ranks passed between modules, other placements."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from operator import le
from typing import Any

from workbench.explain.neighbours import layout_neighbours
from workbench.job.device_pools import check_taken
from workbench.job.job import Job
from workbench.planner.assembly import check_ranks, dp_of, layout_of
from workbench.planner.groupings import groups_of
from workbench.planner.layout_choice import Degrees
from workbench.search.joint.arrangement import Arrangement, Placement, check_placement
from workbench.search.joint.choice import Choice


def job_of(job: Job, choice: Choice, arrangement: Arrangement) -> Job:
    """The job with the layouts of an arrangement, and the order and settings of a choice.

    Modules with as many replicas as the LLM use the job's number of replicas.
    """
    llm = arrangement.of(job.model.llm.name)
    layouts = tuple(
        replace(each.layout, dp=None) if each.dp == llm.dp else each.layout for each in arrangement.degrees
    )
    groups = groups_of(job, choice.microbatches)
    return replace(
        job,
        layouts=layouts,
        replicas=llm.dp,
        joint_replicas=llm.joint_replicas,
        schedule=choice.schedule,
        settings=choice.settings,
        microbatch_samples=max(llm.joint_replicas, len(job.batch) // len(groups)),
    )


def arrangements_near(job: Job, choice: Choice, arrangement: Arrangement) -> Iterator[Arrangement]:
    """Arrangements that differ in one module's degrees, in ranks passed between modules, or in placement.

    Args:
        choice: its microbatches, schedule and settings limit the degrees.
    """
    degrees = {arrangement.degrees: None}
    try:
        neighbourhood = job_of(job, choice, arrangement)
    except ValueError:  # limits of the job, such as a layout that its schedule requires
        return
    for change in layout_neighbours(neighbourhood):
        try:
            degrees[_degrees(change.edit(neighbourhood))] = None
        except ValueError:  # the model does not support these degrees
            continue
    degrees |= dict.fromkeys(
        (*_replicas_traded(arrangement), *_other_depths(arrangement), *_swapped(arrangement))
    )
    degrees |= dict.fromkeys(_other_replicas(job, arrangement))
    degrees |= dict.fromkeys([more for each in degrees for more in _filled(each, job.usable_ranks)])
    neighbours_found: dict[Arrangement, None] = {}
    for placement in Placement:
        for each in degrees:
            try:
                other = Arrangement(
                    placement=placement,
                    degrees=_fitted(job, placement, each),
                    first_ranks=arrangement.first_ranks if placement is Placement.ISLANDS else (),
                )
            except ValueError:  # degrees that cannot hold the experts, or leave no replica
                continue
            if other != arrangement and other not in neighbours_found and _is_placeable(job, other):
                neighbours_found[other] = None
    yield from neighbours_found
    yield from _other_pools(job, arrangement)


def _other_pools(job: Job, arrangement: Arrangement) -> Iterator[Arrangement]:
    """Islands of the same degrees that start with other device pools."""
    if not job.pools:
        return
    options = (None, *(pool.first_rank for pool in job.pools))
    current = arrangement.first_ranks or (None,) * len(arrangement.degrees)
    for first_ranks in product(options, repeat=len(arrangement.degrees)):
        other = Arrangement(placement=Placement.ISLANDS, degrees=arrangement.degrees, first_ranks=first_ranks)
        if first_ranks != current and _is_placeable(job, other):
            yield other


def _is_placeable(job: Job, arrangement: Arrangement) -> bool:
    """Whether the placement supports the degrees, on ranks that exist, in pools that take them."""
    if arrangement.num_ranks(job.model.llm.name) > job.usable_ranks:
        return False
    try:
        check_placement(job, arrangement)
        if arrangement.placement is Placement.ISLANDS:
            _check_pools(job, arrangement)
    except ValueError:
        return False
    return True


def _check_pools(job: Job, arrangement: Arrangement) -> None:
    """ValueError for islands beyond the existing ranks, or in a pool that does not take them."""
    first_ranks, end = arrangement.first_ranks or (None,) * len(arrangement.degrees), 0
    for each, first_rank in zip(arrangement.degrees, first_ranks, strict=True):
        first = end if first_rank is None else first_rank
        end = first + each.num_ranks
        check_taken(job.pools, each.module, range(first, end))
        check_ranks(job, end)


def _degrees(job: Job) -> tuple[Degrees, ...]:
    layouts = (layout_of(job, module.name) for module in job.model.modules)
    return tuple(
        Degrees(
            module=x.module,
            tp=x.tp,
            cp=x.cp,
            pp=x.pp or 1,
            dp=dp_of(job, x.module),
            ep=x.ep,
            joint_replicas=x.joint_replicas,
        )
        for x in layouts
    )


def _replicas_traded(arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """Trade one module's replicas against one of its other degrees."""
    for each in arrangement.degrees:
        for name in ("tp", "cp", "pp"):
            value = getattr(each, name)
            pairs = [(value // 2, 2 * each.dp)] * (value % 2 == 0) + [(2 * value, each.dp // 2)] * (
                each.dp % 2 == 0
            )
            for degree, dp in pairs:
                for other in _changed(each, **{name: degree, "dp": dp}):
                    yield tuple(other if d is each else d for d in arrangement.degrees)


def _other_replicas(job: Job, arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """Other replicas of all modules, each with at most one other degree, that fit and could not grow."""
    current = {each.dp for each in arrangement.degrees}
    if len(current) > 1:
        return
    (dp,) = current
    for replicas in sorted({2 * dp, dp + 1, dp - 1, dp // 2} - {0, dp}):
        if len(job.batch) % replicas:
            continue
        most = job.usable_ranks // replicas
        options = [list(_sizes_near(replace(each, dp=replicas))) for each in arrangement.degrees]
        fitting = [
            option
            for option in product(*options)
            if sum(each.num_ranks for each in option) <= most * replicas
        ]
        sizes = {tuple(each.num_ranks for each in option) for option in fitting}
        for option in fitting:
            size = tuple(each.num_ranks for each in option)
            if not any(size != other and all(map(le, size, other)) for other in sizes):
                yield option


def with_fewer_replicas(arrangement: Arrangement) -> Iterator[Arrangement]:
    """The same with one or two replicas of the whole model fewer, or half of them; the other ranks idle."""
    (most, *others) = {each.dp for each in arrangement.degrees}
    for replicas in sorted({most - 1, most - 2, most // 2}, reverse=True):
        if replicas > 0 and not others:
            fewer = tuple(replace(each, dp=replicas) for each in arrangement.degrees)
            yield replace(arrangement, degrees=fewer)


def _sizes_near(degrees: Degrees) -> Iterator[Degrees]:
    """The degrees, and each with tp, cp or pp halved or doubled, or one stage fewer or more."""
    yield degrees
    for name in ("tp", "cp", "pp"):
        value = getattr(degrees, name)
        others = {2 * value, value // 2 if value % 2 == 0 else 0}
        others |= {value + 1, value - 1} if name == "pp" else set()
        for other in sorted(others - {0}):
            yield from _changed(degrees, **{name: other})


def _other_depths(arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """One stage more or fewer for a module, or moved to another: depths need not be powers of two."""
    changes = [(module, by) for module in range(len(arrangement.degrees)) for by in (1, -1)]
    pairs = [
        (one, other) for one, other in combinations(changes, 2) if one[0] != other[0] and one[1] != other[1]
    ]
    for combination in (*((change,) for change in changes), *pairs):
        depths = [each.pp for each in arrangement.degrees]
        for module, by in combination:
            depths[module] += by
        if min(depths) > 0:
            yield tuple(replace(each, pp=pp) for each, pp in zip(arrangement.degrees, depths, strict=True))


def _swapped(arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """Swap two degrees of one module; its number of ranks stays."""
    for each in arrangement.degrees:
        for one, other in combinations(("tp", "cp", "pp"), 2):
            for swapped in _changed(each, **{one: getattr(each, other), other: getattr(each, one)}):
                if swapped != each:
                    yield tuple(swapped if d is each else d for d in arrangement.degrees)


def _filled(degrees: tuple[Degrees, ...], num_ranks: int) -> Iterator[tuple[Degrees, ...]]:
    """Use idle ranks for more stages or context parallelism of one module, where no ranks are shared."""
    free = num_ranks - sum(each.num_ranks for each in degrees)
    for each in degrees:
        for name in ("pp", "cp"):
            value = getattr(each, name)
            extra = free // (each.num_ranks // value)
            for larger in _changed(each, **{name: value + extra}) if extra > 0 else ():
                yield tuple(larger if other is each else other for other in degrees)


def _changed(degrees: Degrees, **changes: Any) -> Iterator[Degrees]:
    """The degrees with some changed; none if the experts cannot be distributed over the new grid."""
    tp, cp = changes.get("tp", degrees.tp), changes.get("cp", degrees.cp)
    num_joint = degrees.joint_replicas
    if num_joint * tp * cp % degrees.ep == 0 and 1 in (num_joint, cp):
        yield replace(degrees, **changes)


def _fitted(job: Job, placement: Placement, degrees: tuple[Degrees, ...]) -> tuple[Degrees, ...]:
    """Adapt encoders to the placement: the LLM's grid where they share its ranks."""
    if placement in (Placement.ISLANDS, Placement.REPLICAS):
        return degrees
    llm = next(each for each in degrees if each.module == job.model.llm.name)
    fitted = []
    for each in degrees:
        if each.module == llm.module:
            fitted.append(each)
        elif placement is Placement.FIRST_STAGE:
            fitted.append(replace(llm, module=each.module, pp=1, ep=1))
        elif placement is Placement.EVERYWHERE:
            replicas_and_stages = llm.num_ranks // each.stage_ranks
            fitted.append(
                replace(each, pp=1, dp=replicas_and_stages)
                if each.dp != llm.dp
                else replace(each, pp=max(1, replicas_and_stages // llm.dp))
            )
        else:
            first_encoder = next(d for d in degrees if d.module != llm.module)
            fitted.append(replace(first_encoder, module=each.module, dp=llm.dp, ep=each.ep))
    return tuple(fitted)
