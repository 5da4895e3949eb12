"""Three-phase schedule of modules that share ranks: encoders forward, LLM pipeline, encoders backward."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from workbench.schedule.action import Action, Pass
from workbench.schedule.graph_aware import (
    Consumer,
    ScheduleNode,
    check_needs,
    graph_aware_1f1b,
    topological_positions,
)
from workbench.schedule.offload import with_offload
from workbench.schedule.one_f_one_b import one_f_one_b
from workbench.schedule.parts import Group, Programs
from workbench.schedule.pass_graph import one_unit, pass_graph, start_times
from workbench.schedule.spec import Problem, ScheduleSpec

Pipeline = Callable[[Sequence[ScheduleNode], Sequence[Group]], Programs]
Duration = Callable[[Action], float]


def three_phase(
    nodes: Sequence[ScheduleNode],
    groups: Sequence[Group],
    inner: Collection[int],
    *,
    window: int | None = None,
    run_ahead: int = 0,
    pipeline: Pipeline = graph_aware_1f1b,
    duration: Duration = one_unit,
) -> Programs:
    """Return programs of modules with different grids on the same ranks, in three phases per window.

    The microbatches of the pipeline are cut into windows. For each window: the outer stages (the
    encoders) run forward over all that the window reads; the inner stages (the LLM) run their own
    pipeline over the window; the outer stages run backward, in reverse. An outer microbatch that
    several windows read runs forward in the first of them and backward in the last.

    With `run_ahead` r, outer forwards come r windows early: where the inner stages on their ranks
    wait longest in the pipeline of an earlier window, so in its bubbles. Their activations are held
    longer by that.

    All programs are restrictions of one total order in which every pass comes after its inputs,
    whatever ranks the stages share: so nothing can deadlock, also where an outer stage spans the ranks
    of several inner ones, or the other way round.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
        section 3.3, Figure 4b and appendix D.
    Differs: several outer microbatches per window, outer stages of several modules, and run-ahead.

    Args:
        nodes: the stages; any order.
        groups: [G] the stages that some ranks hold, producers first. A stage may be in several groups;
            the inner stages of two groups are the same or disjoint.
        inner: stages of the second phase. None of them feeds an outer stage.
        window: microbatches of the first inner stages in a window. None: all.
        run_ahead: windows by which outer forwards come early.
        pipeline: programs of inner stages over one window, whose microbatches count from 0.
        duration: time of a pass in any unit; decides where the inner stages wait longest.

    Returns:
        Per group, its passes in issue order.

    Raises:
        ValueError: a window below 1, a negative run_ahead, needs that name what is not there, inner stages
            that feed outer ones, that share ranks in part, or of which one window reads what another
            does not.

    Complexity: O(A log A) for A passes, plus the size of all needs and the pipeline's own.
    """
    problem = _Windows(nodes, groups, inner, window)
    if run_ahead < 0:
        raise ValueError(f"three-phase: run_ahead must be >= 0 windows, got {run_ahead}")
    programs: dict[Group, list[Action]] = {tuple(group): [] for group in groups}
    for early in range(run_ahead):
        _extend(programs, problem.forwards(early))
    for number in range(problem.num_windows):
        if run_ahead == 0:
            _extend(programs, problem.forwards(number))
        body = _InnerPhase(problem, number, pipeline, duration)
        _extend(programs, body.order(problem.forwards(number + run_ahead) if run_ahead else []))
        _extend(programs, problem.backwards(number))
    return {group: tuple(actions) for group, actions in programs.items()}


def _extend(programs: Mapping[Group, list[Action]], order: Sequence[Action]) -> None:
    """Append to every group its part of a total order. O(actions x groups that hold their stage)."""
    programs_of: dict[int, list[list[Action]]] = {}
    for group, program in programs.items():
        for stage in dict.fromkeys(group):
            programs_of.setdefault(stage, []).append(program)
    for action in order:
        assert action.stage is not None
        for program in programs_of.get(action.stage, ()):
            program.append(action)


class _Windows:
    """The stages, and the window of each of their microbatches."""

    def __init__(
        self,
        nodes: Sequence[ScheduleNode],
        groups: Sequence[Group],
        inner: Collection[int],
        window: int | None,
    ) -> None:
        self.nodes = {node.stage: node for node in nodes}
        self.groups = [tuple(group) for group in groups]
        self.inner = frozenset(inner)
        self._check(window)
        self.inner_groups = list(
            dict.fromkeys(part for group in self.groups if (part := self.inner_part(group)))
        )
        self._check_groups()
        self.position = topological_positions(self.nodes, self.groups)
        self._order = sorted(self.nodes, key=self.position.__getitem__)
        self._forward: dict[int, list[int]] = {}  # stage -> window of each microbatch's forward
        self._backward: dict[int, list[int]] = {}
        self._set_inner_windows(window)
        self.num_windows = 1 + max((max(w, default=0) for w in self._forward.values()), default=0)
        for stage in reversed(self._order):
            if stage not in self.inner:
                self._set_outer_windows(self.nodes[stage])

    def inner_part(self, group: Group) -> Group:
        """Return the inner stages of a group."""
        return tuple(stage for stage in group if stage in self.inner)

    def members(self, stage: int, window: int) -> tuple[int, ...]:
        """Return the microbatches of an inner stage in a window."""
        return tuple(microbatch for microbatch, number in enumerate(self._forward[stage]) if number == window)

    def forwards(self, window: int) -> list[Action]:
        """Return the outer forwards that a window is the first to need, producers first."""
        return [
            Action(stage, Pass.F, microbatch)
            for stage in self._order
            if stage not in self.inner
            for microbatch, number in enumerate(self._forward[stage])
            if number == window
        ]

    def backwards(self, window: int) -> list[Action]:
        """Return the outer backwards that a window is the last to feed, readers first."""
        return [
            Action(stage, Pass.B, microbatch)
            for stage in reversed(self._order)
            if stage not in self.inner
            for microbatch, number in enumerate(self._backward[stage])
            if number == window and self.nodes[stage].backward[microbatch]
        ]

    def _check(self, window: int | None) -> None:
        if window is not None and window < 1:
            raise ValueError(f"three-phase: a window has >= 1 microbatch, got {window}")
        if missing := self.inner - self.nodes.keys():
            raise ValueError(
                f"three-phase: inner stage {min(missing)} is not there, stages are {[*self.nodes]}"
            )
        if lost := self.nodes.keys() - {stage for group in self.groups for stage in group}:
            raise ValueError(f"three-phase: stage {min(lost)} stands in no group")
        check_needs(self.nodes)
        for stage in self.inner:
            for consumer in self.nodes[stage].consumers:
                if consumer.stage not in self.inner:
                    raise ValueError(
                        f"three-phase: inner stage {stage} feeds an outer one, stage {consumer.stage}"
                    )

    def _check_groups(self) -> None:
        owner: dict[int, Group] = {}
        for group in self.inner_groups:
            for stage in group:
                if owner.setdefault(stage, group) != group:
                    raise ValueError(
                        f"three-phase: inner stages {owner[stage]} and {group} share ranks in part; want the "
                        "same ranks or none"
                    )

    def _set_inner_windows(self, window: int | None) -> None:
        """Assign windows by index to stages that read no inner stage, else the window of what is read."""
        read: dict[int, list[int]] = {}  # stage -> latest window that each microbatch reads from
        for stage in (stage for stage in self._order if stage in self.inner):
            node = self.nodes[stage]
            latest = read.get(stage)
            own_windows = [
                (microbatch // window if window else 0)
                if latest is None or latest[microbatch] < 0
                else latest[microbatch]
                for microbatch in range(node.num_microbatches)
            ]
            self._forward[stage] = own_windows
            for consumer in node.consumers:
                target = read.setdefault(consumer.stage, [-1] * len(consumer.needs))
                for reader, needs in enumerate(consumer.needs):
                    for microbatch in needs:
                        target[reader] = max(target[reader], own_windows[microbatch])
        self._check_inner_reads()

    def _check_inner_reads(self) -> None:
        for stage in self.inner:
            for consumer in self.nodes[stage].consumers:
                for reader, needs in enumerate(consumer.needs):
                    for microbatch in needs:
                        window = self._forward[stage][microbatch]
                        reader_window = self._forward[consumer.stage][reader]
                        if window != reader_window:
                            raise ValueError(
                                f"three-phase: microbatch {microbatch} of stage {stage} is in window "
                                f"{window}, but microbatch {reader} of stage {consumer.stage}, which reads "
                                f"it, in window {reader_window}; want a window of all microbatches"
                            )

    def _set_outer_windows(self, node: ScheduleNode) -> None:
        count = node.num_microbatches
        first: list[int | None] = [None] * count
        last: list[int | None] = [None] * count
        for consumer in node.consumers:
            for reader, needs in enumerate(consumer.needs):
                early = self._forward[consumer.stage][reader]
                late = self._backward.get(consumer.stage, self._forward[consumer.stage])[reader]
                for microbatch in needs:
                    first[microbatch] = min(early, early if (f := first[microbatch]) is None else f)
                    last[microbatch] = max(late, late if (b := last[microbatch]) is None else b)
        unread = [microbatch * self.num_windows // count for microbatch in range(count)]
        self._forward[node.stage] = [u if f is None else f for f, u in zip(first, unread, strict=True)]
        self._backward[node.stage] = [u if b is None else b for b, u in zip(last, unread, strict=True)]


class _Placed(NamedTuple):
    """A pass with its position in a total order."""

    start: float
    order_index: int
    action: Action


class _InnerPhase:
    """The second phase of one window: the pipeline of the inner stages."""

    def __init__(self, problem: _Windows, window: int, pipeline: Pipeline, duration: Duration) -> None:
        self._problem = problem
        self._members = {stage: problem.members(stage, window) for stage in problem.inner}
        nodes = [self._restricted(problem.nodes[stage]) for stage in problem.nodes if stage in problem.inner]
        programs = pipeline(nodes, problem.inner_groups)
        has_split = any(action.kind is Pass.I for program in programs.values() for action in program)
        graph = pass_graph(
            nodes,
            problem.inner_groups,
            lambda action: duration(self._original(action)),
            backward=Pass.I if has_split else Pass.B,
        )
        starts = start_times(graph, programs)
        self._placed = [
            _Placed(start, index, graph.actions[number])
            for index, (number, start) in enumerate(starts.items())
        ]
        self._ends = {
            graph.actions[number]: start + graph.duration[number] for number, start in starts.items()
        }
        self._group_of = {stage: group for group in problem.inner_groups for stage in group}

    def order(self, early: Sequence[Action]) -> list[Action]:
        """Return the window's inner passes by start, with outer forwards placed in their longest wait."""
        keyed = [
            ((start, 1, order_index), self._original(action)) for start, order_index, action in self._placed
        ]
        waits = self._longest_waits() if early else {}
        start_of: dict[int, float] = {}
        for index, action in enumerate(early):
            assert action.stage is not None
            start = self._wait_of(action.stage, waits, start_of)
            start_of[action.stage] = start
            keyed.append(((start, 0, index), action))
        return [action for _, action in sorted(keyed, key=itemgetter(0))]

    def _wait_of(self, stage: int, waits: Mapping[Group, float], start_of: Mapping[int, float]) -> float:
        """Return the latest wait of the inner stages on the stage's ranks, never before what it reads."""
        problem = self._problem
        shared = [part for group in problem.groups if stage in group and (part := problem.inner_part(group))]
        producers = [
            start
            for source, start in start_of.items()
            if any(c.stage == stage for c in problem.nodes[source].consumers)
        ]
        return max((*(waits[part] for part in shared), *producers), default=0.0)

    def _longest_waits(self) -> dict[Group, float]:
        """Return every group's longest wait. O(passes log passes), as a stage is in one inner group."""
        placed_of: dict[Group, list[_Placed]] = {group: [] for group in self._problem.inner_groups}
        for placed in self._placed:
            placed_of[self._group_of[placed.action.stage or 0]].append(placed)
        return {group: self._longest_wait(own_passes) for group, own_passes in placed_of.items()}

    def _longest_wait(self, passes: list[_Placed]) -> float:
        """Return the start of the pass before which a group waits longest; of equal waits the first."""
        if not passes:
            return 0.0
        passes.sort(key=lambda placed: (placed.start, placed.order_index))
        waits = [(passes[0].start, passes[0].start)]
        waits += [
            (after.start - self._ends[before.action], after.start) for before, after in pairwise(passes)
        ]
        return max(waits, key=lambda wait: (wait[0], -wait[1]))[1]

    def _restricted(self, node: ScheduleNode) -> ScheduleNode:
        """Return the stage with the microbatches of this window alone."""
        members = self._members[node.stage]
        index_of = {microbatch: index for index, microbatch in enumerate(members)}
        consumers = tuple(
            Consumer(
                consumer.stage,
                tuple(
                    tuple(index_of[microbatch] for microbatch in consumer.needs[reader])
                    for reader in self._members[consumer.stage]
                ),
            )
            for consumer in node.consumers
        )
        weights = None if node.weights is None else tuple(node.weights[microbatch] for microbatch in members)
        return replace(
            node,
            num_microbatches=len(members),
            backward=tuple(node.backward[microbatch] for microbatch in members),
            consumers=consumers,
            weights=weights,
        )

    def _original(self, action: Action) -> Action:
        """Return the pass with its microbatch in the whole problem."""
        stage, kind, microbatch = action
        assert stage is not None
        assert microbatch is not None
        return Action(stage, kind, self._members[stage][microbatch])


def _on_dag(problem: Problem) -> Programs:
    """Return three phases; with `offload` the outer stages are on the host while the inner ones run."""
    if not problem.inner:
        raise ValueError("schedule three-phase wants to know which stages are inner ones")
    programs = three_phase(
        problem.nodes,
        problem.groups,
        problem.inner,
        window=problem.window,
        run_ahead=problem.run_ahead,
        duration=problem.duration,
    )
    if not problem.offload:
        return programs
    outer = {node.stage for node in problem.nodes}.difference(problem.inner)
    return {group: with_offload(actions, outer) for group, actions in programs.items()}


SPEC = ScheduleSpec(
    name="three-phase",
    summary="modules on shared ranks with different grids: encoder forwards, LLM 1F1B, encoder backwards",
    chain=lambda stages, _, num_microbatches: one_f_one_b(stages, num_microbatches),
    dag=_on_dag,
    parameters=("window", "run_ahead", "offload"),
    shares_ranks_in_part=True,
)
