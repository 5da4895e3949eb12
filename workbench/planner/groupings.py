"""Named ways to group a batch: rules, so that every batch of a job is grouped as the first was."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

from workbench.balance.microbatches.assignment import hierarchical_assignment
from workbench.balance.microbatches.reorder import reorder_samples
from workbench.balance.tokens.policies import longest_first_equal_counts
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.plan.build import chunked_microbatches, shared_microbatches
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Microbatch
from workbench.planner.assembly import empty_draft
from workbench.planner.sample_work import sample_work

Group = tuple[int, ...]  # ids of samples


def llm_of(job: Job) -> str:
    """The module of modality text."""
    return job.model.llm.name


def differ(batch: Sequence[Sample]) -> bool:
    """Whether samples are not all alike."""
    return len({(sample.segments, sample.mask) for sample in batch}) > 1


def groups_of(job: Job, microbatches: Sequence[Microbatch]) -> tuple[Group, ...]:
    """Samples of the LLM's microbatches: the first of every replica, then the second, ..."""
    mine = [m for m in microbatches if m.module == llm_of(job)]
    ordered = sorted(mine, key=lambda m: (m.index, m.replica))
    return tuple(tuple(dict.fromkeys(item.sample for item in m.items)) for m in ordered)


def dealt(job: Job, groups: Sequence[Group], replicas: Mapping[str, int]) -> tuple[Microbatch, ...]:
    """Microbatches of all modules, the groups dealt to the LLM's replicas in turn.

    Modules with as many replicas as the LLM have the same groups; where some have others, groups are cut
    again into equal ones in the same order of samples.

    Raises:
        ValueError: fewer groups than replicas, or samples that do not divide.
    """
    draft, llm = empty_draft(job, "joint"), llm_of(job)
    sample = draft.sample
    num = replicas[llm]
    if len(groups) < num:
        raise ValueError(f"{len(groups)} microbatches are too few for {num} replicas; nearest: {len(groups)}")
    if set(replicas.values()) == {num}:
        chunks = [[sample[member] for member in group] for group in groups]
        return chunked_microbatches(draft, {place: chunks[place::num] for place in range(num)})
    in_order = tuple(sample[member] for group in groups for member in group)
    size = max(1, len(in_order) // len(groups))
    rounds = job.schedule.window if job.schedule.kind.spec.takes("window") else 1
    return shared_microbatches(
        replace(draft, batch=in_order), samples_per_microbatch=size, dp=replicas, rounds=rounds
    )


def resized(groups: Sequence[Group], size: int) -> tuple[Group, ...]:
    """The same order of samples in groups of another size, each in the order of ids, which says no more.

    ValueError where it does not divide them.
    """
    members = [member for group in groups for member in group]
    if size < 1 or len(members) % size:
        raise ValueError(f"{len(members)} samples are no multiple of microbatches of {size}")
    starts = range(0, len(members), size)
    return tuple(tuple(sorted(members[start : start + size])) for start in starts)


def replicas_of(job: Job, microbatches: Sequence[Microbatch]) -> dict[str, int]:
    """Replicas of every module; one that has no microbatch counts as having the LLM's."""
    held = dict.fromkeys((each.module, each.replica) for each in microbatches)
    counts = Counter(module for module, _ in held)
    return {module.name: counts[module.name] or counts[llm_of(job)] for module in job.model.modules}


class Grouping(StrEnum):
    """Named ways to group a batch."""

    ARRIVAL = "as they came"
    HEAVIEST_FIRST = "heaviest first"
    LIGHTEST_FIRST = "lightest first"
    EVEN_REPLICAS = "even replicas"
    EVEN = "even microbatches"
    EVEN_COUNTS = "even microbatches of equal counts"


def grouped(job: Job, cost: CostModel, way: Grouping, count: int, replicas: int) -> tuple[Group, ...]:
    """The job's batch in groups: the first microbatch of every replica, then the second, ...

    Args:
        count: of groups; as many or, where it does not divide the batch, a few more or less.
        replicas: of the LLM.

    Raises:
        ValueError: a batch that has no such groups.

    Complexity: O(B (log B + count)) for B samples, and the work of each.
    """
    ids = [sample.id for sample in job.batch]
    size = max(1, len(ids) // count)
    work = sample_work(job, cost)
    whole = [encoder_s + llm_s for encoder_s, llm_s in zip(*work, strict=True)]
    heaviest = sorted(range(len(ids)), key=lambda place: (-whole[place], place))
    if way is Grouping.EVEN:
        found = hierarchical_assignment(
            work.encoder_s, work.llm_s, num_replicas=replicas, num_microbatches=max(1, count // replicas)
        )
        rounds = zip(*(each.llm for each in found), strict=False)
        groups = [tuple(ids[place] for place in held) for each in rounds for held in each if held]
        if sorted(member for group in groups for member in group) != sorted(ids):
            raise ValueError("replicas have unequal numbers of even microbatches")
        return tuple(groups)
    if way is Grouping.EVEN_COUNTS:
        return _of_equal_counts(ids, whole, count)
    if way is Grouping.EVEN_REPLICAS:
        held = reorder_samples(whole, replicas, longest_first_equal_counts)
        heaviest = [
            place
            for start in range(0, len(held[0]), size)
            for own in held
            for place in own[start : start + size]
        ]
    in_order = {
        Grouping.ARRIVAL: list(range(len(ids))),
        Grouping.HEAVIEST_FIRST: heaviest,
        Grouping.LIGHTEST_FIRST: heaviest[::-1],
        Grouping.EVEN_REPLICAS: heaviest,
    }[way]
    return resized([tuple(ids[place] for place in in_order)], size)


def _of_equal_counts(ids: Sequence[int], work_s: Sequence[float], count: int) -> tuple[Group, ...]:
    """Heaviest sample first, each to the lightest group that has a place; then the groups, lightest first.

    Replicas take groups in turn, so that what they do at one time is alike.
    """
    if len(ids) % count:
        raise ValueError(f"{len(ids)} samples are no {count} groups of equal counts")
    held = reorder_samples(work_s, count, longest_first_equal_counts)
    lightest = sorted(held, key=lambda places: sum(work_s[place] for place in places))
    return tuple(tuple(sorted(ids[place] for place in places)) for places in lightest)


_GROUPED: LruCache[tuple[Microbatch, ...]] = LruCache(64)  # by way, number and replicas, of one batch
_WAYS: LruCache[tuple[Grouping, ...]] = LruCache(256)


def grouped_again(
    job: Job, cost: CostModel, way: Grouping, microbatches: Sequence[Microbatch]
) -> tuple[Microbatch, ...]:
    """The job's batch in as many microbatches of as many replicas, grouped by a way; errors as `grouped`."""
    count, replicas = len(groups_of(job, microbatches)), replicas_of(job, microbatches)
    return dealt(job, grouped(job, cost, way, count, replicas[llm_of(job)]), replicas)


def way_of(job: Job, cost: CostModel, microbatches: tuple[Microbatch, ...]) -> Grouping | None:
    """The first way by which the job's batch is grouped so; None: by none, or in the order of arrival.

    Complexity: the job's batch grouped by every way, once for each number of microbatches and replicas.
    """
    key = Identity(job), Identity(cost), Identity(microbatches)
    found = _WAYS.get_or(key, lambda: _ways(job, cost, microbatches))
    return found[0] if found and found[0] is not Grouping.ARRIVAL else None


def _ways(job: Job, cost: CostModel, microbatches: tuple[Microbatch, ...]) -> tuple[Grouping, ...]:
    count, replicas = len(groups_of(job, microbatches)), replicas_of(job, microbatches)
    known = Identity(job), Identity(cost), count, tuple(replicas.items())
    for way in Grouping if differ(job.batch) else ():
        try:
            found = _GROUPED.get_or((*known, way), partial(grouped_again, job, cost, way, microbatches))
        except ValueError:  # a batch that has no such groups
            continue
        if found == microbatches:
            return (way,)
    return ()
