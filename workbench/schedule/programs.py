"""Turns a choice of schedule into the programs of all groups of stages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, rank_block
from workbench.schedule.graph_aware import Consumer, ScheduleNode, check_dag, graph_aware_1f1b
from workbench.schedule.list_schedule import ListSchedule, ListScheduler, PassChain, Policy
from workbench.schedule.own_order import checked_chain, checked_dag
from workbench.schedule.parts import Group, Part, Programs, independent_parts
from workbench.schedule.pass_graph import PassGraph, one_unit, pass_graph, peak_in_flight
from workbench.schedule.spec import Problem, ScheduleSpec

_Order = dict[Group, tuple[Action, ...]]  # a chain's
_Orders = dict[tuple[int, ...], _Order]  # by the chain's stages

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
    *,
    inner: Sequence[int] = (),
    frozen_sources: Sequence[int] = (),
) -> Programs:
    """Return the passes of every group of stages in issue order, by the kind of the schedule.

    Some kinds order any DAG. The others order the chains that nobody outside reads, such as the LLM, where
    these are laid out as the kind requires; everything upstream runs a forward just before it is needed. A
    kind with a limit of activations in flight takes the fastest, by these durations, of several schedules
    within it: the kind's own order of such a chain, and list schedules of all passes that differ in their
    tie-breaking. So it is never slower than its own order.

    Whatever the kind, all programs are restrictions of one total order in which every pass comes
    after its inputs, so none of them can deadlock.

    Args:
        nodes: the stages; any order.
        groups: stages that share the same ranks, in forward order. Each stage is in one, except for kinds
            whose stages may share ranks in part.
        schedule: the choice.
        chains: stages of each replica of a module in layer order; a stage in none is its own.
        duration: time of a pass in any unit; only decides orders.
        inner, frozen_sources: see `Problem`.

    Raises:
        ValueError: as `graph_aware_1f1b`; chains that are not laid out for the kind; a memory limit
            that no schedule keeps, with the least that one needs.
    """
    return Prepared(nodes, groups, schedule, chains, inner=inner, frozen_sources=frozen_sources).programs(
        duration
    )


class Prepared:
    """The part of `programs_of` that does not depend on durations; arguments, results and errors as there."""

    def __init__(
        self,
        nodes: Sequence[ScheduleNode],
        groups: Sequence[Group],
        schedule: Schedule,
        chains: Sequence[tuple[int, ...]] = (),
        *,
        inner: Sequence[int] = (),
        frozen_sources: Sequence[int] = (),
    ) -> None:
        self._problem = Problem(
            nodes=nodes,
            groups=groups,
            inner=inner,
            frozen_sources=frozen_sources,
            duration=one_unit,
            window=schedule.window,
            run_ahead=schedule.run_ahead,
            offload=schedule.offload,
        )
        self._schedule, self._chains = schedule, chains
        self._parts: list[tuple[Part, _Candidates]] = []
        if schedule.spec.dag is not None:
            return
        check_dag(nodes, groups)
        candidates_of: dict[tuple[object, ...], _Candidates] = {}  # most replicas are alike
        for part in independent_parts(nodes, groups, chains):
            shape = part.nodes, part.groups, part.chains
            if shape not in candidates_of:
                candidates_of[shape] = _Candidates(part, schedule)
            self._parts.append((part, candidates_of[shape]))

    @cached_property
    def usual(self) -> Programs:
        """Programs by unit durations."""
        return self.programs(one_unit)

    @property
    def num_passes(self) -> int:
        """Number of passes in its tables and in one set of programs."""
        tables = {id(candidates): len(candidates.actions) for _, candidates in self._parts}
        return sum(tables.values()) + sum(3 * node.num_microbatches for node in self._problem.nodes)

    def programs(self, duration: Callable[[Action], float]) -> Programs:
        """Return the programs by these durations."""
        schedule, groups = self._schedule, self._problem.groups
        if schedule.spec.dag is not None:
            made = schedule.spec.dag(replace(self._problem, duration=duration))
            return checked_dag(schedule.spec, made, groups) if schedule.own_name else made
        by_group: Programs = {}
        best_of: dict[tuple[int, tuple[float, ...]], Programs] = {}
        for part, candidates in self._parts:
            durations = tuple([float(duration(action)) for action in part.original(candidates.actions)])
            key = id(candidates), durations
            if key not in best_of:
                best_of[key] = candidates.best(durations)
            by_group |= part.original_programs(best_of[key])
        is_laid_out = any(candidates.is_laid_out for _, candidates in self._parts)
        if schedule.virtual_stages > 1 and not is_laid_out:
            raise _layout_error(groups, self._chains, schedule)
        return {group: by_group[group] for group in map(tuple, groups)}


class _Candidates:
    """Candidate orders of one part, among which durations choose."""

    def __init__(self, part: Part, schedule: Schedule) -> None:
        spec = schedule.spec
        laid_out = [chain for chain in part.chains if _is_laid_out(part, chain, schedule)]
        orders = {chain: _order(part, chain, schedule) for chain in laid_out if _is_last(part, chain)}
        graph = _graph(part, orders, spec)
        self.is_laid_out, self.actions = bool(laid_out), graph.actions
        self._schedule, self._chains = schedule, _chains(graph, part, schedule)
        self._schedulers: list[tuple[ListScheduler, Sequence[Policy]]] = []
        if orders:  # with the kind's own order; also without it where there is a choice
            ordered_chains = [_in_order(graph, chain, orders.get(chain.stages, {})) for chain in self._chains]
            self._schedulers.append((ListScheduler(graph, ordered_chains), [Policy()]))
        if spec.most_in_flight is not None or not orders:
            self._schedulers.append((ListScheduler(graph, self._chains), _POLICIES))

    def best(self, duration: Sequence[float]) -> Programs:
        """Return the candidate that exceeds its limits least; then the fastest; then the first."""
        schedule = self._schedule
        try:
            schedules = [
                s for scheduler, policies in self._schedulers for s in scheduler.schedules(policies, duration)
            ]
        except ValueError as error:
            raise ValueError(f"schedule {schedule.kind}: {error}") from None
        excess, _, index = min((self._excess(s), s.finish, index) for index, s in enumerate(schedules))
        if excess > 0 and schedule.memory_limit is not None:
            raise ValueError(
                f"schedule {schedule.kind}: no order found holds at most {schedule.memory_limit} "
                f"microbatches; the nearest needs memory_limit {math.ceil(schedule.memory_limit + excess)}"
            )
        return schedules[index].programs

    def _excess(self, schedule: ListSchedule) -> float:
        """Return by how much a chain that nobody reads exceeds its limit."""
        return max(
            (
                peak - chain.limit
                for chain, peak in zip(self._chains, schedule.peaks, strict=True)
                if chain.limit is not None and not chain.just_in_time and peak > chain.limit
            ),
            default=0.0,
        )


def _is_laid_out(part: Part, stages: tuple[int, ...], schedule: Schedule) -> bool:
    """Whether the chain's stages are on their ranks as the kind requires."""
    group_indices = [part.group_of[stage] for stage in stages]
    num_ranks = len(set(group_indices))
    first = group_indices[:num_ranks]
    if len(group_indices) != num_ranks * schedule.virtual_stages or len(set(first)) < num_ranks:
        return False
    required = [first[rank_block(schedule, index, len(group_indices))] for index in range(len(group_indices))]
    return group_indices == required and _is_line(part, stages)


def _is_line(part: Part, stages: tuple[int, ...]) -> bool:
    """Whether each stage reads exactly the one before it in the chain, microbatch by microbatch."""
    for index, stage in enumerate(stages):
        node = part.nodes[stage]
        in_chain = [consumer for consumer in node.consumers if consumer.stage in stages]
        needs = tuple((microbatch,) for microbatch in range(node.num_microbatches))
        if in_chain != [Consumer(later, needs) for later in stages[index + 1 : index + 2]]:
            return False
    return True


def _is_last(part: Part, stages: tuple[int, ...]) -> bool:
    """Whether the chain has work, and no stage outside reads it."""
    return part.nodes[stages[0]].num_microbatches > 0 and not _is_read(part, stages)


def _is_read(part: Part, stages: tuple[int, ...]) -> bool:
    return any(c.stage not in stages for stage in stages for c in part.nodes[stage].consumers)


def _order(part: Part, stages: tuple[int, ...], schedule: Schedule) -> _Order:
    """Return the kind's own order; it may name passes that the chain does not have."""
    groups = [part.groups[part.group_of[stage]] for stage in stages]
    num_microbatches = part.nodes[stages[0]].num_microbatches
    programs = schedule.spec.chain(stages, len(set(groups)), num_microbatches)
    if schedule.own_name:
        by_ranks = [
            [stage for stage, other in zip(stages, groups, strict=True) if other == group]
            for group in dict.fromkeys(groups)
        ]
        programs = checked_chain(schedule.spec, programs, by_ranks, num_microbatches)
    return dict(zip(groups, programs, strict=False))


def _graph(part: Part, orders: _Orders, spec: ScheduleSpec) -> PassGraph:
    """Return all passes of the part; a backward that is whole in an order stays whole."""
    if not spec.splits_backward:
        return pass_graph(part.nodes, part.groups, one_unit, backward=Pass.B)
    passes = (action for order in orders.values() for program in order.values() for action in program)
    whole = {action for action in passes if action.kind is Pass.B}
    return pass_graph(part.nodes, part.groups, one_unit, backward=Pass.I, whole=whole)


def _chains(graph: PassGraph, part: Part, schedule: Schedule) -> list[PassChain]:
    """Return the chains with their limits: the kind's own if nobody reads it, else by what 1F1B holds."""
    most_in_flight = schedule.spec.most_in_flight
    if most_in_flight is None:
        return [PassChain(stages=stages, just_in_time=True) for stages in part.chains]
    by_1f1b = graph_aware_1f1b(part.nodes, part.groups)
    chains = []
    for stages in part.chains:
        if _is_read(part, stages):
            in_flight = peak_in_flight(by_1f1b, stages)
            limit = most_in_flight(in_flight) if in_flight else None
        else:
            num_ranks = len({graph.group_of[stage] for stage in stages})
            limit = schedule.memory_limit or most_in_flight(num_ranks)
        chains.append(PassChain(stages=stages, limit=limit, just_in_time=_is_read(part, stages)))
    return chains


def _in_order(graph: PassGraph, chain: PassChain, order: _Order) -> PassChain:
    """Return the chain with an order, without the passes that the chain does not have."""
    existing = {group: tuple(filter(graph.number.__contains__, program)) for group, program in order.items()}
    return replace(chain, order=existing)


def _layout_error(
    groups: Sequence[Group], chains: Sequence[tuple[int, ...]], schedule: Schedule
) -> ValueError:
    longest = max(chains, key=len, default=())
    num_places = sum(any(stage in group for stage in longest) for group in groups)
    return ValueError(
        f"schedule {schedule.kind}: want a module whose stages go {schedule.spec.layout}, "
        f"{schedule.virtual_stages} on each; the longest chain has {len(longest)} stages on {num_places} "
        "sets of ranks"
    )
