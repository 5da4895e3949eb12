"""Executes the task graph of a step: each task starts when all its predecessors have ended."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import nan

import numpy as np
from simpy.core import Environment

from sim.clock import after
from sim.cores import SharedCores
from sim.step.wire import Network, wires
from workbench.cost.hardware import Node
from workbench.elastic.layerwise import LastBackward
from workbench.plan.lowered import Lowered
from workbench.plan.task_graph import TaskGraph
from workbench.schedule.action import Action, TaskKind


class Lanes:
    """All lanes of all ranks. The order within a lane is in the graph's edges, so all are treated alike.

    Args:
        env: the clock.
        lowered: its tasks, and the rows between them.
        duration_s: [T] seconds of every task.
        overlapped: gradient reduction -> the backward in which its groups complete one by one; each
            all-reduce then waits for its group only, not for the passes in front of the reduction.
    """

    def __init__(
        self,
        env: Environment,
        lowered: Lowered,
        duration_s: list[float],
        overlapped: Mapping[Action, LastBackward],
    ) -> None:
        graph, self._marks = _with_marks(lowered, overlapped) if overlapped else (lowered.tasks, {})
        offsets, followers = graph.adjacency
        self._env = env
        self._num_tasks = graph.num_tasks
        self._duration_s = duration_s
        self._missing: list[int] = graph.num_missing.tolist()
        for _, follower in (mark for marks in self._marks.values() for mark in marks):
            self._missing[follower] += 1
        self._offsets: list[int] = offsets.tolist()
        self._followers: list[int] = followers.tolist()
        self._cores = _shared_cores(lowered, partial(SharedCores, env, done=self._end_part))
        self._working: dict[int, int] = {}  # task on shared cores -> number of its parts that have not ended
        self.network = Network(env, wires(lowered), self._arrived)
        self.start_s = [nan] * graph.num_tasks
        self.end_s = [nan] * graph.num_tasks
        if overlapped and self._cores:
            raise ValueError(
                "ranks share cores: how far a backward is, is not known; want cores of their own"
            )

    def run(self) -> None:
        """Run until no more task can start."""
        # rows are not among them: each has a producer
        self._begin([node for node, missing in enumerate(self._missing) if missing == 0])
        self._env.run()

    def _begin(self, tasks: Iterable[int]) -> None:
        """Start tasks. Those with equal durations, as in equal replicas, end in one event."""
        now, ending = self._env.now, dict[float, list[int]]()
        for task in tasks:
            self.start_s[task] = now
            duration_s = self._duration_s[task]
            for share, follower in self._marks.get(task, ()):
                after(self._env, share * duration_s, self._less_to_wait, (follower,))
            if task in self._cores:
                self._share_cores(task, duration_s)
            else:
                ending.setdefault(duration_s, []).append(task)
        for duration_s, together in ending.items():
            after(self._env, duration_s, self._end, together)

    def _share_cores(self, task: int, duration_s: float) -> None:
        self._working[task] = len(self._cores[task])
        for cores in self._cores[task]:
            if cores is None:
                after(self._env, duration_s, self._end_part, task)
            else:
                cores.work(duration_s, task)

    def _end_part(self, task: int) -> None:
        self._working[task] -= 1
        if not self._working[task]:
            self._end((task,))

    def _end(self, tasks: Iterable[int]) -> None:
        now, end_s = self._env.now, self.end_s
        for task in tasks:
            end_s[task] = now
        self._has_ended(tasks)

    def _arrived(self, rows: Iterable[int]) -> None:
        self._has_ended([self._num_tasks + row for row in rows])

    def _has_ended(self, nodes: Iterable[int]) -> None:
        followers, offsets = self._followers, self._offsets
        self._less_to_wait(
            [later for node in nodes for later in followers[offsets[node] : offsets[node + 1]]]
        )

    def _less_to_wait(self, nodes: Iterable[int]) -> None:
        missing, num_tasks = self._missing, self._num_tasks
        tasks: list[int] = []
        rows: list[int] = []
        for node in nodes:
            missing[node] -= 1
            if missing[node] == 0:
                if node < num_tasks:
                    tasks.append(node)
                else:
                    rows.append(node - num_tasks)
        if tasks:
            self._begin(tasks)
        if rows:
            self.network.send(rows)


def shares_cores(lowered: Lowered, node: Node) -> bool:
    """Whether the node's cores are time-shared: by several ranks, or by a rank's passes and its exchanges."""
    if node.num_cores is None:
        return False
    return node.num_cores < node.num_ranks or any(lowered.tasks.fsdp)


def _shared_cores(
    lowered: Lowered, shared_cores: Callable[[int], SharedCores[int]]
) -> dict[int, tuple[SharedCores[int] | None, ...]]:
    """Task -> the cores of its parts: one part per rank on shared cores, and one (None) for all other ranks.

    A rank's passes share its core with the exchanges of sharded parameters, which copy and add there. Tasks
    that share no cores are absent; reductions of whole gradients take no core.
    """
    cores_of_rank: list[SharedCores[int] | None] = []
    for node in lowered.plan.cluster.nodes:
        if not shares_cores(lowered, node):
            cores_of_rank.extend([None] * node.num_ranks)
        elif node.num_cores is not None and node.num_cores < node.num_ranks:
            cores_of_rank.extend([shared_cores(node.num_cores)] * node.num_ranks)
        else:
            cores_of_rank.extend(shared_cores(1) for _ in range(node.num_ranks))
    cores_by_task: dict[int, tuple[SharedCores[int] | None, ...]] = {}
    if any(cores_of_rank):
        for index, task in enumerate(lowered.tasks.tasks):
            shared = tuple(cores for rank in task.ranks if (cores := cores_of_rank[rank]) is not None)
            if shared and task.kind is not TaskKind.ALL_REDUCE:
                cores_by_task[index] = shared if len(shared) == len(task.ranks) else (*shared, None)
    return cores_by_task


def _with_marks(
    lowered: Lowered, overlapped: Mapping[Action, LastBackward]
) -> tuple[TaskGraph, dict[int, list[tuple[float, int]]]]:
    """The graph with every all-reduce of these reductions after a mark within the backward, and the marks.

    For each rank of the all-reduce, the mark replaces the edge from the passes in front of the reduction,
    which end no earlier.
    """
    graph = lowered.tasks
    marks: dict[int, list[tuple[float, int]]] = {}
    replaced: Counter[tuple[int, int]] = Counter()
    for joined in (joined for lane in graph.reductions.values() for joined in lane):
        overlap = overlapped.get(joined.action)
        groups = [graph.tasks[task].group for task in joined.tasks]
        if overlap is None or groups[0] is None or joined.last_pass is None:
            continue
        share = dict(zip(lowered.reductions[joined.action], overlap.shares, strict=True))
        replaced[joined.last_pass, joined.tasks[0]] += 1
        whole = accumulate((share[group] for group in groups if group is not None), max)
        marks.setdefault(graph.passes[overlap.backward], []).extend(zip(whole, joined.tasks, strict=True))
    dropped = []
    for index, edge in enumerate(zip(graph.before.tolist(), graph.after.tolist(), strict=True)):
        if replaced[edge]:
            replaced[edge] -= 1
            dropped.append(index)
    before, behind = np.delete(graph.before, dropped), np.delete(graph.after, dropped)
    return replace(graph, before=before, after=behind), marks
