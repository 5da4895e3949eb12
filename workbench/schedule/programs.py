"""From a choice of schedule to the programs of all groups of stages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, rank_block
from workbench.schedule.graph_aware import Consumer, ScheduleNode, check_dag, graph_aware_1f1b
from workbench.schedule.list_schedule import ListSchedule, ListScheduler, PassChain, Policy
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
    """The passes of every group of stages in issue order, by the kind of the schedule.

    Some kinds say it of any DAG. The others concern the chains that nobody outside reads, so the LLM, where
    they are laid out as the kind wants: those get the kind's own order, and everything in front runs a
    forward just before it is needed. A kind with a limit of activations in flight takes the fastest of
    several schedules by these durations, all within it: the kind's own order of such a chain, and list
    schedules of all passes that differ in their tie-breaking. So it is never slower than its own order.

    Whatever the kind, all programs are restrictions of one total order in which every pass comes
    after its inputs, so none of them can deadlock.

    Args:
        nodes: the stages; any order.
        groups: stages that share the same ranks, in forward order. Each stage stands in one, but for kinds
            whose stages may share ranks in part.
        schedule: the choice.
        chains: stages of each replica of a module in layer order; a stage in none is its own.
        duration: time of a pass in any one unit. Only orders come out of it.
        inner, frozen_sources: see `Problem`.

    Raises:
        ValueError: as `graph_aware_1f1b`; chains that are not laid out for the kind; a memory limit
            that no schedule found keeps, with the least that one needs.
    """
    return Prepared(nodes, groups, schedule, chains, inner=inner, frozen_sources=frozen_sources).programs(
        duration
    )


class Prepared:
    """All of `programs_of` that no duration decides; arguments, results and errors as there."""

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
        if schedule.kind.spec.dag is not None:
            return
        check_dag(nodes, groups)
        known: dict[tuple[object, ...], _Candidates] = {}  # replicas mostly are alike
        for part in independent_parts(nodes, groups, chains):
            shape = part.nodes, part.groups, part.chains
            if shape not in known:
                known[shape] = _Candidates(part, schedule)
            self._parts.append((part, known[shape]))

    @cached_property
    def usual(self) -> Programs:
        """By durations of one unit."""
        return self.programs(one_unit)

    @property
    def num_passes(self) -> int:
        """Of which it holds tables, and of one set of programs."""
        tables = {id(candidates): len(candidates.actions) for _, candidates in self._parts}
        return sum(tables.values()) + sum(3 * node.num_microbatches for node in self._problem.nodes)

    def programs(self, duration: Callable[[Action], float]) -> Programs:
        """By these durations."""
        schedule, groups = self._schedule, self._problem.groups
        if schedule.kind.spec.dag is not None:
            return schedule.kind.spec.dag(replace(self._problem, duration=duration))
        found: Programs = {}
        known: dict[tuple[int, tuple[float, ...]], Programs] = {}
        for part, candidates in self._parts:
            taken = tuple(float(duration(part.original(action))) for action in candidates.actions)
            key = id(candidates), taken
            if key not in known:
                known[key] = candidates.best(taken)
            found |= part.original_programs(known[key])
        is_laid_out = any(candidates.is_laid_out for _, candidates in self._parts)
        if schedule.virtual_stages > 1 and not is_laid_out:
            raise _layout_error(groups, self._chains, schedule)
        return {group: found[group] for group in map(tuple, groups)}


class _Candidates:
    """Orders of one part among which durations choose."""

    def __init__(self, part: Part, schedule: Schedule) -> None:
        spec = schedule.kind.spec
        laid_out = [chain for chain in part.chains if _is_laid_out(part, chain, schedule)]
        orders = {chain: _order(part, chain, spec) for chain in laid_out if _is_last(part, chain)}
        graph = _graph(part, orders, spec)
        self.is_laid_out, self.actions = bool(laid_out), graph.actions
        self._schedule, self._lines = schedule, _lines(graph, part, schedule)
        self._tried: list[tuple[ListScheduler, Sequence[Policy]]] = []
        if orders:  # with the kind's own order where a chain has one; also without it where there is a choice
            own = [_in_order(graph, line, orders.get(line.stages, {})) for line in self._lines]
            self._tried.append((ListScheduler(graph, own), [Policy()]))
        if spec.most_in_flight is not None or not orders:
            self._tried.append((ListScheduler(graph, self._lines), _POLICIES))

    def best(self, duration: Sequence[float]) -> Programs:
        """The candidate that exceeds its limits least, then the fastest, then the first."""
        found = [each for tried, policies in self._tried for each in tried.schedules(policies, duration)]
        excess, _, place = min((self._excess(each), each.finish, place) for place, each in enumerate(found))
        schedule = self._schedule
        if excess > 0 and schedule.memory_limit is not None:
            raise ValueError(
                f"schedule {schedule.kind}: no order found holds at most {schedule.memory_limit} "
                f"microbatches; the nearest needs memory_limit {math.ceil(schedule.memory_limit + excess)}"
            )
        return found[place].programs

    def _excess(self, found: ListSchedule) -> float:
        """By how much a chain that nobody reads holds more than its limit."""
        return max(
            (
                peak - line.limit
                for line, peak in zip(self._lines, found.peaks, strict=True)
                if line.limit is not None and not line.just_in_time and peak > line.limit
            ),
            default=0.0,
        )


def _is_laid_out(part: Part, stages: tuple[int, ...], schedule: Schedule) -> bool:
    """Whether the chain's stages lie on their ranks as the kind wants."""
    places = [part.group_of[stage] for stage in stages]
    num_ranks = len(set(places))
    first = places[:num_ranks]
    if len(places) != num_ranks * schedule.virtual_stages or len(set(first)) < num_ranks:
        return False
    wanted = [first[rank_block(schedule, index, len(places))] for index in range(len(places))]
    return places == wanted and _is_line(part, stages)


def _is_line(part: Part, stages: tuple[int, ...]) -> bool:
    """Whether each stage reads, microbatch by microbatch, the one before it and no other of the chain."""
    for index, stage in enumerate(stages):
        node = part.nodes[stage]
        inside = [consumer for consumer in node.consumers if consumer.stage in stages]
        needs = tuple((own,) for own in range(node.num_microbatches))
        if inside != [Consumer(later, needs) for later in stages[index + 1 : index + 2]]:
            return False
    return True


def _is_last(part: Part, stages: tuple[int, ...]) -> bool:
    """Whether the chain has work, and no stage outside it reads one of it."""
    return part.nodes[stages[0]].num_microbatches > 0 and not _is_read(part, stages)


def _is_read(part: Part, stages: tuple[int, ...]) -> bool:
    return any(c.stage not in stages for stage in stages for c in part.nodes[stage].consumers)


def _order(part: Part, stages: tuple[int, ...], spec: ScheduleSpec) -> _Order:
    """The kind's own order; it may name passes that the chain does not have."""
    homes = [part.groups[part.group_of[stage]] for stage in stages]
    programs = spec.chain(stages, len(set(homes)), part.nodes[stages[0]].num_microbatches)
    return dict(zip(homes, programs, strict=False))


def _graph(part: Part, orders: _Orders, spec: ScheduleSpec) -> PassGraph:
    """All passes of the part; backwards that stand whole in an order stay so where others are split."""
    if not spec.splits_backward:
        return pass_graph(part.nodes, part.groups, one_unit, backward=Pass.B)
    passes = (action for order in orders.values() for program in order.values() for action in program)
    whole = {action for action in passes if action.kind is Pass.B}
    return pass_graph(part.nodes, part.groups, one_unit, backward=Pass.I, whole=whole)


def _lines(graph: PassGraph, part: Part, schedule: Schedule) -> list[PassChain]:
    """Limits: the kind's own for chains that nobody reads, by what 1F1B holds for the others."""
    most_in_flight = schedule.kind.spec.most_in_flight
    if most_in_flight is None:
        return [PassChain(stages=stages, just_in_time=True) for stages in part.chains]
    plain = graph_aware_1f1b(part.nodes, part.groups)
    lines = []
    for stages in part.chains:
        if _is_read(part, stages):
            held = peak_in_flight(plain, stages)
            limit = most_in_flight(held) if held else None
        else:
            num_ranks = len({graph.group_of[stage] for stage in stages})
            limit = schedule.memory_limit or most_in_flight(num_ranks)
        lines.append(PassChain(stages=stages, limit=limit, just_in_time=_is_read(part, stages)))
    return lines


def _in_order(graph: PassGraph, chain: PassChain, order: _Order) -> PassChain:
    """Without the passes that the chain does not have."""
    existing = {group: tuple(filter(graph.number.__contains__, program)) for group, program in order.items()}
    return replace(chain, order=existing)


def _layout_error(
    groups: Sequence[Group], chains: Sequence[tuple[int, ...]], schedule: Schedule
) -> ValueError:
    longest = max(chains, key=len, default=())
    num_places = sum(any(stage in group for stage in longest) for group in groups)
    return ValueError(
        f"schedule {schedule.kind}: want a module whose stages go {schedule.kind.spec.layout}, "
        f"{schedule.virtual_stages} on each; the longest chain has {len(longest)} stages on {num_places} "
        "sets of ranks"
    )
