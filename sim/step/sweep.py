"""The engine's times without the engine: one compiled pass over arrays, for search."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.step.deadlock import DeadlockError
from sim.step.exchange import ExchangeNames
from sim.step.reduction import groups_of, priced_groups
from sim.step.sweep_loop import run
from sim.step.wire import nodes_of_ranks, port_of
from workbench.plan.lowered import Lowered, Transfer
from workbench.schedule.action import COMPUTE, MOVES, STEP, Action, Pass

_TURNS = (*COMPUTE, *MOVES)  # these take their stage's turn

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Times:
    """When everything happened, in seconds.

    Args:
        iteration_s: the last end of all.
        passes: action -> (start, end).
        steps: rank -> (start, end) of its STEP.
        messages: row -> (ready, start, end); rows that stay on their rank are not messages.
    """

    iteration_s: float
    passes: dict[Action, tuple[float, float]]
    steps: dict[int, tuple[float, float]]
    messages: dict[int, tuple[float, float, float]]


class Sweep:
    """A lowered plan compiled for repeated timing with different durations.

    Every pass, every STEP and every all-reduce is a task that starts when its last
    predecessor has ended; every row of the plan is a message with a port. Same semantics
    as `sim.step.engine.simulate`, and the same floating-point operations in the same
    association, so times agree to the last bit.

    Raises:
        ValueError: ranks that share cores; only the engine time-shares them.

    Complexity: compiling is O(actions + rows + reductions x ranks), in Python; a timing is
    O(n log n) in compiled code.
    """

    def __init__(self, lowered: Lowered) -> None:
        for node in lowered.plan.cluster.nodes:
            if node.num_cores is not None and node.num_cores < node.num_ranks:
                raise ValueError(
                    f"the sweep needs a core for each rank, a node of {lowered.plan.cluster.name!r} has "
                    f"{node.num_cores} for {node.num_ranks}; use the engine"
                )
        self._lowered = lowered
        self._graph = _Graph(lowered)
        self._transmit_s, self._latency_s, self._port = _wires(lowered)
        self._offsets, self._successors = self._graph.adjacency()
        self._missing = self._graph.num_missing()

    def times(
        self, duration_s: Callable[[Action], float], step_s: Callable[[int], float] | None = None
    ) -> Times:
        """The times that `simulate` would give; arguments as there. DeadlockError likewise."""
        durations_s = self._durations(duration_s, step_s)
        start_s, end_s, ready_s = self._run(durations_s)
        graph, first_row = self._graph, self._graph.num_tasks
        return Times(
            iteration_s=float(end_s.max(initial=0.0)),
            passes={
                action: (float(start_s[task]), float(end_s[task])) for action, task in graph.passes.items()
            },
            steps={rank: (float(start_s[task]), float(end_s[task])) for rank, task in graph.steps.items()},
            messages={
                row: (float(ready_s[row]), float(start_s[first_row + row]), float(end_s[first_row + row]))
                for row in np.flatnonzero(self._port >= 0).tolist()
            },
        )

    def iteration_s(
        self, duration_s: Callable[[Action], float], step_s: Callable[[int], float] | None = None
    ) -> float:
        """The iteration time alone."""
        return float(self._run(self._durations(duration_s, step_s))[1].max(initial=0.0))

    def _run(self, durations_s: Floats) -> tuple[Floats, Floats, Floats]:
        start_s, end_s, ready_s = run(
            durations_s,
            (self._transmit_s, self._latency_s, self._port),
            self._missing.copy(),
            self._offsets,
            self._successors,
        )
        stuck = int(np.isnan(end_s).sum())
        if stuck:
            raise DeadlockError(f"{stuck} actions and rows never ended; `simulate` names them")
        return start_s, end_s, ready_s

    def _durations(
        self, duration_s: Callable[[Action], float], step_s: Callable[[int], float] | None
    ) -> Floats:
        graph, lowered = self._graph, self._lowered
        prices = {action: float(duration_s(action)) for action in lowered.plan.program_actions}
        durations_s = np.zeros(graph.num_tasks)
        for action, task in graph.passes.items():
            durations_s[task] = prices[action]
        exchanges = graph.names.durations_s(lowered, prices)
        for action, task in graph.exchanges.items():
            durations_s[task] = exchanges[action]
        for rank, task in graph.steps.items():
            durations_s[task] = prices[STEP] if step_s is None else float(step_s(rank))
        priced = priced_groups(lowered, prices)
        for index, task in graph.groups.items():
            durations_s[task] = priced[index].duration_s
        for task, action in graph.alone.items():
            durations_s[task] = 0.0 if action in lowered.reductions else prices[action]
        return durations_s


class _Graph:
    """Tasks and what they wait for. Tasks are numbered first, rows after them."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self.passes: dict[Action, int] = {}
        self.steps: dict[int, int] = {}
        self.groups: dict[int, int] = {}  # gradient group -> task
        self._gradient_groups = {group.index: group for group in lowered.groups}
        self.alone: dict[int, Action] = {}  # task of a REDUCE_GRAD without groups on one rank
        self.exchanges: dict[Action, int] = {}  # of sharded weights, by their names
        self.names = ExchangeNames(lowered)
        self._num = 0
        self._edges: list[tuple[int, int]] = []
        for action in lowered.plan.program_actions:
            if self.names.is_one(action):
                if self.names.of(action) not in self.exchanges:
                    self.exchanges[self.names.of(action)] = self._new()
            elif action.kind in _TURNS:
                self.passes[action] = self._new()
        for program in lowered.plan.programs:
            self._add_program(program.ranks, program.actions)
        self.num_tasks = self._num
        self._add_rows(lowered.transfers)
        self._num_nodes = self.num_tasks + len(lowered.transfers)

    def num_missing(self) -> Ints:
        """Predecessors of every node."""
        targets = np.array([target for _, target in self._edges], dtype=np.int64)
        return np.bincount(targets, minlength=self._num_nodes).astype(np.int64)

    def adjacency(self) -> tuple[Ints, Ints]:
        """Successors of every node, as offsets into one array."""
        edges = np.array(self._edges, dtype=np.int64).reshape(-1, 2)
        order = np.argsort(edges[:, 0], kind="stable")
        counts = np.bincount(edges[:, 0], minlength=self._num_nodes)
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int64), edges[order, 1].copy()

    def _new(self) -> int:
        self._num += 1
        return self._num - 1

    def _add_program(self, ranks: tuple[int, ...], actions: tuple[Action, ...]) -> None:
        passes = [self.passes[action] for action in actions if action in self.passes]
        self._edges.extend(pairwise(passes))
        self._add_exchanges(actions)
        for rank in ranks:
            self._add_rank(rank, actions)

    def _add_exchanges(self, actions: tuple[Action, ...]) -> None:
        """One at a time, each behind the pass before it; passes wait for those that they need."""
        last_pass: int | None = None
        before: int | None = None
        for action in actions:
            last_pass = self.passes.get(action, last_pass)
            if self.names.is_one(action):
                task = self.exchanges[self.names.of(action)]
                self._edges += [(earlier, task) for earlier in (last_pass, before) if earlier is not None]
                before = task
        for action, names in self.names.awaited(actions).items():
            if action in self.passes:
                self._edges += [(self.exchanges[name], self.passes[action]) for name in names]

    def _add_rank(self, rank: int, actions: tuple[Action, ...]) -> None:
        """The rank's lane of reductions beside its passes, and its STEP behind both."""
        last_pass: int | None = None
        last_group: int | None = None
        reduced: list[int] = []
        awaited = self.names.awaited(actions)
        for action in actions:
            if self.names.is_one(action):
                reduced.append(self.exchanges[self.names.of(action)])
            elif action.kind in _TURNS:
                last_pass = self.passes[action]
            elif action.kind is Pass.REDUCE_GRAD:
                for nth, group in enumerate(self._groups(rank, action)):
                    if nth == 0 and last_pass is not None:
                        self._edges.append((last_pass, group))
                    self._edges.extend((self.exchanges[name], group) for name in awaited.get(action, ()))
                    if last_group is not None:
                        self._edges.append((last_group, group))
                    last_group = group
                assert last_group is not None
                reduced.append(last_group)
            elif action.kind is Pass.STEP:
                self.steps[rank] = step = self._new()
                self._edges.extend((group, step) for group in reduced)
                if last_pass is not None:
                    self._edges.append((last_pass, step))

    def _groups(self, rank: int, action: Action) -> Iterator[int]:
        indices = self._lowered.reductions.get(action, ())
        for group in groups_of(indices, self._gradient_groups, rank):
            if group is None:
                task = self._new()
                self.alone[task] = action
                yield task
            else:
                if group not in self.groups:
                    self.groups[group] = self._new()
                yield self.groups[group]

    def _add_rows(self, transfers: tuple[Transfer, ...]) -> None:
        for row in transfers:
            node = self.num_tasks + row.row
            before = self.passes[row.producer] if row.after is None else self.num_tasks + row.after
            self._edges.append((before, node))
            self._edges.append((node, self.passes[row.consumer]))


def _wires(lowered: Lowered) -> tuple[Floats, Floats, Ints]:
    """Per row: seconds on its port, latency behind it, and the port (-1 where nothing travels)."""
    cluster, rows = lowered.plan.cluster, lowered.transfers
    node_of = nodes_of_ranks(cluster)
    ports: dict[tuple[str, int], int] = {}
    transmit_s, latency_s = np.zeros(len(rows)), np.zeros(len(rows))
    port = np.full(len(rows), -1, dtype=np.int64)
    for row in rows:
        found = port_of(cluster, node_of, row)
        if found is not None:
            key, link = found
            transmit_s[row.row] = row.num_bytes / link.bytes_per_s
            latency_s[row.row] = link.latency_s
            port[row.row] = ports.setdefault(key, len(ports))
    return transmit_s, latency_s, port
