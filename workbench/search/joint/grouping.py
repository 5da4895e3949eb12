"""Samples between microbatches: exchanged, moved, deferred, put in another order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workbench.data.sample import Item
from workbench.job.job import Job
from workbench.plan.plan import Microbatch
from workbench.plan.routing import Routing, routing_of
from workbench.planner.assembly import empty_draft
from workbench.planner.groupings import dealt, groups_of, llm_of, replicas_of


def exchanged(
    job: Job, microbatches: Sequence[Microbatch], first: int, second: int
) -> tuple[Microbatch, ...]:
    """Two samples in each other's places, in every module.

    Where modules have the LLM's groups, they have the new ones. Elsewhere a sample with several items in a
    module stands where the other has its first, second, ... one, and with what is over at its last; a module
    in which one of the two has none stays as it is.
    """
    if _is_dealt(job, microbatches):
        groups, replicas = groups_of(job, microbatches), replicas_of(job, microbatches)
        other = {first: second, second: first}
        swapped = tuple(
            tuple(sorted(other.get(member, member) for member in group)) if other.keys() & {*group} else group
            for group in groups
        )
        return dealt(job, swapped, replicas)
    routing = routing_of(empty_draft(job, "joint"))
    found = list(microbatches)
    for module in job.model.modules:
        places = [place for place, each in enumerate(found) if each.module == module.name]
        held = _exchanged(routing, [found[place] for place in places], first, second)
        for place, each in zip(places, held, strict=True):
            found[place] = each
    return tuple(found)


def _is_dealt(job: Job, microbatches: Sequence[Microbatch]) -> bool:
    """Whether all modules have the LLM's groups."""
    return dealt(job, groups_of(job, microbatches), replicas_of(job, microbatches)) == tuple(microbatches)


def _exchanged(routing: Routing, held: list[Microbatch], first: int, second: int) -> list[Microbatch]:
    where = {
        sample: [place for place, each in enumerate(held) for item in each.items if item.sample == sample]
        for sample in (first, second)
    }
    if not where[first] or not where[second]:
        return held
    rows = {
        place: [row for row in held[place].rows if all(item.sample not in where for item in row)]
        for places in where.values()
        for place in places
    }
    for sample, other in ((first, second), (second, first)):
        for number, item in enumerate(routing.items(held[0].module, sample)):
            rows[where[other][min(number, len(where[other]) - 1)]].append((item,))
    return [replace(each, rows=_in_order(rows.get(at, each.rows))) for at, each in enumerate(held)]


def _in_order(rows: Sequence[tuple[Item, ...]]) -> tuple[tuple[Item, ...], ...]:
    return tuple(sorted(rows, key=lambda row: (row[0].sample, row[0].k)))


def moved(
    job: Job,
    microbatches: Sequence[Microbatch],
    sample: int,
    target: tuple[int, int],
    *,
    modules: Sequence[str],
) -> tuple[Microbatch, ...]:
    """A sample's items into microbatch `target` (replica, index) of some modules.

    Moved in the LLM alone, a sample is deferred: its encoders' work stays where it was.

    Raises:
        ValueError: a module without that microbatch, or one that the sample leaves empty.
    """
    routing = routing_of(empty_draft(job, "joint"))
    found = []
    for each in microbatches:
        rows = each.rows
        if each.module in modules:
            rows = tuple(row for row in rows if all(item.sample != sample for item in row))
            if (each.replica, each.index) == target:
                rows = _in_order((*rows, *((item,) for item in routing.items(each.module, sample))))
        if not rows:
            raise ValueError(f"sample {sample} leaves microbatch {each.index} of {each.module!r} empty")
        found.append(replace(each, rows=rows))
    own = {each.module for each in found if (each.replica, each.index) == target}
    lacking = [name for name in modules if name not in own and routing.items(name, sample)]
    if lacking:
        raise ValueError(f"replica {target[0]} of {lacking[0]!r} has no microbatch {target[1]}")
    return tuple(found)


def reordered(
    job: Job, microbatches: Sequence[Microbatch], replica: int, start: int, end: int
) -> tuple[Microbatch, ...]:
    """A microbatch of a replica taken out and put in at another index, in every module.

    Raises:
        ValueError: a module without one of the two microbatches.
    """
    replicas = replicas_of(job, microbatches)
    counts = Counter(each.module for each in microbatches if each.replica == replica)
    if min(counts.values()) <= max(start, end):
        raise ValueError(f"replica {replica} of some module has no microbatch {max(start, end)}")
    if len(set(replicas.values())) == 1 and _is_dealt(job, microbatches):
        groups, num = list(groups_of(job, microbatches)), replicas[llm_of(job)]
        own = groups[replica::num]
        own.insert(end, own.pop(start))
        groups[replica::num] = own
        return dealt(job, groups, replicas)

    def index(place: int) -> int:
        if place == start:
            return end
        if start < place <= end:
            return place - 1
        return place + 1 if end <= place < start else place

    return tuple(
        replace(each, index=index(each.index)) if each.replica == replica else each for each in microbatches
    )
