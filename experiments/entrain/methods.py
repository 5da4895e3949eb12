"""Every method of Figure 4.12 on one replica: its microbatches, their order, and the step's seconds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from experiments.entrain.bubble_filling import filled_s
from experiments.entrain.replica import (
    Deferring,
    Durations,
    Laid,
    Pipeline,
    Replica,
    ReplicaChain,
    Taken,
    nodes_of,
)
from experiments.entrain.stage_work import Judge, Seconds, StageWork, Which, shared_cuts
from workbench.balance.microbatches.assignment import MicrobatchAssignment, hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import even_match
from workbench.balance.microbatches.graded import graded_assignment
from workbench.balance.microbatches.pipeline_time import iteration_s
from workbench.balance.microbatches.reorder import reorder_by_exchanges, reorder_microbatches
from workbench.balance.microbatches.replicas import assign_to_replicas, heaviest_first
from workbench.balance.microbatches.unit_order import UnitOrder, order_units, unimproved_order
from workbench.balance.tokens.policies import longest_first, longest_first_equal_counts
from workbench.plan.plan import Recompute
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind, rank_block, usual
from workbench.schedule.pass_graph import one_unit, pass_graph
from workbench.schedule.programs import programs_of
from workbench.schedule.three_phase import three_phase
from workbench.strategies.entrain_graded import BUILT, IMPROVED, SHARES, permuted, units_of

Method = Callable[[Replica], Taken]
Order = tuple[int, ...]
PARTS = (1, 2, 4)  # sub-microbatches of DIP
LEADS = (0, 1, 2, 4)  # microbatches that encoder forwards run ahead in ours


def in_turn(replica: Replica) -> Taken:
    """1F1B with samples in the order of drawing."""
    return _one_f_one_b(replica, replica.chunks(range(len(replica.samples))))


def disttrain_interleaved(replica: Replica) -> Taken:
    """DistTrain's microbatches and order with two LLM stages on each rank."""
    microbatches = _ordered_microbatches(replica, reorder_microbatches)
    schedule = usual(ScheduleKind.INTERLEAVED)
    depth, num_llm = replica.stages
    num_virtual = num_llm * schedule.virtual_stages
    chain = ReplicaChain(microbatches, {}, microbatches)
    pipeline = replica.pipeline(depth, num_virtual)
    durations = Durations(chain, pipeline.encoder, pipeline.llm)
    layout = _interleaved(depth, num_virtual, len(microbatches), schedule)
    return Taken(layout.played_s(durations), *_forwards(replica, microbatches, microbatches))


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


def _numbered(num_microbatches: int) -> ReplicaChain:
    singletons = tuple((index,) for index in range(num_microbatches))
    return ReplicaChain(singletons, {}, singletons)


def _graded(replica: Replica, schedule: Schedule) -> Taken:
    planned_pipelines = _pipelines(replace(replica, judge=Judge.EXACT))
    candidates = [
        (pipeline, grading, lead)
        for pipeline in planned_pipelines
        for grading in _gradings(replica)
        for lead in LEADS
    ]
    candidates.sort(key=lambda candidate: _unit_ordered(*candidate, order=unimproved_order)[1])
    improved = [
        (candidate, *_unit_ordered(*candidate, order=order_units)) for candidate in candidates[:IMPROVED]
    ]
    improved.sort(key=lambda result: result[2])
    built = [
        (_within_memory_s(Deferring(pipeline, ordered, schedule), lead), pipeline, ordered, lead)
        for (pipeline, _, lead), ordered, _ in improved[:BUILT]
    ]
    _, pipeline, ordered, lead = min(built, key=lambda result: result[0])
    evaluated = _pipelines(replica)[[candidate is pipeline for candidate in planned_pipelines].index(True)]
    seconds = _within_memory_s(Deferring(evaluated, ordered, schedule), lead)
    return Taken(seconds, *_forwards(replica, ordered.encoder, ordered.llm))


def _within_memory_s(deferring: Deferring, lead: int) -> float:
    return deferring.seconds(min(lead, deferring.most_ahead()))


def _gradings(replica: Replica) -> Iterator[MicrobatchAssignment]:
    work_s, count = _sample_seconds(replica), replica.num_microbatches
    for share in SHARES:
        yield graded_assignment(*work_s, num_microbatches=count, num_small=round(share * count))


def _pipelines(replica: Replica) -> tuple[Pipeline, ...]:
    """The pipeline with separate ranks, and the one with a shared block where the chain's cut has one."""
    cuts = shared_cuts(replica.llm, replica.samples, replica.num_microbatches, sum(replica.stages))
    if sum(map(len, cuts)) == sum(replica.stages):
        return (replica.apart,)
    return replica.apart, replica.pipeline(*cuts, is_shared=True)


class DipChoice(NamedTuple):
    """DIP's choice of sub-microbatches in the encoder, and of the encoder's recomputation."""

    parts: int
    recompute: Recompute


def dip(replica: Replica) -> Taken:
    """All modules on all ranks: encoder forwards in sub-microbatches, LLM, encoder backwards.

    In as few windows of equal size as memory allows. Sub-microbatches and recomputation are the fastest on
    the step seen before.
    """
    choice = dip_choice(replica)
    chunks = replica.chunks(range(len(replica.samples)))
    return Taken(_dip_s(replica, choice)[0], *_forwards(replica, chunks, chunks))


def dip_choice(replica: Replica) -> DipChoice:
    """The fastest choice on the samples seen before, by the balancer's costs."""
    return _choice_on(replace(replica, samples=replica.seen or replica.samples, judge=Judge.EXACT, seen=()))


@cache
def _choice_on(seen: Replica) -> DipChoice:
    whole = Recompute.NONE, Recompute.FULL
    recomputes = [each for each in whole if seen.recompute in (Recompute.NONE, each)]
    choices = [DipChoice(parts, recompute) for recompute in recomputes for parts in PARTS]
    seconds = [_dip_s(seen, choice)[0] for choice in choices]
    return choices[seconds.index(min(seconds))]


def _dip_s(replica: Replica, choice: DipChoice) -> tuple[float, int]:
    """Seconds and number of windows; infinite seconds where not even one microbatch fits."""
    blocks = sum(replica.stages)
    with_recompute = replace(replica, recompute=choice.recompute)
    pipeline = with_recompute.pipeline(blocks, blocks)
    chunks = with_recompute.chunks(range(len(with_recompute.samples)))
    work_s = with_recompute.encoder_work(blocks).forward_s.sum(axis=1)
    cut = [_even(chunk, work_s, choice.parts) for chunk in chunks]
    chain = ReplicaChain(tuple(part for of_chunk in cut for part in of_chunk), {}, chunks)
    memory = pipeline.memory(chain)
    for num_windows in range(1, len(chunks) + 1):
        layout = _three_phases(tuple(map(len, cut)), blocks, -(-len(chunks) // num_windows))
        if memory.fits(tuple(layout.programs.values())):
            return layout.played_s(Durations(chain, pipeline.encoder, pipeline.llm)), num_windows
    return float("inf"), len(chunks)


def dip_windows(replica: Replica) -> int:
    """The number of windows of DIP's step."""
    return _dip_s(replica, dip_choice(replica))[1]


def _even(chunk: Order, work_s: Seconds, parts: int) -> list[Order]:
    owners = longest_first([float(work_s[index]) for index in chunk], min(parts, len(chunk)))
    groups = (
        tuple(p for p, owner in zip(chunk, owners, strict=True) if owner == part) for part in range(parts)
    )
    return [group for group in groups if group]


@cache
def _three_phases(parts: tuple[int, ...], num_blocks: int, window: int) -> Laid:
    """DIP's programs for given sub-microbatches of each microbatch; they do not depend on durations."""
    numbers = iter(range(sum(parts)))
    cut = [tuple(next(numbers) for _ in range(count)) for count in parts]
    chain = ReplicaChain(tuple((index,) for of_chunk in cut for index in of_chunk), {}, tuple(cut))
    nodes = nodes_of(chain, num_blocks, num_blocks)
    groups = [(stage, stage + num_blocks) for stage in range(num_blocks)]
    programs = three_phase(nodes, groups, range(num_blocks, 2 * num_blocks), window=window)
    return Laid(pass_graph(nodes, groups, one_unit, backward=Pass.B), programs)


def bubble_filling(replica: Replica) -> Taken:
    """Optimus: the LLM on all ranks, with encoder work in its bubbles."""
    chunks = replica.chunks(range(len(replica.samples)))
    pipeline = replica.pipeline(1, sum(replica.stages))
    encoder, llm = pipeline.encoder, pipeline.llm
    seconds = filled_s(
        (llm.microbatches_s(Which.FORWARD, chunks), llm.microbatches_s(Which.BACKWARD, chunks)),
        (
            encoder.microbatches_s(Which.FORWARD, chunks)[:, 0],
            encoder.microbatches_s(Which.BACKWARD, chunks)[:, 0],
        ),
    )
    return Taken(seconds, *_forwards(replica, chunks, chunks))


def replicas_of(method: str, batch: Replica, num_replicas: int) -> tuple[Replica, ...]:
    """A global batch divided by a method: in order, by encoder work, or by both modules' work."""
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
        replace(batch, samples=tuple(batch.samples[index] for index in member_indices))
        for member_indices in members
    )


def assigned(replica: Replica) -> MicrobatchAssignment:
    """Algorithm 4 inside a replica."""
    (assignment,) = hierarchical_assignment(
        *_sample_seconds(replica),
        num_replicas=1,
        num_microbatches=replica.num_microbatches,
        match=even_match,
    )
    return assignment


def _sample_seconds(replica: Replica) -> tuple[list[float], list[float]]:
    """Seconds of forward and backward of every sample, in the encoder and in the LLM."""
    return replica.encoder_work(1).samples_s(), replica.llm_work(1).samples_s()


def _deferring(replica: Replica, schedule: Schedule, *, eager: bool = True) -> Taken:
    assignment = assigned(replica)
    deferring = Deferring(replica.apart, assignment, schedule)
    seconds = deferring.seconds(deferring.most_ahead() if eager else 0)
    return Taken(seconds, *_forwards(replica, assignment.encoder, assignment.llm))


def _unit_ordered(
    pipeline: Pipeline, assignment: MicrobatchAssignment, lead: int, *, order: Callable[..., UnitOrder]
) -> tuple[MicrobatchAssignment, float]:
    """The assignment in pipeline order, and the recurrence's seconds; shared ranks count as one stage."""
    encoder, llm = pipeline.encoder, pipeline.llm
    backward_s = encoder.microbatches_s(Which.BACKWARD, assignment.encoder)
    deferred_s = np.array(
        [encoder.backward_s[list(sample_indices)].sum(axis=0) for sample_indices in assignment.deferred]
    )
    backward_s += np.roll(deferred_s, 1, axis=0) - deferred_s  # deferred work runs one microbatch later
    by_stage = (
        np.hstack(
            [
                encoder.microbatches_s(Which.FORWARD, assignment.encoder),
                llm.microbatches_s(Which.FORWARD, assignment.llm),
            ]
        ),
        np.hstack([backward_s, llm.microbatches_s(Which.BACKWARD, assignment.llm)]),
    )
    forward, backward = (
        np.stack([stage_s[:, list(group)].sum(axis=1) for group in pipeline.groups], axis=1)
        for stage_s in by_stage
    )
    depth = encoder.forward_s.shape[1] - pipeline.is_shared
    leads = [lead] * depth + [0] * (forward.shape[1] - depth)
    units = units_of(assignment)
    unit_order = order(forward, backward, units, leads)
    sample_indices = [index for unit in unit_order.units for index in units[unit]]
    return permuted(assignment, sample_indices), unit_order.iteration_s


def _one_f_one_b(replica: Replica, microbatches: tuple[Order, ...]) -> Taken:
    pipeline = replica.apart
    forward, backward = _times((pipeline.encoder, pipeline.llm), microbatches)
    seconds = iteration_s(forward, backward, np.arange(len(microbatches)))
    return Taken(seconds, *_forwards(replica, microbatches, microbatches))


def _reordered(replica: Replica, reorder: Callable[..., Order]) -> Taken:
    return _one_f_one_b(replica, _ordered_microbatches(replica, reorder))


def _ordered_microbatches(replica: Replica, reorder: Callable[..., Order]) -> tuple[Order, ...]:
    encoder_s, _ = _sample_seconds(replica)
    chunks = replica.chunks(heaviest_first(range(len(encoder_s)), encoder_s))
    works = (replica.encoder_work(), replica.llm_work())
    return tuple(chunks[index] for index in reorder(*_times(works, chunks)))


def _times(works: tuple[StageWork, StageWork], microbatches: tuple[Order, ...]) -> tuple[Seconds, Seconds]:
    """[microbatches, stages] seconds of both passes along the chain."""
    forward = np.hstack([work.microbatches_s(Which.FORWARD, microbatches) for work in works])
    backward = np.hstack([work.microbatches_s(Which.BACKWARD, microbatches) for work in works])
    return forward, backward


def _forwards(
    replica: Replica, encoder: tuple[Order, ...], llm: tuple[Order, ...]
) -> tuple[Seconds, Seconds]:
    """Seconds of every microbatch's forward over all stages of a module."""
    whole = replica.pipeline(1, 1)
    return (
        whole.encoder.microbatches_s(Which.FORWARD, encoder)[:, 0],
        whole.llm.microbatches_s(Which.FORWARD, llm)[:, 0],
    )


_PLAIN, _SPLIT = Schedule(), usual(ScheduleKind.ZB_H1)
METHODS: Mapping[str, Method] = {
    "1f1b": in_turn,
    # Largest encoder work first into microbatches (DistTrain's Algorithm 1), those in the order of its
    # Algorithm 2, or in one found by exchanges under the whole pipeline.
    "disttrain": partial(_reordered, reorder=reorder_microbatches),
    "disttrain-vpp": disttrain_interleaved,
    "exchanges": partial(_reordered, reorder=reorder_by_exchanges),
    "dip": dip,
    "optimus": bubble_filling,
    # Algorithm 4, encoder forwards as early as memory allows (section 4.5.3).
    "entrain": partial(_deferring, schedule=_PLAIN),
    "entrain-in-turn": partial(_deferring, schedule=_PLAIN, eager=False),
    "entrain-zb": partial(_deferring, schedule=_SPLIT),
    # The fastest by the recurrence of both cuts, all gradings and leads.
    "entrain-graded": partial(_graded, schedule=_PLAIN),
    "entrain-graded-zb": partial(_graded, schedule=_SPLIT),
}
