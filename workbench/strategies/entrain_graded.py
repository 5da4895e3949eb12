"""Entrain with microbatches of graded size in an order suited to the pipeline, on evenly loaded ranks.

Source: Entrain (dissertation, sections 4.4.2, 4.5.2 and 4.5.3), which gives modules whole ranks, makes all
microbatches equal, and does not specify the order of the pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import numpy as np

from workbench.balance.microbatches.assignment import MicrobatchAssignment
from workbench.balance.microbatches.graded import graded_assignment
from workbench.balance.microbatches.unit_order import UnitOrder, order_units, unimproved_order
from workbench.balance.stages.chain_cuts import chain_cuts
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.model.model_graph import TEXT
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.planner.assembly import draft_plan, fits, grid, layout_of, num_microbatches, scheduled
from workbench.planner.layer_cost import believed_layers_s
from workbench.planner.planner_cost import FROZEN_AWARE
from workbench.planner.sample_work import sample_work
from workbench.planner.stage_counts import Progress
from workbench.planner.strategy_spec import PLAIN_OR_SPLIT, Chooser, First, OwnSpace, StrategySpec
from workbench.strategies import entrain
from workbench.timing.critical_path import critical_path_s
from workbench.timing.price import price
from workbench.timing.stage_times import Seconds, StageTimes, stage_times

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of small microbatches
IMPROVED = 6  # best candidates by the recurrence, whose order is improved
BUILT = 3  # of those, the candidates that become plans


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The fastest plans that fit in memory, of two cuts, five gradings and several leads.

    Cuts: Entrain's, and if the job leaves stage counts open and one encoder feeds the LLM on ranks of one
    shape, cuts of the whole chain whose boundary block holds layers of both, see `chain_cuts`. Gradings:
    none to all of the microbatches small, see `graded_assignment`. Leads: encoder forwards 0, 1, 2, 4, ...
    microbatches ahead. A recurrence of the pipeline ranks all combinations; the best get an order by
    `order_units`, the best of those become plans, and the planner's estimate, which includes the real
    programs and messages, chooses among these and Entrain's own. So the result is never slower by that
    estimate.

    Raises:
        ValueError: as `entrain.plan`.

    Complexity: that of `entrain.plan`, 10 pricings and O(log K) orders for K microbatches per replica.
    """
    first = entrain.plan(job, cost, progress)
    return _fastest(job, cost, first, [first, *_shared(job, cost, first)], most)


plan = First(shortlist)


def regroup(plan: Plan, job: Job, cost: CostModel) -> Plan:
    """The fastest grading, order and lead for the job's batch on the plan's stages."""
    first = entrain.regroup(plan, job, cost)
    return _fastest(job, cost, first, [first], 1)[0]


def _fastest(job: Job, cost: CostModel, first: Plan, cuts: Sequence[Plan], most: int) -> tuple[Plan, ...]:
    """The best by the estimate, of the first plan and of the cuts with other microbatches."""
    gradings = list(_gradings(job, cost))
    candidates = [
        candidate
        for cut in cuts
        for grading in gradings
        for candidate in _candidates(job, cost, cut, grading)
    ]
    candidates.sort(key=lambda candidate: candidate.ordered(unimproved_order)[1])
    ordered = [(candidate, *candidate.ordered(order_units)) for candidate in candidates[:IMPROVED]]
    ordered.sort(key=lambda candidate_order: candidate_order[2])
    plans = (
        _rebuilt(job, cost, candidate.cut, assignments, candidate.lead)
        for candidate, assignments, _ in ordered
    )
    drafts = [lower(draft) for draft in (first, *islice(filter(fits, plans), BUILT))]
    seconds = [_estimate_s(lowered, cost) for lowered in drafts]
    by_estimate = sorted(range(len(drafts)), key=seconds.__getitem__)
    return tuple(replace(drafts[number].plan, strategy="entrain-graded") for number in by_estimate[:most])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Stages, microbatches of every replica with their times, and how far forwards run ahead."""

    cut: Plan
    assignments: tuple[MicrobatchAssignment, ...]
    times: tuple[StageTimes, ...]
    lead: int

    def ordered(self, order: Callable[..., UnitOrder]) -> tuple[tuple[MicrobatchAssignment, ...], float]:
        """Every replica's microbatches in order, and seconds of the slowest replica."""
        orders = [
            _ordered(assignment, times, self.lead, order)
            for assignment, times in zip(self.assignments, self.times, strict=True)
        ]
        return tuple(assignment for assignment, _ in orders), max(seconds for _, seconds in orders)


def _candidates(
    job: Job, cost: CostModel, cut: Plan, assignments: tuple[MicrobatchAssignment, ...]
) -> Iterator[_Candidate]:
    """One candidate for each lead, from 0 on."""
    built = _rebuilt(job, cost, cut, assignments, 0)
    times = tuple(_times(built, cost, replica, assignment) for replica, assignment in enumerate(assignments))
    for lead in _leads(max(len(assignment.encoder) for assignment in assignments)):
        yield _Candidate(cut=cut, assignments=assignments, times=times, lead=lead)


def _leads(num_microbatches: int) -> Iterator[int]:
    yield 0
    yield from takewhile(num_microbatches.__gt__, entrain.powers_of_two())


def _gradings(job: Job, cost: CostModel) -> Iterator[tuple[MicrobatchAssignment, ...]]:
    """Assignments by share of small microbatches; each replica's samples are Entrain's."""
    work = sample_work(job, cost)
    replicas = [
        sorted(sample for microbatch in assignment.llm for sample in microbatch)
        for assignment in entrain.assign(job, cost)
    ]
    for share in SHARES:
        yield tuple(_graded(members, work, job.microbatch_samples, share) for members in replicas)


def _graded(
    members: Sequence[int], work: Sequence[Sequence[float]], size: int, share: float
) -> MicrobatchAssignment:
    count = max(1, len(members) // size)
    encoder_s, llm_s = ([seconds[sample] for sample in members] for seconds in work)
    local = graded_assignment(encoder_s, llm_s, num_microbatches=count, num_small=round(share * count))

    def samples(microbatches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(members[index] for index in indices) for indices in microbatches)

    return MicrobatchAssignment(
        encoder=samples(local.encoder), deferred=samples(local.deferred), llm=samples(local.llm)
    )


def _shared(job: Job, cost: CostModel, first: Plan) -> Iterator[Plan]:
    """The same ranks with the whole chain cut evenly; nothing where the modules are no such chain."""
    layouts = [layout_of(job, module.name) for module in job.model.modules]
    shapes = {(layout.tp, layout.cp, layout.joint_replicas) for layout in layouts}
    is_open = all(layout.pp is None and not layout.stage_layers for layout in layouts)
    if len(layouts) != 2 or len(shapes) > 1 or not is_open or job.schedule.virtual_stages > 1:
        return
    draft = draft_plan(job, "entrain-graded")
    layers_s = believed_layers_s(job, draft, cost, FROZEN_AWARE.layer_s)
    names = [module.name for module in sorted(job.model.modules, key=lambda m: m.modality == TEXT)]
    layout = layouts[0]
    num_blocks = len(first.ranks) // (layout.stage_ranks * job.replicas)
    pieces = chain_cuts(
        [[num_microbatches(draft, name) * s for s in layers_s[name]] for name in names], num_blocks
    )
    if len(pieces) == num_blocks:  # no block is shared
        return
    stages = [
        Stage(
            id=replica * len(pieces) + index,
            module=names[piece.module],
            replica=replica,
            layers=piece.layers,
            ranks=grid((replica * num_blocks + piece.block) * layout.stage_ranks, layout),
            joint_replicas=layout.joint_replicas,
        )
        for replica in range(job.replicas)
        for index, piece in enumerate(pieces)
    ]
    yield replace(first, stages=tuple(stages), microbatches=(), programs=(), token_shards=())


def units_of(assignment: MicrobatchAssignment) -> tuple[tuple[int, ...], ...]:
    """Indices that must stay together: a microbatch that defers and the next; all others alone."""
    units: list[tuple[int, ...]] = []
    index = 0
    while index < len(assignment.deferred):
        size = 2 if assignment.deferred[index] else 1
        units.append(tuple(range(index, index + size)))
        index += size
    return tuple(units)


def permuted(assignment: MicrobatchAssignment, order: Sequence[int]) -> MicrobatchAssignment:
    """The same microbatches in another order."""

    def reordered(microbatches: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(microbatches[index] for index in order)

    return MicrobatchAssignment(
        encoder=reordered(assignment.encoder),
        deferred=reordered(assignment.deferred),
        llm=reordered(assignment.llm),
    )


def _ordered(
    assignment: MicrobatchAssignment, times: StageTimes, lead: int, order: Callable[..., UnitOrder]
) -> tuple[MicrobatchAssignment, float]:
    units = units_of(assignment)
    depth = times.num_encoder_stages
    leads = [lead] * depth + [0] * (times.forward_s.shape[1] - depth)
    unit_order = order(times.forward_s, times.backward_s, units, leads)
    indices = [index for unit in unit_order.units for index in units[unit]]
    return permuted(assignment, indices), unit_order.iteration_s


def _times(plan: Plan, cost: CostModel, replica: int, assignment: MicrobatchAssignment) -> StageTimes:
    def positions(microbatches: Sequence[tuple[int, ...]]) -> Mapping[int, int]:
        return {
            plan.batch[index].id: position
            for position, members in enumerate(microbatches)
            for index in members
        }

    times = stage_times(
        plan, cost, replica, produced=positions(assignment.encoder), consumed=positions(assignment.llm)
    )
    return _one_column_per_block(times, plan, replica)


def _one_column_per_block(times: StageTimes, plan: Plan, replica: int) -> StageTimes:
    """Count a block with the encoder's end and the LLM's start as one LLM stage."""
    depth = times.num_encoder_stages
    llm = plan.model.llm.name
    head = plan.chain[llm, replica][0].ranks
    if not any(stage.ranks == head and stage.module != llm for stage in plan.stages):
        return times
    return StageTimes(_merged(times.forward_s, depth), _merged(times.backward_s, depth), depth - 1)


def _merged(table: Seconds, column: int) -> Seconds:
    """Add a column's predecessor to it and drop the predecessor."""
    merged = table.copy()
    merged[:, column] += merged[:, column - 1]
    return np.delete(merged, column - 1, axis=1)


def _rebuilt(
    job: Job, cost: CostModel, cut: Plan, assignments: tuple[MicrobatchAssignment, ...], lead: int
) -> Plan:
    """The same stages with other microbatches and programs."""
    microbatches, followers = entrain.deferring_microbatches(cut, assignments)
    draft = replace(cut, microbatches=microbatches, programs=(), token_shards=())
    adjacent = entrain.with_adjacent_forwards(scheduled(draft, job.schedule, cost), followers)
    return entrain.with_leads(adjacent, followers, lead)


def _estimate_s(lowered: Lowered, cost: CostModel) -> float:
    return critical_path_s(lowered, price(lowered, cost).duration_s)


SPEC = StrategySpec(
    name="entrain-graded",
    planner=plan,
    shortlist=shortlist,
    summary="ours: small microbatches at both ends, Entrain's pairs in between; "
    "a stage may hold both modules",
    batch_level=True,
    regroup=regroup,
    own_space=OwnSpace(
        degrees=Chooser.EACH, where="ours, after Entrain", has_cp=False, schedules=PLAIN_OR_SPLIT, effort=10.0
    ),
)
