"""Entrain with microbatches of graded size in an order for the pipeline, on evenly loaded ranks.

Source: Entrain (dissertation, sections 4.4.2, 4.5.2 and 4.5.3), which gives modules whole ranks, makes
all microbatches even, and does not fix the order of the pairs.
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
from workbench.plan.plan import Plan, Stage
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

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of microbatches that are small
IMPROVED = 6  # candidates whose order is improved, best by the recurrence first
BUILT = 3  # of those, candidates that become plans


def shortlist(job: Job, cost: CostModel, progress: Progress, most: int) -> tuple[Plan, ...]:
    """Of two ways to cut, five gradings and several leads: the fastest that fits in memory.

    Cuts: Entrain's, and where the job leaves stage counts open and one encoder feeds the LLM on ranks
    of one shape, cuts of the whole chain whose boundary block holds layers of both, see `chain_cuts`.
    Gradings: none to all of the microbatches small, see `graded_assignment`. Leads: encoder
    forwards 0, 1, 2, 4, ... microbatches ahead. A recurrence of the pipeline ranks them all; the best
    get an order by `order_units`, the best of those become plans, and the planner's estimate, which
    knows the real programs and messages, picks among these and Entrain's own. So it is never slower
    by that estimate.

    Raises:
        ValueError: as `entrain.plan`.

    Complexity: that of `entrain.plan`, 10 pricings and O(log K) orders for K microbatches a replica.
    """
    first = entrain.plan(job, cost, progress)
    return _fastest(job, cost, first, [first, *_shared(job, cost, first)], most)


plan = First(shortlist)


def regroup(plan: Plan, job: Job, cost: CostModel) -> Plan:
    """The fastest grading, order and lead for the job's batch on the plan's stages."""
    first = entrain.regroup(plan, job, cost)
    return _fastest(job, cost, first, [first], 1)[0]


def _fastest(job: Job, cost: CostModel, first: Plan, cuts: Sequence[Plan], most: int) -> tuple[Plan, ...]:
    """Of the first plan and those cuts with other microbatches, the best by the estimate first."""
    gradings = list(_gradings(job, cost))
    candidates = [found for each in cuts for held in gradings for found in _candidates(job, cost, each, held)]
    candidates.sort(key=lambda candidate: candidate.ordered(unimproved_order)[1])
    ordered = [(each, *each.ordered(order_units)) for each in candidates[:IMPROVED]]
    ordered.sort(key=lambda found: found[2])
    plans = (_rebuilt(job, cost, each.cut, held, each.lead) for each, held, _ in ordered)
    drafts = [lower(each) for each in (first, *islice(filter(fits, plans), BUILT))]
    seconds = [_estimate_s(lowered, cost) for lowered in drafts]
    by_estimate = sorted(range(len(drafts)), key=seconds.__getitem__)
    return tuple(replace(drafts[number].plan, strategy="entrain-graded") for number in by_estimate[:most])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Stages, microbatches of every replica and what each takes, and how far forwards run ahead."""

    cut: Plan
    assignments: tuple[MicrobatchAssignment, ...]
    times: tuple[StageTimes, ...]
    lead: int

    def ordered(self, order: Callable[..., UnitOrder]) -> tuple[tuple[MicrobatchAssignment, ...], float]:
        """Every replica in an order of its own, and seconds of the slowest."""
        found = [
            _ordered(assignment, times, self.lead, order)
            for assignment, times in zip(self.assignments, self.times, strict=True)
        ]
        return tuple(assignment for assignment, _ in found), max(seconds for _, seconds in found)


def _candidates(
    job: Job, cost: CostModel, cut: Plan, assignments: tuple[MicrobatchAssignment, ...]
) -> Iterator[_Candidate]:
    """One for each lead, from 0 on."""
    drawn = _rebuilt(job, cost, cut, assignments, 0)
    times = tuple(_times(drawn, cost, replica, each) for replica, each in enumerate(assignments))
    for lead in _leads(max(len(each.encoder) for each in assignments)):
        yield _Candidate(cut=cut, assignments=assignments, times=times, lead=lead)


def _leads(num_places: int) -> Iterator[int]:
    yield 0
    yield from takewhile(num_places.__gt__, entrain.powers_of_two())


def _gradings(job: Job, cost: CostModel) -> Iterator[tuple[MicrobatchAssignment, ...]]:
    """By share of small microbatches: the samples of every replica, which are Entrain's."""
    work = sample_work(job, cost)
    replicas = [sorted(sample for held in each.llm for sample in held) for each in entrain.assign(job, cost)]
    for share in SHARES:
        yield tuple(_graded(members, work, job.microbatch_samples, share) for members in replicas)


def _graded(
    members: Sequence[int], work: Sequence[Sequence[float]], size: int, share: float
) -> MicrobatchAssignment:
    count = max(1, len(members) // size)
    encoder_s, llm_s = ([of[sample] for sample in members] for of in work)
    local = graded_assignment(encoder_s, llm_s, num_microbatches=count, num_small=round(share * count))

    def named(held: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(members[index] for index in places) for places in held)

    return MicrobatchAssignment(
        encoder=named(local.encoder), deferred=named(local.deferred), llm=named(local.llm)
    )


def _shared(job: Job, cost: CostModel, first: Plan) -> Iterator[Plan]:
    """The same ranks with the whole chain cut evenly; nothing where the modules are no such chain."""
    layouts = [layout_of(job, module.name) for module in job.model.modules]
    shapes = {(layout.tp, layout.cp) for layout in layouts}
    is_open = all(layout.pp is None and not layout.stage_layers for layout in layouts)
    if len(layouts) != 2 or len(shapes) > 1 or not is_open or job.schedule.virtual_stages > 1:
        return
    draft = draft_plan(job, "entrain-graded")
    layers_s = believed_layers_s(job, draft, cost, FROZEN_AWARE.layer_s)
    names = [module.name for module in sorted(job.model.modules, key=lambda m: m.modality == TEXT)]
    layout = layouts[0]
    num_blocks = len(first.ranks) // (layout.tp * layout.cp * job.replicas)
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
            ranks=grid((replica * num_blocks + piece.block) * layout.tp * layout.cp, layout),
        )
        for replica in range(job.replicas)
        for index, piece in enumerate(pieces)
    ]
    yield replace(first, stages=tuple(stages), microbatches=(), programs=(), token_shards=())


def units_of(assignment: MicrobatchAssignment) -> tuple[tuple[int, ...], ...]:
    """Places that must stay together: one that defers and the next; all others stand alone."""
    found: list[tuple[int, ...]] = []
    index = 0
    while index < len(assignment.deferred):
        size = 2 if assignment.deferred[index] else 1
        found.append(tuple(range(index, index + size)))
        index += size
    return tuple(found)


def permuted(assignment: MicrobatchAssignment, places: Sequence[int]) -> MicrobatchAssignment:
    """The same microbatches in another order."""

    def taken(held: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(held[index] for index in places)

    return MicrobatchAssignment(
        encoder=taken(assignment.encoder), deferred=taken(assignment.deferred), llm=taken(assignment.llm)
    )


def _ordered(
    assignment: MicrobatchAssignment, times: StageTimes, lead: int, order: Callable[..., UnitOrder]
) -> tuple[MicrobatchAssignment, float]:
    units = units_of(assignment)
    depth = times.num_encoder_stages
    leads = [lead] * depth + [0] * (times.forward_s.shape[1] - depth)
    found = order(times.forward_s, times.backward_s, units, leads)
    places = [index for unit in found.units for index in units[unit]]
    return permuted(assignment, places), found.iteration_s


def _times(plan: Plan, cost: CostModel, replica: int, assignment: MicrobatchAssignment) -> StageTimes:
    def places(microbatches: Sequence[tuple[int, ...]]) -> Mapping[int, int]:
        return {
            plan.batch[index].id: position for position, held in enumerate(microbatches) for index in held
        }

    times = stage_times(
        plan, cost, replica, produced=places(assignment.encoder), consumed=places(assignment.llm)
    )
    return _one_column_a_block(times, plan, replica)


def _one_column_a_block(times: StageTimes, plan: Plan, replica: int) -> StageTimes:
    """A block that holds the end of the encoder and the beginning of the LLM counts as one LLM stage."""
    depth = times.num_encoder_stages
    llm = plan.model.llm.name
    head = plan.chain[llm, replica][0].ranks
    if not any(stage.ranks == head and stage.module != llm for stage in plan.stages):
        return times
    return StageTimes(_merged(times.forward_s, depth), _merged(times.backward_s, depth), depth - 1)


def _merged(table: Seconds, column: int) -> Seconds:
    """Without the column before, whose times are added to it."""
    found = table.copy()
    found[:, column] += found[:, column - 1]
    return np.delete(found, column - 1, axis=1)


def _rebuilt(
    job: Job, cost: CostModel, cut: Plan, assignments: tuple[MicrobatchAssignment, ...], lead: int
) -> Plan:
    """The same stages with other microbatches in other programs."""
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
