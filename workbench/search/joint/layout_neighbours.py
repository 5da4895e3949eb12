"""Arrangements next to another: one step of degrees, ranks that one module gives to another, other places."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from operator import le

from workbench.explain.neighbours import ChangeKind, neighbours
from workbench.job.device_pools import check_taken
from workbench.job.job import Job
from workbench.planner.assembly import check_ranks, dp_of, layout_of
from workbench.planner.groupings import groups_of, llm_of
from workbench.planner.layout_choice import Degrees
from workbench.planner.layout_search import usable_ranks
from workbench.search.joint.arrangement import Arrangement, Placement, check_placement
from workbench.search.joint.choice import Choice


def job_of(job: Job, choice: Choice, arrangement: Arrangement) -> Job:
    """The job whose layouts are an arrangement's, and whose order and settings are a choice's.

    Replicas of modules that are as many as the LLM's are the job's.
    """
    replicas = arrangement.of(llm_of(job)).dp
    layouts = tuple(
        replace(each.layout, dp=None) if each.dp == replicas else each.layout for each in arrangement.degrees
    )
    groups = groups_of(job, choice.microbatches)
    return replace(
        job,
        layouts=layouts,
        replicas=replicas,
        schedule=choice.schedule,
        settings=choice.settings,
        microbatch_samples=max(1, len(job.batch) // len(groups)),
    )


def arrangements_near(job: Job, choice: Choice, arrangement: Arrangement) -> Iterator[Arrangement]:
    """Those that differ from it in degrees of one module, in ranks that one gives to another, or in places.

    Args:
        choice: whose microbatches, schedule and settings the degrees must go with.
    """
    degrees = {arrangement.degrees: None}
    try:
        around = job_of(job, choice, arrangement)
    except ValueError:  # the job's own limits, such as a layout of a schedule that this is not
        return
    for change in neighbours(around):
        if change.kind is not ChangeKind.LAYOUT:
            continue
        try:
            degrees[_degrees(change.edit(around))] = None
        except ValueError:  # degrees that the model does not take
            continue
    degrees |= dict.fromkeys(
        (*_replicas_of_one(arrangement), *_other_depths(arrangement), *_swapped(arrangement))
    )
    degrees |= dict.fromkeys(_other_replicas(job, arrangement))
    degrees |= dict.fromkeys([more for each in degrees for more in _filled(each, usable_ranks(job))])
    found: dict[Arrangement, None] = {}
    for placement in Placement:
        for each in degrees:
            try:
                other = Arrangement(
                    placement=placement,
                    degrees=_fitted(job, placement, each),
                    first_ranks=arrangement.first_ranks if placement is Placement.ISLANDS else (),
                )
            except ValueError:  # experts that the new degrees cannot hold, or no replica
                continue
            if other != arrangement and other not in found and _takes_place(job, other):
                found[other] = None
    yield from found
    yield from _other_pools(job, arrangement)


def _other_pools(job: Job, arrangement: Arrangement) -> Iterator[Arrangement]:
    """Islands of the same degrees that begin with other pools of devices."""
    if not job.pools:
        return
    firsts = (None, *(pool.first_rank for pool in job.pools))
    now = arrangement.first_ranks or (None,) * len(arrangement.degrees)
    for first_ranks in product(firsts, repeat=len(arrangement.degrees)):
        other = Arrangement(placement=Placement.ISLANDS, degrees=arrangement.degrees, first_ranks=first_ranks)
        if first_ranks != now and _takes_place(job, other):
            yield other


def _takes_place(job: Job, arrangement: Arrangement) -> bool:
    """Whether degrees go with the placement, on no more ranks than there are, of pools that take them."""
    if arrangement.num_ranks(llm_of(job)) > usable_ranks(job):
        return False
    try:
        check_placement(job, arrangement)
        if arrangement.placement is Placement.ISLANDS:
            _check_pools(job, arrangement)
    except ValueError:
        return False
    return True


def _check_pools(job: Job, arrangement: Arrangement) -> None:
    """ValueError for islands beyond the ranks that there are, or in a pool that does not take them."""
    begins, end = arrangement.first_ranks or (None,) * len(arrangement.degrees), 0
    for each, begin in zip(arrangement.degrees, begins, strict=True):
        first = end if begin is None else begin
        end = first + each.num_ranks
        check_taken(job.pools, each.module, range(first, end))
        check_ranks(job, end)


def _degrees(job: Job) -> tuple[Degrees, ...]:
    layouts = (layout_of(job, module.name) for module in job.model.modules)
    return tuple(
        Degrees(module=x.module, tp=x.tp, cp=x.cp, pp=x.pp or 1, dp=dp_of(job, x.module), ep=x.ep)
        for x in layouts
    )


def _replicas_of_one(arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """One module's replicas against one of its other degrees."""
    for each in arrangement.degrees:
        for name in ("tp", "cp", "pp"):
            value = getattr(each, name)
            pairs = [(value // 2, 2 * each.dp)] * (value % 2 == 0) + [(2 * value, each.dp // 2)] * (
                each.dp % 2 == 0
            )
            for degree, dp in pairs:
                if degree * each.tp * each.cp // value % each.ep and name != "pp":
                    continue
                other = replace(each, **{name: degree, "dp": dp})
                yield tuple(other if d is each else d for d in arrangement.degrees)


def _other_replicas(job: Job, arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """Other replicas of all modules; each has a degree less or more, so that they fit and none could grow."""
    now = {each.dp for each in arrangement.degrees}
    if len(now) > 1:
        return
    (dp,) = now
    for replicas in sorted({2 * dp, dp + 1, dp - 1, dp // 2} - {0, dp}):
        if len(job.batch) % replicas:
            continue
        most = usable_ranks(job) // replicas
        options = [list(_sizes_near(replace(each, dp=replicas))) for each in arrangement.degrees]
        fitting = [
            some for some in product(*options) if sum(each.num_ranks for each in some) <= most * replicas
        ]
        sizes = {tuple(each.num_ranks for each in some) for some in fitting}
        for some in fitting:
            own = tuple(each.num_ranks for each in some)
            if not any(own != other and all(map(le, own, other)) for other in sizes):
                yield some


def with_fewer_replicas(arrangement: Arrangement) -> Iterator[Arrangement]:
    """The same with one or two replicas of the whole model less, or half of them: other ranks are idle."""
    (most, *others) = {each.dp for each in arrangement.degrees}
    for replicas in sorted({most - 1, most - 2, most // 2}, reverse=True):
        if replicas > 0 and not others:
            fewer = tuple(replace(each, dp=replicas) for each in arrangement.degrees)
            yield replace(arrangement, degrees=fewer)


def _sizes_near(degrees: Degrees) -> Iterator[Degrees]:
    """These, and with one of them halved, doubled, or a stage less or more."""
    yield degrees
    for name in ("tp", "cp", "pp"):
        value = getattr(degrees, name)
        others = {2 * value, value // 2 if value % 2 == 0 else 0}
        others |= {value + 1, value - 1} if name == "pp" else set()
        for other in sorted(others - {0}):
            changed = replace(degrees, **{name: other})
            if changed.tp * changed.cp % changed.ep == 0:
                yield changed


def _other_depths(arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """A stage more or fewer for one module, or one for another: depths need be no powers of two."""
    changes = [(module, by) for module in range(len(arrangement.degrees)) for by in (1, -1)]
    pairs = [
        (one, other) for one, other in combinations(changes, 2) if one[0] != other[0] and one[1] != other[1]
    ]
    for some in (*((change,) for change in changes), *pairs):
        depths = [each.pp for each in arrangement.degrees]
        for module, by in some:
            depths[module] += by
        if min(depths) > 0:
            yield tuple(replace(each, pp=pp) for each, pp in zip(arrangement.degrees, depths, strict=True))


def _swapped(arrangement: Arrangement) -> Iterator[tuple[Degrees, ...]]:
    """Two degrees of one module in each other's place, on as many ranks."""
    for each in arrangement.degrees:
        for one, other in combinations(("tp", "cp", "pp"), 2):
            swapped = replace(each, **{one: getattr(each, other), other: getattr(each, one)})
            if swapped != each and swapped.tp * swapped.cp % each.ep == 0:
                yield tuple(swapped if d is each else d for d in arrangement.degrees)


def _filled(degrees: tuple[Degrees, ...], num_ranks: int) -> Iterator[tuple[Degrees, ...]]:
    """Ranks that nobody has, as stages or for context parallelism of one module, where none are shared."""
    free = num_ranks - sum(each.num_ranks for each in degrees)
    for each in degrees:
        for name in ("pp", "cp"):
            value = getattr(each, name)
            more = free // (each.num_ranks // value)
            if more > 0 and (name == "pp" or (value + more) * each.tp % each.ep == 0):
                larger = replace(each, **{name: value + more})
                yield tuple(larger if other is each else other for other in degrees)


def _fitted(job: Job, placement: Placement, degrees: tuple[Degrees, ...]) -> tuple[Degrees, ...]:
    """Encoders made to go with the placement: the LLM's grid where they share its ranks."""
    llm = next(each for each in degrees if each.module == llm_of(job))
    found = []
    for each in degrees:
        if each.module == llm.module or placement in (Placement.ISLANDS, Placement.REPLICAS):
            found.append(each)
        elif placement is Placement.FIRST_STAGE:
            found.append(replace(llm, module=each.module, pp=1, ep=1))
        elif placement is Placement.EVERYWHERE:
            rest = llm.num_ranks // (each.tp * each.cp)
            found.append(
                replace(each, pp=1, dp=rest)
                if each.dp != llm.dp
                else replace(each, pp=max(1, rest // llm.dp))
            )
        else:
            first = next(d for d in degrees if d.module != llm.module)
            found.append(replace(each, tp=first.tp, cp=first.cp, pp=first.pp, dp=llm.dp))
    return tuple(found)
