"""Every method of Figure 4.12 on one replica: what goes together, in which order, and how long it takes."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import numpy as np

from experiments.entrain.bubble_filling import filled_s
from experiments.entrain.replica import (
    Chain,
    Durations,
    Laid,
    Pipeline,
    Replica,
    Taken,
    deferring_s,
    nodes_of,
)
from experiments.entrain.stage_work import Seconds, Which, shared_cuts
from workbench.balance.microbatches.assignment import MicrobatchAssignment, hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import even_match
from workbench.balance.microbatches.graded import graded_assignment
from workbench.balance.microbatches.pipeline_time import iteration_s
from workbench.balance.microbatches.reorder import reorder_by_exchanges, reorder_microbatches
from workbench.balance.microbatches.replicas import assign_to_replicas, heaviest_first
from workbench.balance.microbatches.unit_order import UnitOrder, order_units, unimproved_order
from workbench.balance.tokens.policies import longest_first, longest_first_equal_counts
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block, usual
from workbench.schedule.pass_graph import one_unit, pass_graph
from workbench.schedule.programs import programs_of
from workbench.schedule.three_phase import three_phase
from workbench.strategies.entrain_graded import BUILT, IMPROVED, SHARES, permuted, units_of

Method = Callable[[Replica], Taken]
Order = tuple[int, ...]
PARTS = (1, 2, 4)  # sub-microbatches of DIP
LEADS = (0, 1, 2, 4)  # microbatches that encoder forwards run ahead


def in_turn(replica: Replica) -> Taken:
    """1F1B with samples as they were drawn."""
    return _one_f_one_b(replica, replica.chunks(range(len(replica.samples))))


def disttrain(replica: Replica) -> Taken:
    """Largest encoder work first into microbatches (Algorithm 1), those by Algorithm 2."""
    return _reordered(replica, reorder_microbatches)


def exchanged(replica: Replica) -> Taken:
    """The same microbatches in an order found by exchanges under the whole pipeline."""
    return _reordered(replica, reorder_by_exchanges)


def disttrain_interleaved(replica: Replica) -> Taken:
    """DistTrain's microbatches and order with two LLM stages on each rank."""
    microbatches = _ordered_microbatches(replica, reorder_microbatches)
    schedule = usual(ScheduleKind.INTERLEAVED)
    depth, num_llm = replica.stages
    num_virtual = num_llm * schedule.virtual_stages
    chain = Chain(microbatches, {}, microbatches)
    durations = Durations(chain, replica.encoder_work(), replica.llm_work(num_virtual))
    laid = _interleaved(depth, num_virtual, len(microbatches), schedule)
    return Taken(laid.played_s(durations), *_forwards(replica, microbatches, microbatches))


@cache
def _interleaved(depth: int, num_virtual: int, num_microbatches: int, schedule: Schedule) -> Laid:
    nodes = nodes_of(_numbered(num_microbatches), depth, num_virtual)
    lines = (tuple(range(depth)), tuple(range(depth, depth + num_virtual)))
    blocks: dict[int, list[int]] = {}
    for position in range(num_virtual):
        blocks.setdefault(rank_block(schedule, position, num_virtual), []).append(depth + position)
    groups: list[Order] = [*((stage,) for stage in range(depth)), *map(tuple, blocks.values())]
    programs = programs_of(nodes, groups, schedule, lines)
    return Laid(pass_graph(nodes, groups, one_unit, backward=Pass.B), programs)


def _numbered(num_microbatches: int) -> Chain:
    each = tuple((index,) for index in range(num_microbatches))
    return Chain(each, {}, each)


def entrain(replica: Replica) -> Taken:
    """Algorithm 4 under 1F1B."""
    return _deferring(replica, Schedule())


def entrain_zero_bubble(replica: Replica) -> Taken:
    """Algorithm 4 under ZB-H1."""
    return _deferring(replica, usual(ScheduleKind.ZB_H1))


def entrain_graded(replica: Replica) -> Taken:
    """The fastest by the recurrence of both cuts, all gradings and leads, under 1F1B."""
    return _graded(replica, Schedule())


def entrain_graded_zero_bubble(replica: Replica) -> Taken:
    """The same under ZB-H1."""
    return _graded(replica, usual(ScheduleKind.ZB_H1))


def _graded(replica: Replica, schedule: Schedule) -> Taken:
    candidates = [
        (pipeline, held, lead)
        for pipeline in _pipelines(replica)
        for held in _gradings(replica)
        for lead in LEADS
    ]
    candidates.sort(key=lambda each: _unit_ordered(*each, order=unimproved_order)[1])
    improved = [(each, *_unit_ordered(*each, order=order_units)) for each in candidates[:IMPROVED]]
    improved.sort(key=lambda found: found[2])
    played = [
        (deferring_s(pipeline, ordered, schedule, lead), ordered)
        for (pipeline, _, lead), ordered, _ in improved[:BUILT]
    ]
    seconds, ordered = min(played, key=lambda found: found[0])
    return Taken(seconds, *_forwards(replica, ordered.encoder, ordered.llm))


def _gradings(replica: Replica) -> Iterator[MicrobatchAssignment]:
    work_s, count = _sample_seconds(replica), replica.num_microbatches
    for share in SHARES:
        yield graded_assignment(*work_s, num_microbatches=count, num_small=round(share * count))


def _pipelines(replica: Replica) -> tuple[Pipeline, ...]:
    """Whole ranks for either module, and the chain cut as a whole where that shares ranks."""
    own = Pipeline(replica.encoder_work(), replica.llm_work())
    cuts = shared_cuts(replica.llm, replica.samples, replica.num_microbatches, sum(replica.stages))
    if sum(map(len, cuts)) == sum(replica.stages):
        return (own,)
    return own, Pipeline(replica.encoder_work(cuts[0]), replica.llm_work(cuts[1]), is_shared=True)


def dip(replica: Replica) -> Taken:
    """All modules on all ranks: encoder forwards in sub-microbatches, LLM, encoder backwards."""
    chunks = replica.chunks(range(len(replica.samples)))
    blocks = sum(replica.stages)
    encoder, llm = replica.encoder_work(blocks), replica.llm_work(blocks)
    work_s = encoder.forward_s.sum(axis=1)
    found = []
    for parts in PARTS:
        cut = [_even(chunk, work_s, parts) for chunk in chunks]
        chain = Chain(tuple(part for of_chunk in cut for part in of_chunk), {}, chunks)
        laid = _three_phases(tuple(map(len, cut)), blocks)
        found.append(laid.played_s(Durations(chain, encoder, llm)))
    return Taken(min(found), *_forwards(replica, chunks, chunks))


def _even(chunk: Order, work_s: Seconds, parts: int) -> list[Order]:
    owners = longest_first([float(work_s[place]) for place in chunk], min(parts, len(chunk)))
    groups = (
        tuple(p for p, owner in zip(chunk, owners, strict=True) if owner == part) for part in range(parts)
    )
    return [group for group in groups if group]


@cache
def _three_phases(parts: tuple[int, ...], num_blocks: int) -> Laid:
    """The programs of so many sub-microbatches of each microbatch; durations do not matter to them."""
    places = iter(range(sum(parts)))
    cut = [tuple(next(places) for _ in range(count)) for count in parts]
    chain = Chain(tuple((place,) for of_chunk in cut for place in of_chunk), {}, tuple(cut))
    nodes = nodes_of(chain, num_blocks, num_blocks)
    groups = [(stage, stage + num_blocks) for stage in range(num_blocks)]
    programs = three_phase(nodes, groups, range(num_blocks, 2 * num_blocks))
    return Laid(pass_graph(nodes, groups, one_unit, backward=Pass.B), programs)


def bubble_filling(replica: Replica) -> Taken:
    """Optimus: the LLM on all ranks, encoder work in its bubbles."""
    chunks = replica.chunks(range(len(replica.samples)))
    encoder, llm = replica.encoder_work(1), replica.llm_work(sum(replica.stages))
    seconds = filled_s(
        (llm.microbatches_s(Which.FORWARD, chunks), llm.microbatches_s(Which.BACKWARD, chunks)),
        (
            encoder.microbatches_s(Which.FORWARD, chunks)[:, 0],
            encoder.microbatches_s(Which.BACKWARD, chunks)[:, 0],
        ),
    )
    return Taken(seconds, *_forwards(replica, chunks, chunks))


METHODS: Mapping[str, Method] = {
    "1f1b": in_turn,
    "disttrain": disttrain,
    "disttrain-vpp": disttrain_interleaved,
    "exchanges": exchanged,
    "dip": dip,
    "optimus": bubble_filling,
    "entrain": entrain,
    "entrain-zb": entrain_zero_bubble,
    "entrain-graded": entrain_graded,
    "entrain-graded-zb": entrain_graded_zero_bubble,
}


def replicas_of(method: str, batch: Replica, num_replicas: int) -> tuple[Replica, ...]:
    """A global batch shared out as each method does it: in turn, by encoder work, or by both works."""
    encoder_s, llm_s = _sample_seconds(batch)
    if method.startswith("entrain"):
        members = assign_to_replicas(encoder_s, llm_s, num_replicas)
    elif method.startswith("disttrain") or method == "exchanges":
        owners = longest_first_equal_counts(encoder_s, num_replicas)
        members = tuple(tuple(map(int, np.flatnonzero(owners == number))) for number in range(num_replicas))
    else:
        share = len(batch.samples) // num_replicas
        members = tuple(tuple(range(number * share, (number + 1) * share)) for number in range(num_replicas))
    return tuple(
        Replica(llm=batch.llm, samples=tuple(batch.samples[place] for place in held), stages=batch.stages)
        for held in members
    )


def assigned(replica: Replica) -> MicrobatchAssignment:
    """Algorithm 4 inside a replica."""
    (found,) = hierarchical_assignment(
        *_sample_seconds(replica),
        num_replicas=1,
        num_microbatches=replica.num_microbatches,
        match=even_match,
    )
    return found


def _sample_seconds(replica: Replica) -> tuple[list[float], list[float]]:
    """Forward and backward of every sample in either module."""
    return replica.encoder_work(1).samples_s(), replica.llm_work(1).samples_s()


def _deferring(replica: Replica, schedule: Schedule) -> Taken:
    assignment = assigned(replica)
    seconds = deferring_s(Pipeline(replica.encoder_work(), replica.llm_work()), assignment, schedule)
    return Taken(seconds, *_forwards(replica, assignment.encoder, assignment.llm))


def _unit_ordered(
    pipeline: Pipeline, assignment: MicrobatchAssignment, lead: int, *, order: Callable[..., UnitOrder]
) -> tuple[MicrobatchAssignment, float]:
    """An order for the pipeline and the recurrence's seconds; shared ranks count as one stage."""
    encoder, llm = pipeline.encoder, pipeline.llm
    own = encoder.microbatches_s(Which.BACKWARD, assignment.encoder)
    late = np.array([encoder.backward_s[list(places)].sum(axis=0) for places in assignment.deferred])
    own += np.roll(late, 1, axis=0) - late  # it is done one place later
    by_stage = (
        np.hstack(
            [
                encoder.microbatches_s(Which.FORWARD, assignment.encoder),
                llm.microbatches_s(Which.FORWARD, assignment.llm),
            ]
        ),
        np.hstack([own, llm.microbatches_s(Which.BACKWARD, assignment.llm)]),
    )
    forward, backward = (
        np.stack([of[:, list(group)].sum(axis=1) for group in pipeline.groups], axis=1) for of in by_stage
    )
    depth = encoder.forward_s.shape[1] - pipeline.is_shared
    leads = [lead] * depth + [0] * (forward.shape[1] - depth)
    units = units_of(assignment)
    found = order(forward, backward, units, leads)
    places = [place for unit in found.units for place in units[unit]]
    return permuted(assignment, places), found.iteration_s


def _one_f_one_b(replica: Replica, microbatches: tuple[Order, ...]) -> Taken:
    forward, backward = _times(replica, microbatches)
    seconds = iteration_s(forward, backward, np.arange(len(microbatches)))
    return Taken(seconds, *_forwards(replica, microbatches, microbatches))


def _reordered(replica: Replica, reorder: Callable[..., Order]) -> Taken:
    return _one_f_one_b(replica, _ordered_microbatches(replica, reorder))


def _ordered_microbatches(replica: Replica, reorder: Callable[..., Order]) -> tuple[Order, ...]:
    encoder_s, _ = _sample_seconds(replica)
    chunks = replica.chunks(heaviest_first(range(len(encoder_s)), encoder_s))
    return tuple(chunks[index] for index in reorder(*_times(replica, chunks)))


def _times(replica: Replica, microbatches: tuple[Order, ...]) -> tuple[Seconds, Seconds]:
    """[microbatches, stages] seconds of both passes along the chain."""
    works = (replica.encoder_work(), replica.llm_work())
    forward = np.hstack([work.microbatches_s(Which.FORWARD, microbatches) for work in works])
    backward = np.hstack([work.microbatches_s(Which.BACKWARD, microbatches) for work in works])
    return forward, backward


def _forwards(
    replica: Replica, encoder: tuple[Order, ...], llm: tuple[Order, ...]
) -> tuple[Seconds, Seconds]:
    """Seconds of every microbatch's forward over all stages of a module."""
    return (
        replica.encoder_work(1).microbatches_s(Which.FORWARD, encoder)[:, 0],
        replica.llm_work(1).microbatches_s(Which.FORWARD, llm)[:, 0],
    )
