"""From a choice of schedule to the programs of all groups of stages."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.schedule.graph_aware import Consumer, ScheduleNode, graph_aware_1f1b
from workbench.schedule.interleaved import interleaved_1f1b
from workbench.schedule.list_schedule import Chain, Policy, list_schedule
from workbench.schedule.parts import Group, Part, Programs, independent_parts
from workbench.schedule.pass_graph import PassGraph, finish_time, one_unit, pass_graph, peak_in_flight
from workbench.schedule.zero_bubble import zb_h1_interleaved, zb_h2, zb_v

_POLICIES = tuple(
    Policy(deep_first=deep_first, patience=patience)
    for deep_first in (True, False)
    for patience in (0.0, 0.5, 1.0)
)


def programs_of(
    nodes: Sequence[ScheduleNode],
    groups: Sequence[Group],
    schedule: Schedule,
    chains: Sequence[tuple[int, ...]] = (),
    duration: Callable[[Action], float] = one_unit,
) -> Programs:
    """The passes of every group of stages in issue order, by the kind of the schedule.

    `1f1b` and `gpipe` are graph-aware 1F1B and its forwards-first form. The others concern the
    chains that nobody outside reads, so the LLM: `interleaved` gives those that are laid out for it
    Megatron's order, and everything in front runs a forward just before it is needed. The `zb-`
    kinds take the fastest of several schedules by these durations, all within the limit of
    activations in flight: the published order of such a chain, and list schedules of all passes
    that differ in their tie-breaking. So they are never slower than the published order.

    Whatever the kind, all programs are restrictions of one total order in which every pass comes
    after its inputs, so none of them can deadlock.

    Args:
        nodes: the stages; any order.
        groups: stages that share the same ranks, in forward order. Each stage stands in one.
        schedule: the choice.
        chains: stages of each replica of a module in layer order; a stage in none is its own.
        duration: time of a pass in any one unit. Only orders come out of it.

    Raises:
        ValueError: as `graph_aware_1f1b`; chains that are not laid out for the kind; a memory limit
            that no schedule found keeps, with the least that one needs.
    """
    if schedule.kind is ScheduleKind.THREE_PHASE:
        raise ValueError("schedule three-phase wants to know which stages are inner ones; see three_phase")
    plain = graph_aware_1f1b(nodes, groups)
    if schedule.kind is ScheduleKind.ONE_F_ONE_B:
        return plain
    if schedule.kind is ScheduleKind.GPIPE:
        return _forwards_first(plain)
    backward = Pass.I if schedule.kind.splits_backward else Pass.B
    found: Programs = {}
    known: dict[tuple[object, ...], Programs] = {}  # replicas mostly are alike
    is_laid_out = schedule.virtual_stages == 1
    for part in independent_parts(nodes, groups, chains):
        graph = pass_graph(part.nodes, part.groups, _within(part, duration), backward=backward)
        key = (part.nodes, part.groups, part.chains, graph.duration)
        if key not in known:
            is_laid_out |= any(_is_laid_out(graph, chain, schedule) for chain in part.chains)
            held = graph_aware_1f1b(part.nodes, part.groups)
            lines = [_chain(graph, chain, schedule, held) for chain in part.chains]
            known[key] = _best(graph, lines, schedule)
        found |= part.original_programs(known[key])
    if not is_laid_out:
        raise _layout_error(groups, chains, schedule)
    return {group: found[group] for group in map(tuple, groups)}


def _within(part: Part, duration: Callable[[Action], float]) -> Callable[[Action], float]:
    return lambda action: duration(part.original(action))


def _forwards_first(programs: Programs) -> Programs:
    """GPipe on any DAG: each program's forwards, then its backwards, both in the order they had.

    Source: Huang et al. 2019, "GPipe", NeurIPS. Within forwards, and within backwards, the total
    order of graph-aware 1F1B still has every pass after its inputs.
    """
    return {
        group: tuple(sorted(actions, key=lambda action: action.kind is not Pass.F))
        for group, actions in programs.items()
    }


def _best(graph: PassGraph, chains: Sequence[Chain], schedule: Schedule) -> Programs:
    """The candidate that exceeds its limits least, then the fastest, then the first."""
    best: tuple[float, float, Programs] | None = None
    for programs in _candidates(graph, chains, schedule):
        excess = max((_excess(programs, chain) for chain in chains), default=0.0)
        key = excess, finish_time(graph, programs)
        if best is None or key < best[:2]:
            best = (*key, programs)
    assert best is not None
    excess, _, programs = best
    if excess > 0 and schedule.memory_limit is not None:
        raise ValueError(
            f"schedule {schedule.kind}: no order found holds at most {schedule.memory_limit} microbatches; "
            f"the nearest needs memory_limit {math.ceil(schedule.memory_limit + excess)}"
        )
    return programs


def _excess(programs: Programs, chain: Chain) -> float:
    """By how much a chain that nobody reads holds more than its limit."""
    if chain.limit is None or chain.just_in_time:
        return 0.0
    return max(0.0, peak_in_flight(programs, chain.stages) - chain.limit)


def _candidates(graph: PassGraph, chains: Sequence[Chain], schedule: Schedule) -> Iterator[Programs]:
    ordered = [_with_order(graph, chain, schedule) for chain in chains]
    if any(chain.order for chain in ordered):
        yield list_schedule(graph, ordered, Policy())
    if schedule.kind.splits_backward or not any(chain.order for chain in ordered):
        for policy in _POLICIES:
            yield list_schedule(graph, chains, policy)


def _chain(graph: PassGraph, stages: tuple[int, ...], schedule: Schedule, plain: Programs) -> Chain:
    """Limits: the kind's own for chains that nobody reads, what graph-aware 1F1B holds for the others."""
    if not schedule.kind.splits_backward:
        return Chain(stages=stages, just_in_time=True)
    doubled = schedule.kind is ScheduleKind.ZB_H2
    if _is_read(graph, stages):
        held = peak_in_flight(plain, stages)
        limit = (2 * held - 1 if doubled else held) if held else None
        return Chain(stages=stages, limit=limit, just_in_time=True)
    num_ranks = len({graph.group_of[stage] for stage in stages})
    own_limit = 2 * num_ranks - 1 if doubled else num_ranks
    return Chain(stages=stages, limit=schedule.memory_limit or own_limit)


def _is_read(graph: PassGraph, stages: tuple[int, ...]) -> bool:
    """Whether a stage outside the chain reads one of it."""
    return any(c.stage not in stages for stage in stages for c in graph.nodes[stage].consumers)


def _with_order(graph: PassGraph, chain: Chain, schedule: Schedule) -> Chain:
    """The published order, without the passes that the chain does not have, where it applies."""
    stages, num_microbatches = chain.stages, graph.nodes[chain.stages[0]].num_microbatches
    if num_microbatches == 0 or _is_read(graph, stages) or not _is_laid_out(graph, stages, schedule):
        return chain
    num_ranks = len({graph.group_of[stage] for stage in stages})
    if schedule.kind is ScheduleKind.INTERLEAVED:
        programs = interleaved_1f1b(stages, num_ranks, num_microbatches)
    elif schedule.kind is ScheduleKind.ZB_H1:
        programs = zb_h1_interleaved(stages, num_ranks, num_microbatches)
    else:
        published = {ScheduleKind.ZB_H2: zb_h2, ScheduleKind.ZB_V: zb_v}
        programs = published[schedule.kind](stages, num_microbatches)
    order = {
        graph.groups[graph.group_of[stage]]: tuple(filter(graph.exists, program))
        for stage, program in zip(stages, programs, strict=False)
    }
    return replace(chain, order=order)


def _is_laid_out(graph: PassGraph, stages: tuple[int, ...], schedule: Schedule) -> bool:
    """Whether the chain's stages lie on their ranks as the kind wants."""
    places = [graph.group_of[stage] for stage in stages]
    num_ranks = len(set(places))
    first = places[:num_ranks]
    wanted = first + first[::-1] if schedule.kind is ScheduleKind.ZB_V else first * schedule.virtual_stages
    return len(set(first)) == num_ranks and places == wanted and _is_line(graph, stages)


def _is_line(graph: PassGraph, stages: tuple[int, ...]) -> bool:
    """Whether each stage reads, microbatch by microbatch, the one before it and no other of the chain."""
    for place, stage in enumerate(stages):
        node = graph.nodes[stage]
        inside = [consumer for consumer in node.consumers if consumer.stage in stages]
        needs = tuple((own,) for own in range(node.num_microbatches))
        if inside != [Consumer(later, needs) for later in stages[place + 1 : place + 2]]:
            return False
    return True


def _layout_error(
    groups: Sequence[Group], chains: Sequence[tuple[int, ...]], schedule: Schedule
) -> ValueError:
    shape = "down the ranks and up again" if schedule.kind is ScheduleKind.ZB_V else "round the ranks"
    longest = max(chains, key=len, default=())
    num_places = sum(any(stage in group for stage in longest) for group in groups)
    return ValueError(
        f"schedule {schedule.kind}: want a module whose stages go {shape}, {schedule.virtual_stages} on "
        f"each; the longest chain has {len(longest)} stages on {num_places} sets of ranks"
    )
