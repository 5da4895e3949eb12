"""Entrain with its pairs ordered for the pipeline and encoder forwards as eager as memory allows.

Source: Entrain (dissertation, sections 4.5.2 and 4.5.3), which fixes neither the order of the pairs
nor how far ahead forwards run. Both are chosen here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workbench.balance.microbatches import MicrobatchAssignment
from workbench.balance.replicas import heaviest_first
from workbench.balance.unit_order import order_units
from workbench.cost.model import CostModel
from workbench.job import Job
from workbench.plan.critical_path import critical_path_s
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.memory import check_memory, memory_table
from workbench.plan.plan import Plan
from workbench.plan.price import price
from workbench.strategies import entrain
from workbench.strategies.assembly import scheduled
from workbench.strategies.sample_work import sample_work
from workbench.strategies.stage_counts import Progress, silent
from workbench.strategies.stage_times import StageTimes, stage_times


def plan(job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
    """Entrain's stages; of two groupings and several leads, the fastest with an order of its own.

    Groupings: Entrain's pairs, and samples of like size together, whose smallest microbatches fill and
    drain the pipeline faster than even ones can. For each, leads 0, 1, 2, 4, ... are tried as far as
    plans fit in memory, and what may change places does under the recurrence of a 1F1B chain, see
    `order_units`. The planner's estimate, which knows the real programs and messages, then picks
    among all of them and Entrain's own plan. So it is never slower by that estimate.

    Raises:
        ValueError: as `entrain.plan`.

    Complexity: that of `entrain.plan`, and O(log K) plans for K microbatches a replica.
    """
    first = entrain.plan(job, cost, progress)
    pairs = entrain.assign(job, cost)
    drafts = [lower(first)]
    for assignments in (pairs, by_size(job, cost, pairs)):
        drafts += [lower(candidate) for candidate in _candidates(job, cost, first, assignments)]
    chosen = first
    for lowered in sorted(drafts, key=lambda each: _estimate_s(each, cost)):
        if lowered.plan == first or _fits(lowered):
            chosen = lowered.plan
            break
    return replace(chosen, strategy="entrain-ordered")


def _fits(lowered: Lowered) -> bool:
    try:
        check_memory(lowered, memory_table(lowered))
    except ValueError:
        return False
    return True


def by_size(
    job: Job, cost: CostModel, assignments: Sequence[MicrobatchAssignment]
) -> tuple[MicrobatchAssignment, ...]:
    """The same replicas with samples cut into microbatches from the largest on; nothing is deferred.

    Source: DistTrain (section 5.2, Algorithm 1) leaves each group's samples in that order.
    Differs: size is work in all modules, not in the encoder alone.
    """
    work = sample_work(job, cost)
    found = []
    for assignment in assignments:
        members = sorted(sample for held in assignment.llm for sample in held)
        ordered = heaviest_first(members, [sum(pair) for pair in zip(*work, strict=True)])
        chunks = tuple(
            tuple(sorted(ordered[start : start + job.microbatch_samples]))
            for start in range(0, len(ordered), job.microbatch_samples)
        )
        found.append(MicrobatchAssignment(encoder=chunks, deferred=((),) * len(chunks), llm=chunks))
    return tuple(found)


def units_of(assignment: MicrobatchAssignment) -> tuple[tuple[int, ...], ...]:
    """Places that must stay together: one that defers and the next; all others stand alone."""
    found: list[tuple[int, ...]] = []
    place = 0
    while place < len(assignment.deferred):
        size = 2 if assignment.deferred[place] else 1
        found.append(tuple(range(place, place + size)))
        place += size
    return tuple(found)


def _ordered(assignment: MicrobatchAssignment, times: StageTimes, lead: int) -> MicrobatchAssignment:
    units = units_of(assignment)
    depth = times.num_encoder_stages
    leads = [lead] * depth + [0] * (times.forward_s.shape[1] - depth)
    order = order_units(times.forward_s, times.backward_s, units, leads).units
    places = [place for unit in order for place in units[unit]]

    def permuted(held: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(held[place] for place in places)

    return MicrobatchAssignment(
        encoder=permuted(assignment.encoder),
        deferred=permuted(assignment.deferred),
        llm=permuted(assignment.llm),
    )


def _times(plan: Plan, cost: CostModel, replica: int, assignment: MicrobatchAssignment) -> StageTimes:
    def places(microbatches: Sequence[tuple[int, ...]]) -> dict[int, int]:
        return {plan.batch[index].id: place for place, held in enumerate(microbatches) for index in held}

    return stage_times(
        plan, cost, replica, produced=places(assignment.encoder), consumed=places(assignment.llm)
    )


def _leads(num_places: int) -> Iterator[int]:
    yield 0
    lead = 1
    while lead < num_places:
        yield lead
        lead *= 2


def _candidates(
    job: Job, cost: CostModel, first: Plan, assignments: tuple[MicrobatchAssignment, ...]
) -> Iterator[Plan]:
    """One plan for each lead, from 0 on."""
    drawn = _rebuilt(job, cost, first, assignments, 0)
    times = [_times(drawn, cost, replica, each) for replica, each in enumerate(assignments)]
    for lead in _leads(max(len(each.encoder) for each in assignments)):
        ordered = tuple(
            _ordered(each, of_replica, lead) for each, of_replica in zip(assignments, times, strict=True)
        )
        yield _rebuilt(job, cost, first, ordered, lead)


def _rebuilt(
    job: Job, cost: CostModel, first: Plan, assignments: tuple[MicrobatchAssignment, ...], lead: int
) -> Plan:
    """The same stages with other microbatches in other programs."""
    microbatches, followers = entrain.deferring_microbatches(first, assignments)
    draft = replace(first, microbatches=microbatches, programs=(), token_shards=())
    return entrain.with_adjacent_forwards(scheduled(draft, job.schedule, cost), followers, lead)


def _estimate_s(lowered: Lowered, cost: CostModel) -> float:
    return critical_path_s(lowered, price(lowered, cost).duration_s)
