"""Simulates a training job on nodes that leave and join: progress, lost work, recovery, idle time."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from math import isfinite

from simpy.core import Environment
from simpy.events import Event, Process
from simpy.exceptions import Interrupt

from workbench.resilience.availability import Availability, Change, NodeEvent

Flow = Generator[Event, object, None]


class Spent(StrEnum):
    """What wall-clock time went into."""

    EFFECTIVE = "effective"  # iterations that count
    REDUNDANT = "redundant"  # the part of them that computes a neighbour's stage again
    IDLE_NODES = "idle nodes"  # the part of them for which a node outside the grid stands by
    CHECKPOINT = "checkpoint"
    RECOVERY = "recovery"  # reconfiguration or restart
    LOST = "lost"  # iterations that were cut off, or undone by going back to a checkpoint
    WAITING = "waiting"  # too few nodes


class Joins(StrEnum):
    """When a new node is taken in."""

    AT_ONCE = "at once"  # recovers at the end of the iteration
    AT_RECOVERY = "at recovery"  # waits for the next recovery


class Restart(StrEnum):
    """What the old configuration does while a new one is set up after a failure."""

    STOPS = "stops"
    GOES_ON = "goes on"  # at its old speed, without the lost node: what a published simulator assumes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Training stops for `save_s` after `every` iterations, and goes back to the last one after a failure.

    `first` is the number of iterations before the first checkpoint after a failure. An asynchronous
    one stops training for `save_s` alone and counts `copy_s` later; the next save waits for it.
    """

    every: int
    save_s: float
    first: int | None = None
    copy_s: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1 or min(self.save_s, self.copy_s) < 0 or (self.first is not None and self.first < 1):
            raise ValueError(f"want a checkpoint every 1 iteration or more, saved in >= 0 s, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a training system behaves when nodes come and go.

    Args:
        samples_per_s: [n + 1] throughput by number of nodes, 0 where it cannot run; the last value
            holds beyond the end.
        samples_per_step: global batch; an iteration takes samples_per_step / samples_per_s.
        recover_s: from a change of nodes to the next iteration.
        checkpoints: None for a system that keeps its state in memory and loses the cut-off
            iteration alone.
        joins: when new nodes are taken in.
        restart: whether training stops for a recovery after a failure.
        redundant_share: of an iteration, spent on redundant computation.
        idle_nodes: [n + 1] nodes that stand by, by number of nodes; empty for none.
        creation_s: from a node's arrival to its being usable; nodes of time 0 are usable at once.
    """

    name: str
    samples_per_s: Sequence[float]
    samples_per_step: float
    recover_s: float
    checkpoints: Checkpoints | None = None
    joins: Joins = Joins.AT_ONCE
    restart: Restart = Restart.STOPS
    redundant_share: float = 0.0
    idle_nodes: Sequence[int] = ()
    creation_s: float = 45.0

    def __post_init__(self) -> None:
        if not self.samples_per_s or not all(isfinite(rate) and rate >= 0 for rate in self.samples_per_s):
            raise ValueError(f"{self.name}: throughput must be finite and >= 0 for every node count")
        if self.samples_per_step <= 0 or self.recover_s < 0 or self.creation_s < 0:
            raise ValueError(f"{self.name}: want a batch > 0 and times >= 0, got {self}")
        if not 0 <= self.redundant_share < 1:
            raise ValueError(f"{self.name}: redundant_share must be in [0, 1), got {self.redundant_share}")

    def rate(self, num_nodes: int) -> float:
        """Samples per second on that many nodes."""
        return self.samples_per_s[min(num_nodes, len(self.samples_per_s) - 1)]

    def idle_share(self, num_nodes: int) -> float:
        """Fraction of the nodes that stands by."""
        if not self.idle_nodes or not num_nodes:
            return 0.0
        return self.idle_nodes[min(num_nodes, len(self.idle_nodes) - 1)] / num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration that ended, or was cut off; `samples` is 0 where it did not count in the end."""

    start_s: float
    end_s: float
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRun:
    """What came of a trace.

    Args:
        window_s: all of it, from the nodes' start.
        spent_s: by kind; together the window.
        iterations: in order of time.
        num_recoveries: completed ones.
        node_s: node-seconds that were there, used or not.
    """

    system: str
    window_s: float
    spent_s: tuple[tuple[Spent, float], ...]
    iterations: tuple[Iteration, ...]
    num_recoveries: int
    node_s: float

    @property
    def samples(self) -> float:
        return sum(iteration.samples for iteration in self.iterations)

    @property
    def samples_per_s(self) -> float:
        """Average over the whole window."""
        return self.samples / self.window_s

    def fraction(self, kind: Spent) -> float:
        """Of the window."""
        return dict(self.spent_s)[kind] / self.window_s

    def dollars_per_sample(self, dollars_per_node_h: float) -> float:
        """Cost of a sample that counted; infinite where none did."""
        dollars = self.node_s / 3600 * dollars_per_node_h
        return dollars / self.samples if self.samples else float("inf")


def simulate_failures(system: System, trace: Availability, until_s: float | None = None) -> FailureRun:
    """Train on the trace's nodes from 0 to `until_s`, by default the last time a node leaves.

    An iteration runs on the nodes of the current configuration. When one of them leaves, the iteration
    is cut off, work since the last checkpoint is undone, and the system recovers on what is left; when
    another leaves meanwhile, recovery starts anew. A warning lets the iteration end (and a checkpoint be
    saved) and the node be left out before it goes, if there is time. A failure at the instant at which
    an iteration ends comes first. At the end of the window the running iteration counts by the part
    that is done, and work not yet checkpointed counts.

    Raises:
        ValueError: a window that is not positive.

    Complexity: O(iterations + events x nodes).
    """
    window_s = trace.last_leave_s if until_s is None else until_s
    if not (isfinite(window_s) and window_s > 0):
        raise ValueError(
            f"{trace.name}: want a window > 0 s, got {window_s} s; name until_s if no node leaves"
        )
    env = Environment()
    job = _Job(env, system)
    job.admit([event.node for event in trace.events if event.time_s == 0 and event.change is Change.JOIN])
    env.process(_happen(env, trace, job, window_s))
    for event in trace.events:
        if event.warned_s > 0:
            env.process(_warn(env, event, job))
    job.start()
    env.run(until=window_s)
    return job.result(window_s)


def _happen(env: Environment, trace: Availability, job: "_Job", window_s: float) -> Flow:
    """Nodes leave and arrive; what happens at one instant is one change."""
    later = (event for event in trace.events if 0 < event.time_s < window_s)
    for time_s, events in groupby(later, key=lambda event: event.time_s):
        yield env.timeout(time_s - env.now)
        arrived: list[str] = []
        left: list[str] = []
        for event in events:
            (arrived if event.change is Change.JOIN else left).append(event.node)
        job.lose(left)
        for node in arrived:
            job.present.add(node)
            env.process(_create(env, node, job))


def _create(env: Environment, node: str, job: "_Job") -> Flow:
    yield env.timeout(job.system.creation_s)
    if node in job.present:
        job.admit([node])


def _warn(env: Environment, event: NodeEvent, job: "_Job") -> Flow:
    yield env.timeout(max(0.0, event.time_s - event.warned_s))
    if event.node in job.present:
        job.doomed.add(event.node)


class _Job:
    """The training job: what it does next, and what its time went into."""

    def __init__(self, env: Environment, system: System) -> None:
        self._env, self.system = env, system
        self.present: set[str] = set()  # paid for
        self.doomed: set[str] = set()  # warned of
        self._ready: set[str] = set()  # usable
        self._members: set[str] = set()  # of the current configuration, or of the one being set up
        self._spent = dict.fromkeys(Spent, 0.0)
        self._iterations: list[Iteration] = []
        self._at_risk: list[tuple[int, int]] = []  # (iteration, nodes) since the last checkpoint
        self._must_save, self._must_recover, self._grown, self._failed = False, False, False, False
        self._num_recoveries = self._num_copied = self._num_undone = 0
        self._copies: Process | None = None  # of the last asynchronous checkpoint
        self._node_s, self._counted_until_s = 0.0, 0.0
        self._doing: tuple[Spent, float] = (Spent.WAITING, 0.0)
        self._wake = env.event()

    def start(self) -> None:
        """The first configuration costs nothing."""
        self._process = self._env.process(self._run())

    def admit(self, nodes: Sequence[str]) -> None:
        """Nodes that can be used from now on."""
        self._count_nodes()
        self.present.update(nodes)
        self._ready.update(nodes)
        self._grown = True
        self._wake_up()

    def lose(self, nodes: Sequence[str]) -> None:
        """Nodes that are gone; training stops if one of them took part."""
        self._count_nodes()
        for group in (self.present, self.doomed, self._ready):
            group.difference_update(nodes)
        if self._members.intersection(nodes):
            at_work = self._doing[0] in (Spent.EFFECTIVE, Spent.CHECKPOINT)
            if at_work and self.system.restart is Restart.GOES_ON:
                self._undo()
                self._env.process(self._switch())
            else:
                self._process.interrupt(Restart.STOPS)
        self._wake_up()

    def result(self, window_s: float) -> FailureRun:
        """Close the books at the end of the window."""
        self._count_nodes(window_s)
        kind, since_s = self._doing
        if kind is Spent.EFFECTIVE:
            self._end_iteration(since_s, window_s)
        else:
            self._spent[kind] += window_s - since_s
        self._keep()
        return FailureRun(
            system=self.system.name,
            window_s=window_s,
            spent_s=tuple(self._spent.items()),
            iterations=tuple(self._iterations),
            num_recoveries=self._num_recoveries,
            node_s=self._node_s,
        )

    def _run(self) -> Flow:
        self._members = set(self._ready)
        self._must_recover, self._grown = not self.system.rate(len(self._members)), False
        while True:
            try:
                yield from self._next()
            except Interrupt as failure:
                if failure.cause is Restart.STOPS:
                    self._undo()
                    self._must_save, self._must_recover = False, True

    def _switch(self) -> Flow:
        """The new configuration takes over from the old one, whose iteration is cut off."""
        yield self._env.timeout(self.system.recover_s)
        self._members, self._num_recoveries = set(self._ready), self._num_recoveries + 1
        self._must_save, self._must_recover = False, not self.system.rate(len(self._members))
        self._process.interrupt(Restart.GOES_ON)

    def _next(self) -> Flow:
        if self._must_save and self.system.checkpoints is not None:
            if self._copies is not None and self._copies.is_alive:
                yield from self._until(Spent.CHECKPOINT, self._copies)
            yield from self._spend(Spent.CHECKPOINT, self.system.checkpoints.save_s)
            self._must_save = self._failed = False
            if self.system.checkpoints.copy_s:
                self._copies = self._env.process(self._copy(self.system.checkpoints.copy_s))
            else:
                self._keep()
        elif self._must_recover:
            yield from self._recover()
        else:
            yield from self._iterate()

    def _copy(self, copy_s: float) -> Flow:
        """What is at risk now counts after that time, unless it was undone before."""
        self._num_copied, num_undone = len(self._at_risk), self._num_undone
        yield self._env.timeout(copy_s)
        if num_undone == self._num_undone:
            self._keep(self._num_copied)

    def _recover(self) -> Flow:
        members = self._ready - self.doomed
        if not self.system.rate(len(members)):
            self._members = set()
            self._wake = self._env.event()
            yield from self._until(Spent.WAITING, self._wake)
            return
        self._members, self._grown = members, False
        yield from self._spend(Spent.RECOVERY, self.system.recover_s)
        self._must_recover = False
        self._num_recoveries += 1

    def _iterate(self) -> Flow:
        start_s, system = self._env.now, self.system
        self._doing = (Spent.EFFECTIVE, start_s)
        try:
            yield self._env.timeout(system.samples_per_step / system.rate(len(self._members)))
        except Interrupt:
            self._spent[Spent.LOST] += self._env.now - start_s
            self._iterations.append(Iteration(start_s=start_s, end_s=self._env.now, samples=0.0))
            raise
        self._end_iteration(start_s, self._env.now)
        if system.checkpoints is None:
            self._keep()
        changed = (self._grown and system.joins is Joins.AT_ONCE) or bool(self.doomed & self._members)
        due = system.checkpoints is not None and self._is_due(system.checkpoints)
        self._must_recover = changed
        self._must_save = due or (changed and system.checkpoints is not None)

    def _is_due(self, checkpoints: Checkpoints) -> bool:
        first = checkpoints.every if checkpoints.first is None else checkpoints.first
        return len(self._at_risk) - self._num_copied >= (first if self._failed else checkpoints.every)

    def _end_iteration(self, start_s: float, end_s: float) -> None:
        samples = (end_s - start_s) * self.system.rate(len(self._members))
        self._iterations.append(Iteration(start_s=start_s, end_s=end_s, samples=samples))
        self._at_risk.append((len(self._iterations) - 1, len(self._members)))

    def _keep(self, count: int | None = None) -> None:
        """The first of what is at risk, by default all, count from now on."""
        for place, num_nodes in self._at_risk[:count]:
            lasted_s = self._iterations[place].end_s - self._iterations[place].start_s
            idle_s = lasted_s * self.system.idle_share(num_nodes)
            redundant_s = (lasted_s - idle_s) * self.system.redundant_share
            self._spent[Spent.IDLE_NODES] += idle_s
            self._spent[Spent.REDUNDANT] += redundant_s
            self._spent[Spent.EFFECTIVE] += lasted_s - idle_s - redundant_s
        del self._at_risk[:count]
        self._num_copied = 0

    def _undo(self) -> None:
        """A member is gone: back to the last checkpoint."""
        for place, _ in self._at_risk:
            lost = self._iterations[place]
            self._spent[Spent.LOST] += lost.end_s - lost.start_s
            self._iterations[place] = Iteration(start_s=lost.start_s, end_s=lost.end_s, samples=0.0)
        self._at_risk.clear()
        self._failed, self._num_copied, self._num_undone = True, 0, self._num_undone + 1

    def _spend(self, kind: Spent, seconds: float) -> Flow:
        yield from self._until(kind, self._env.timeout(seconds))

    def _until(self, kind: Spent, event: Event) -> Flow:
        start_s = self._env.now
        self._doing = (kind, start_s)
        try:
            yield event
        except Interrupt:
            self._spent[kind] += self._env.now - start_s
            raise
        self._spent[kind] += self._env.now - start_s

    def _wake_up(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    def _count_nodes(self, now_s: float | None = None) -> None:
        now_s = self._env.now if now_s is None else now_s
        self._node_s += len(self.present) * (now_s - self._counted_until_s)
        self._counted_until_s = now_s
