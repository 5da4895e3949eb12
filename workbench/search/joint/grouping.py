"""Exchange, move, defer and reorder samples between microbatches."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workbench.data.sample import Item
from workbench.job.job import Job
from workbench.plan.plan import Microbatch
from workbench.plan.routing import Routing, routing_of
from workbench.planner.assembly import empty_draft
from workbench.planner.groupings import groups_of, replicas_of, round_robin


def exchanged(
    job: Job, microbatches: Sequence[Microbatch], first: int, second: int
) -> tuple[Microbatch, ...]:
    """Swap two samples in every module.

    Modules grouped like the LLM follow its new groups. Elsewhere, the k-th item of a sample in a module
    takes the place of the other sample's k-th item, and surplus items that of its last; a module in which
    one of the two has no item stays unchanged.
    """
    if _has_llm_groups(job, microbatches):
        groups, replicas = groups_of(job, microbatches), replicas_of(job, microbatches)
        other = {first: second, second: first}
        swapped = tuple(
            tuple(sorted(other.get(member, member) for member in group)) if other.keys() & {*group} else group
            for group in groups
        )
        return round_robin(job, swapped, replicas)
    routing = routing_of(empty_draft(job, "joint"))
    result = list(microbatches)
    for module in job.model.modules:
        positions = [position for position, each in enumerate(result) if each.module == module.name]
        module_microbatches = _exchanged(routing, [result[position] for position in positions], first, second)
        for position, each in zip(positions, module_microbatches, strict=True):
            result[position] = each
    return tuple(result)


def _has_llm_groups(job: Job, microbatches: Sequence[Microbatch]) -> bool:
    """Whether all modules have the LLM's groups."""
    groups, replicas = groups_of(job, microbatches), replicas_of(job, microbatches)
    return round_robin(job, groups, replicas) == tuple(microbatches)


def _exchanged(routing: Routing, microbatches: list[Microbatch], first: int, second: int) -> list[Microbatch]:
    where = {
        sample: [
            position
            for position, each in enumerate(microbatches)
            for item in each.items
            if item.sample == sample
        ]
        for sample in (first, second)
    }
    if not where[first] or not where[second]:
        return microbatches
    rows = {
        position: [
            row for row in microbatches[position].rows if all(item.sample not in where for item in row)
        ]
        for positions in where.values()
        for position in positions
    }
    for sample, other in ((first, second), (second, first)):
        for number, item in enumerate(routing.items(microbatches[0].module, sample)):
            rows[where[other][min(number, len(where[other]) - 1)]].append((item,))
    return [replace(each, rows=_in_order(rows.get(at, each.rows))) for at, each in enumerate(microbatches)]


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
    """Move a sample's items to microbatch `target` (replica, index) of some modules.

    Moved in the LLM alone, a sample is deferred: its encoders' work stays where it was.

    Raises:
        ValueError: a module lacks that microbatch, or the sample leaves one empty.
    """
    routing = routing_of(empty_draft(job, "joint"))
    result = []
    for each in microbatches:
        rows = each.rows
        if each.module in modules:
            rows = tuple(row for row in rows if all(item.sample != sample for item in row))
            if (each.replica, each.index) == target:
                rows = _in_order((*rows, *((item,) for item in routing.items(each.module, sample))))
        if not rows:
            raise ValueError(f"sample {sample} leaves microbatch {each.index} of {each.module!r} empty")
        result.append(replace(each, rows=rows))
    target_modules = {each.module for each in result if (each.replica, each.index) == target}
    missing = [name for name in modules if name not in target_modules and routing.items(name, sample)]
    if missing:
        raise ValueError(f"replica {target[0]} of {missing[0]!r} has no microbatch {target[1]}")
    return tuple(result)


def reordered(
    job: Job, microbatches: Sequence[Microbatch], replica: int, start: int, end: int
) -> tuple[Microbatch, ...]:
    """Move a microbatch of a replica to another index, in every module.

    Raises:
        ValueError: a module lacks one of the two microbatches.
    """
    replicas = replicas_of(job, microbatches)
    counts = Counter(each.module for each in microbatches if each.replica == replica)
    if min(counts.values()) <= max(start, end):
        raise ValueError(f"replica {replica} of some module has no microbatch {max(start, end)}")
    if len(set(replicas.values())) == 1 and _has_llm_groups(job, microbatches):
        groups, num = list(groups_of(job, microbatches)), replicas[job.model.llm.name]
        replica_groups = groups[replica::num]
        replica_groups.insert(end, replica_groups.pop(start))
        groups[replica::num] = replica_groups
        return round_robin(job, groups, replicas)

    def index(old: int) -> int:
        if old == start:
            return end
        if start < old <= end:
            return old - 1
        return old + 1 if end <= old < start else old

    return tuple(
        replace(each, index=index(each.index)) if each.replica == replica else each for each in microbatches
    )
