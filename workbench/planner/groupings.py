"""Rules that group a batch into microbatches, so that every batch of a job is grouped as the first was."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

from workbench.balance.microbatches.assignment import hierarchical_assignment
from workbench.balance.microbatches.even_modules import check_equal_counts, even_in_every_module
from workbench.balance.microbatches.reorder import reorder_samples
from workbench.balance.tokens.policies import longest_first_equal_counts
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.microbatches import chunked_microbatches, shared_microbatches
from workbench.plan.plan import Microbatch
from workbench.planner.assembly import empty_draft
from workbench.planner.sample_work import sample_work

Group = tuple[int, ...]  # ids of samples


def differ(batch: Sequence[Sample]) -> bool:
    """Whether not all samples have the same segments and mask."""
    return len({(sample.segments, sample.mask) for sample in batch}) > 1


def groups_of(job: Job, microbatches: Sequence[Microbatch]) -> tuple[Group, ...]:
    """Sample ids of the LLM's microbatches: the first of every replica, then the second, ..."""
    llm_microbatches = [m for m in microbatches if m.module == job.model.llm.name]
    ordered = sorted(llm_microbatches, key=lambda m: (m.index, m.replica))
    return tuple(tuple(dict.fromkeys(item.sample for item in m.items)) for m in ordered)


def round_robin(job: Job, groups: Sequence[Group], replicas: Mapping[str, int]) -> tuple[Microbatch, ...]:
    """Microbatches of all modules, the groups assigned to the LLM's replicas round-robin.

    If all modules have as many replicas as the LLM, they have the same groups; otherwise samples are
    regrouped in the same order into groups of equal size.

    Raises:
        ValueError: fewer groups than replicas, or samples that do not divide.
    """
    draft, llm = empty_draft(job, "joint"), job.model.llm.name
    sample = draft.sample
    num_llm = replicas[llm]
    if len(groups) < num_llm:
        raise ValueError(
            f"{len(groups)} microbatches are too few for {num_llm} replicas; nearest: {len(groups)}"
        )
    if set(replicas.values()) == {num_llm}:
        chunks = [[sample[member] for member in group] for group in groups]
        return chunked_microbatches(draft, {replica: chunks[replica::num_llm] for replica in range(num_llm)})
    in_order = tuple(sample[member] for group in groups for member in group)
    size = max(1, len(in_order) // len(groups))
    rounds = job.schedule.window if job.schedule.spec.takes("window") else 1
    return shared_microbatches(
        replace(draft, batch=in_order), samples_per_microbatch=size, dp=replicas, rounds=rounds
    )


def resized(groups: Sequence[Group], size: int) -> tuple[Group, ...]:
    """The same order of samples in groups of another size, each sorted by id.

    ValueError where `size` does not divide the number of samples.
    """
    members = [member for group in groups for member in group]
    if size < 1 or len(members) % size:
        raise ValueError(f"{len(members)} samples are not a multiple of microbatches of {size}")
    starts = range(0, len(members), size)
    return tuple(tuple(sorted(members[start : start + size])) for start in starts)


def replicas_of(job: Job, microbatches: Sequence[Microbatch]) -> dict[str, int]:
    """Replicas of every module; a module without microbatches counts as having the LLM's."""
    module_replicas = dict.fromkeys((microbatch.module, microbatch.replica) for microbatch in microbatches)
    counts = Counter(module for module, _ in module_replicas)
    return {module.name: counts[module.name] or counts[job.model.llm.name] for module in job.model.modules}


class Grouping(StrEnum):
    """Rules that group a batch."""

    ARRIVAL = "as they came"
    HEAVIEST_FIRST = "heaviest first"
    LIGHTEST_FIRST = "lightest first"
    EVEN_REPLICAS = "even replicas"
    EVEN = "even microbatches"
    EVEN_COUNTS = "even microbatches of equal counts"
    EVEN_MODULES = "microbatches even in every module"


def grouped(job: Job, cost: CostModel, rule: Grouping, count: int, replicas: int) -> tuple[Group, ...]:
    """The job's batch in groups by a rule: the first microbatch of every replica, then the second, ...

    Args:
        count: number of groups; where it does not divide the batch, a few more or fewer may result.
        replicas: of the LLM.

    Raises:
        ValueError: a batch that has no such groups.

    Complexity: O(B (log B + count)) for B samples, besides pricing each.
    """
    ids = [sample.id for sample in job.batch]
    size = max(1, len(ids) // count)
    work = sample_work(job, cost)
    whole = [encoder_s + llm_s for encoder_s, llm_s in zip(*work, strict=True)]
    heaviest = sorted(range(len(ids)), key=lambda index: (-whole[index], index))
    if rule is Grouping.EVEN:
        assignments = hierarchical_assignment(
            work.encoder_s, work.llm_s, num_replicas=replicas, num_microbatches=max(1, count // replicas)
        )
        rounds = zip(*(assignment.llm for assignment in assignments), strict=False)
        groups = [
            tuple(ids[index] for index in members)
            for assignment in rounds
            for members in assignment
            if members
        ]
        if sorted(member for group in groups for member in group) != sorted(ids):
            raise ValueError("replicas have unequal numbers of even microbatches")
        return tuple(groups)
    if rule is Grouping.EVEN_COUNTS:
        check_equal_counts(len(ids), count)
        return _lightest_first(ids, whole, reorder_samples(whole, count, longest_first_equal_counts))
    if rule is Grouping.EVEN_MODULES:
        return _lightest_first(ids, whole, even_in_every_module(work, count))
    if rule is Grouping.EVEN_REPLICAS:
        members = reorder_samples(whole, replicas, longest_first_equal_counts)
        heaviest = [
            index
            for start in range(0, len(members[0]), size)
            for of_replica in members
            for index in of_replica[start : start + size]
        ]
    in_order = {
        Grouping.ARRIVAL: list(range(len(ids))),
        Grouping.HEAVIEST_FIRST: heaviest,
        Grouping.LIGHTEST_FIRST: heaviest[::-1],
        Grouping.EVEN_REPLICAS: heaviest,
    }[rule]
    return resized([tuple(ids[index] for index in in_order)], size)


def _lightest_first(
    ids: Sequence[int], work_s: Sequence[float], groups: Sequence[Sequence[int]]
) -> tuple[Group, ...]:
    """Groups of indices as ids, lightest first.

    Replicas take groups in turn, so that groups that run at the same time are alike.
    """
    lightest = sorted(groups, key=lambda indices: float_sum(work_s[index] for index in indices))
    return tuple(tuple(sorted(ids[index] for index in indices)) for indices in lightest)


_GROUPED: LruCache[tuple[Microbatch, ...]] = LruCache(64)  # by rule, number and replicas, of one batch
_RULES: LruCache[tuple[Grouping, ...]] = LruCache(256)


def grouped_again(
    job: Job, cost: CostModel, rule: Grouping, microbatches: Sequence[Microbatch]
) -> tuple[Microbatch, ...]:
    """The job's batch in as many microbatches, grouped by a rule; errors as `grouped`."""
    count, replicas = len(groups_of(job, microbatches)), replicas_of(job, microbatches)
    return round_robin(job, grouped(job, cost, rule, count, replicas[job.model.llm.name]), replicas)


def way_of(job: Job, cost: CostModel, microbatches: tuple[Microbatch, ...]) -> Grouping | None:
    """The first rule that groups the job's batch into these microbatches; None: none, or order of arrival.

    Complexity: the job's batch grouped by every rule, once for each number of microbatches and replicas.
    """
    key = Identity(job), Identity(cost), Identity(microbatches)
    rules = _RULES.get_or(key, lambda: _matching_rule(job, cost, microbatches))
    return rules[0] if rules and rules[0] is not Grouping.ARRIVAL else None


def _matching_rule(job: Job, cost: CostModel, microbatches: tuple[Microbatch, ...]) -> tuple[Grouping, ...]:
    count, replicas = len(groups_of(job, microbatches)), replicas_of(job, microbatches)
    key = Identity(job), Identity(cost), count, tuple(replicas.items())
    for rule in Grouping if differ(job.batch) else ():
        try:
            regrouped = _GROUPED.get_or((*key, rule), partial(grouped_again, job, cost, rule, microbatches))
        except ValueError:  # a batch that has no such groups
            continue
        if regrouped == microbatches:
            return (rule,)
    return ()
