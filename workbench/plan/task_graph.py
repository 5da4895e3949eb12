"""The task graph: who waits for whom in a lowered plan, used by deadlock check, sweep and engine.

Which kind of task an action belongs to is in `schedule/action.MEANING`; a gradient reduction is one task per
gradient group on a rank, or one of the rank's own where it has none.

Rows of communication are nodes after the tasks: they also wait for links, which order does not depend on.

There are three sorts of edges. Data: a row follows its producer (a broadcast the row that it passes on) and
precedes its consumer, and a collective precedes what `waits_of` says. Lanes: a rank does its passes one after
another, and beside them its fsdp collectives and its all-reduces, each lane in program order; neither begins
before the passes that precede it in the program. STEP follows everything on its rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from workbench.arrays import Ints
from workbench.plan.parameter_shards import sharded_stages, stages_reduced_once, unit_of
from workbench.plan.plan import Plan, Program
from workbench.schedule.action import MEANING, Action, TaskKind
from workbench.schedule.sharded import waits_of


class Task(NamedTuple):
    """What ranks do together, one task at a time on each lane of a rank.

    Args:
        kind: of the task, which decides its lane.
        action: an fsdp collective is named after its unit's first stage, an all-reduce after the
            action that first covers it.
        ranks: that take part.
        group: gradient group of an all-reduce; None: of an action that has none on its rank.
    """

    kind: TaskKind
    action: Action
    ranks: tuple[int, ...]
    group: int | None = None


class Joined(NamedTuple):
    """A collective of a program or rank, in terms of tasks.

    Args:
        action: the collective, by the program's own name.
        tasks: one after another.
        last_pass: the task before it in the program; None: there is none.
        awaited: tasks on other lanes that it waits for.
    """

    action: Action
    tasks: tuple[int, ...]
    last_pass: int | None
    awaited: tuple[int, ...] = ()


class Reducers(NamedTuple):
    """Ranks of a stage that reduce the same gradient groups.

    Args:
        ranks: of the stage, in no order.
        groups: indices, in issue order.
    """

    ranks: tuple[int, ...]
    groups: tuple[int, ...]


class OrderedRows(Protocol):
    """The columns of communication rows that decide order, as in `lowered.Rows`."""

    @property
    def actions(self) -> Sequence[Action]: ...
    @property
    def producer(self) -> Ints: ...
    @property
    def consumer(self) -> Ints: ...
    @property
    def after(self) -> Ints: ...


class OrderedGroup(Protocol):
    """What decides the order of a gradient group."""

    @property
    def index(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """Tasks are nodes 0..T-1, row r is node T + r.

    Args:
        tasks: [T].
        num_rows: R.
        before, after: [E] the ends of every edge; edges may repeat.
        passes: action -> task.
        steps: rank -> task.
        groups: gradient group -> task; groups that nobody reduces are absent.
        fsdp: [programs] their fsdp collectives, in order.
        reductions: rank -> its gradient reductions, in order.
    """

    tasks: tuple[Task, ...]
    num_rows: int
    before: Ints
    after: Ints
    passes: Mapping[Action, int]
    steps: Mapping[int, int]
    groups: Mapping[int, int]
    fsdp: tuple[tuple[Joined, ...], ...]
    reductions: Mapping[int, tuple[Joined, ...]]

    @property
    def num_tasks(self) -> int:
        return len(self.tasks)

    @property
    def num_nodes(self) -> int:
        return len(self.tasks) + self.num_rows

    @cached_property
    def num_missing(self) -> Ints:
        """[N] number of edges into each node."""
        return num_missing(self.after, self.num_nodes)

    @cached_property
    def adjacency(self) -> tuple[Ints, Ints]:
        """[N + 1], [E]: node n's followers are followers[offsets[n]:offsets[n + 1]]."""
        return adjacency(self.before, self.after, self.num_nodes)


def num_missing(after: Ints, num_nodes: int) -> Ints:
    """[N] number of edges into each node."""
    return np.bincount(after, minlength=num_nodes).astype(np.int64)


def adjacency(before: Ints, after: Ints, num_nodes: int) -> tuple[Ints, Ints]:
    """[N + 1], [E]: node n's followers are followers[offsets[n]:offsets[n + 1]], in edge order."""
    counts = np.bincount(before, minlength=num_nodes)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return offsets, after[np.argsort(before, kind="stable")]


def reducers_of(
    ranks_of: Callable[[Action], Iterable[int]],
    groups: Iterable[OrderedGroup],
    reductions: Mapping[Action, tuple[int, ...]],
) -> dict[Action, tuple[Reducers, ...]]:
    """Map each reduction to the ranks of its stage that have groups in it, by these groups.

    Complexity: O(groups of each stage x its ranks).
    """
    members = {group.index: group.ranks for group in groups}
    sets = {ranks: frozenset(ranks) for ranks in set(members.values())}  # most layers are on the same ranks
    reducers: dict[Action, tuple[Reducers, ...]] = {}
    for action, indices in reductions.items():
        holders = frozenset(ranks_of(action))
        indices_of: dict[tuple[int, ...], list[int]] = {}  # by members
        for index in indices:
            indices_of.setdefault(members[index], []).append(index)
        reducing = {ranks: holders & sets[ranks] for ranks in indices_of}
        if sum(map(len, reducing.values())) == len(frozenset().union(*reducing.values())):
            reducers[action] = tuple(  # each rank is in groups of the same members alone
                [
                    Reducers(tuple(reducing[ranks]), tuple(own))
                    for ranks, own in indices_of.items()
                    if reducing[ranks]
                ]
            )
            continue
        groups_on: dict[int, list[int]] = {}
        for index in indices:
            for rank in reducing[members[index]]:
                groups_on.setdefault(rank, []).append(index)
        ranks_with: dict[tuple[int, ...], list[int]] = {}
        for rank, own_groups in groups_on.items():
            ranks_with.setdefault(tuple(own_groups), []).append(rank)
        reducers[action] = tuple([Reducers(tuple(ranks), own) for own, ranks in ranks_with.items()])
    return reducers


def task_graph(
    plan: Plan,
    rows: OrderedRows,
    groups: Iterable[OrderedGroup],
    reducers: Mapping[Action, Iterable[Reducers]],
) -> TaskGraph:
    """Build the graph of programs in which every action occurs once, STEP last.

    Raises:
        ValueError: a rank that would reduce a gradient group twice.

    Complexity: O(actions x programs + rows + members of groups).
    """
    graph = _Builder(plan, {group.index: group.ranks for group in groups}, reducers)
    num_tasks, num_rows = len(graph.tasks), len(rows.after)
    nodes = num_tasks + np.arange(num_rows)
    passes = np.array([graph.passes[action] for action in rows.actions], dtype=np.int64)
    ready = np.where(rows.after < 0, passes[rows.producer], num_tasks + rows.after)
    return TaskGraph(
        tasks=tuple(graph.tasks),
        num_rows=num_rows,
        before=_edge_ends(graph.before, ready, nodes),
        after=_edge_ends(graph.after, nodes, passes[rows.consumer]),
        passes=graph.passes,
        steps=graph.steps,
        groups=graph.groups,
        fsdp=tuple(graph.fsdp),
        reductions=graph.reductions,
    )


def _edge_ends(between_tasks: Sequence[int], into_rows: Ints, out_of_rows: Ints) -> Ints:
    """Return one end of every edge: of edges between tasks, then of the edges into and out of each row."""
    num_tasks = len(between_tasks)
    ends = np.empty(num_tasks + 2 * len(into_rows), dtype=np.int64)
    ends[:num_tasks] = between_tasks
    ends[num_tasks::2], ends[num_tasks + 1 :: 2] = into_rows, out_of_rows
    return ends


_TASK_OF = {kind: meaning.task for kind, meaning in MEANING.items()}
# Slower: `Task(*parts)`, a call in Python for each of 10^3 to 10^5 passes.
_pass_of = cast(
    Callable[[tuple[TaskKind, Action, tuple[int, ...], None]], Task],
    partial(cast(Any, tuple.__new__), Task),
)


class _Builder:
    def __init__(
        self,
        plan: Plan,
        members: Mapping[int, tuple[int, ...]],
        reducers: Mapping[Action, Iterable[Reducers]],
    ) -> None:
        self.tasks: list[Task] = []
        self.before: list[int] = []
        self.after: list[int] = []
        self.passes: dict[Action, int] = {}
        self.steps: dict[int, int] = {}
        self.groups: dict[int, int] = {}
        self.fsdp: list[tuple[Joined, ...]] = []
        self.reductions: dict[int, tuple[Joined, ...]] = {}
        self._members = members
        self._ranks_of = {stage.id: stage.flat_ranks for stage in plan.stages}
        self._groups_on = {
            (rank, action): groups
            for action, of_stage in reducers.items()
            for ranks, groups in of_stage
            for rank in ranks
        }
        self._units = sharded_stages(plan)
        self._once = stages_reduced_once(plan)
        self._collectives: dict[Action, int] = {}  # by all their names, the common one among them
        for action in plan.program_actions:
            self._add_action(action)
        for program in plan.programs:
            self._add_program(program)

    def _add_action(self, action: Action) -> None:
        kind = _TASK_OF[action.kind]
        if kind is TaskKind.PASS and action.stage is not None:
            self.passes[action] = self._new(_pass_of((kind, action, self._ranks_of[action.stage], None)))
        elif kind is TaskKind.FSDP:
            unit = unit_of(self._units, action)
            name = action._replace(stage=unit.stages[0])
            if name not in self._collectives:
                self._collectives[name] = self._new(Task(kind, name, unit.ranks))
            self._collectives[action] = self._collectives[name]

    def _new(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _follow(self, task: int, *earlier: int | None) -> None:
        for before in earlier:
            if before is not None:
                self.before.append(before)
                self.after.append(task)

    def _add_program(self, program: Program) -> None:
        """Add a program's edges: passes and fsdp collectives once, all-reduces and STEP for each rank."""
        waits = waits_of(program.actions, self._once) if self._units else {}
        last_pass: int | None = None
        collectives: list[Joined] = []
        reductions: list[Joined] = []  # their tasks are set rank by rank
        has_step = False
        for action in program.actions:
            awaited = tuple([self._collectives[wait] for wait in waits.get(action, ())]) if waits else ()
            task = self.passes.get(action)
            if task is not None:
                if last_pass is not None:
                    self.before.append(last_pass)
                    self.after.append(task)
                if awaited:
                    self._follow(task, *awaited)
                last_pass = task
                continue
            kind = _TASK_OF[action.kind]
            if kind is TaskKind.FSDP:
                task = self._collectives[action]
                self._follow(task, last_pass, collectives[-1].tasks[0] if collectives else None)
                collectives.append(Joined(action, (task,), last_pass))
            elif kind is TaskKind.ALL_REDUCE:
                reductions.append(Joined(action, (), last_pass, awaited))
            else:
                has_step = True
        self.fsdp.append(tuple(collectives))
        ends = [joined.tasks[0] for joined in collectives]
        for rank in program.ranks:
            self._add_reductions(rank, reductions)
            if has_step:
                self.steps[rank] = self._new(Task(TaskKind.STEP, program.actions[-1], (rank,)))
                reduced = [joined.tasks[-1] for joined in self.reductions[rank]]
                self._follow(self.steps[rank], *ends, *reduced, last_pass)

    def _add_reductions(self, rank: int, reductions: Iterable[Joined]) -> None:
        """Add a rank's all-reduces one after another, each after the passes that precede it."""
        lane: list[Joined] = []
        holder: dict[int, Action] = {}
        last: int | None = None
        for joined in reductions:
            tasks = tuple(self._all_reduces(rank, joined.action))
            for task, previous in zip(tasks, (last, *tasks), strict=False):
                group = self.tasks[task].group
                if group is not None and holder.setdefault(group, joined.action) != joined.action:
                    raise ValueError(
                        f"rank {rank}: gradient group {group} must be reduced once, "
                        f"it stands in {holder[group]} and {joined.action}"
                    )
                self._follow(task, previous, *joined.awaited)
            self._follow(tasks[0], joined.last_pass)
            lane.append(joined._replace(tasks=tasks))
            last = tasks[-1]
        self.reductions[rank] = tuple(lane)

    def _all_reduces(self, rank: int, action: Action) -> Iterable[int]:
        for group in self._groups_on.get((rank, action), (None,)):
            if group is None:
                yield self._new(Task(TaskKind.ALL_REDUCE, action, (rank,)))
            else:
                if group not in self.groups:
                    self.groups[group] = self._new(
                        Task(TaskKind.ALL_REDUCE, action, self._members[group], group)
                    )
                yield self.groups[group]
