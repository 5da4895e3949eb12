"""Simulates a training job on nodes that leave and join: progress, lost work, recovery, idle time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

from sim.failures.run import EqualIterations, FailureRun, Spent
from sim.failures.training_system import Checkpoints, Joins, Restart, System
from workbench.elastic.availability import Availability, Stay
from workbench.float_sum import float_sum
from workbench.plan.lru_cache import Identity, LruCache

TRACES = 64  # in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The nodes that leave, become usable or are announced to leave at one instant."""

    time_s: float
    left: frozenset[str]
    usable: frozenset[str]
    warned: frozenset[str]


_HAPPENING: LruCache[tuple[list[Instant], float]] = LruCache(TRACES)


def simulate_failures(system: System, trace: Availability, until_s: float | None = None) -> FailureRun:
    """Simulate training on the trace's nodes from 0 to `until_s`, by default the last time a node leaves.

    An iteration runs on the nodes of the current configuration. When one of them leaves, the iteration is
    aborted, work since the last checkpoint is undone, and the system recovers on the remaining nodes; when
    another leaves meanwhile, recovery starts over. A warning lets the iteration end (and a checkpoint be
    saved) and the node be excluded before it leaves, if there is time; a node whose warning comes before it
    is usable never joins. All that happens to nodes at one instant is one change, and precedes whatever of
    the training ends at that instant. At the end of the window the running iteration counts by the part
    that is complete, and work not yet checkpointed counts.

    Between two instants all iterations, and all rounds of iterations and a checkpoint, are equal: they are
    counted, not simulated one by one; a bench does so one by one and must agree.

    Raises:
        ValueError: a window that is not positive.

    Complexity: O(events x nodes), whatever the number of iterations.
    """
    window_s = window_of(trace, until_s)
    key = Identity(trace), system.creation_s, window_s
    (first, *later), node_s = _HAPPENING.get_or(key, lambda: _happening(trace, system.creation_s, window_s))
    job = _Job(system, first.usable)
    for instant in later:
        job.happen(instant)
    job.advance(window_s)
    return job.result(window_s, node_s)


def _happening(trace: Availability, creation_s: float, window_s: float) -> tuple[list[Instant], float]:
    """Changes of nodes, and node-seconds: the same for every system on the trace, so cached."""
    stays = trace.stays()
    return instants(stays, creation_s, window_s), node_seconds(stays, window_s)


def window_of(trace: Availability, until_s: float | None) -> float:
    """Seconds to simulate.

    Raises:
        ValueError: a window that is not positive.
    """
    window_s = trace.last_leave_s if until_s is None else until_s
    if not (isfinite(window_s) and window_s > 0):
        raise ValueError(
            f"{trace.name}: want a window > 0 s, got {window_s} s; name until_s if no node leaves"
        )
    return window_s


def node_seconds(stays: Sequence[Stay], window_s: float) -> float:
    """Node-seconds available in the window, used or not."""
    return float_sum(max(0.0, min(stay.leave_s, window_s) - stay.join_s) for stay in stays)


def instants(stays: Sequence[Stay], creation_s: float, window_s: float) -> list[Instant]:
    """The start, and every instant of the window at which usable nodes change."""
    left: dict[float, set[str]] = {}
    usable: dict[float, set[str]] = {0.0: set()}
    warned: dict[float, set[str]] = {}
    for stay in stays:
        usable_s = stay.join_s + creation_s if stay.join_s > 0 else 0.0
        if usable_s >= min(stay.warned_s, stay.leave_s):
            continue
        usable.setdefault(usable_s, set()).add(stay.node)
        left.setdefault(stay.leave_s, set()).add(stay.node)
        if stay.warned_s < stay.leave_s:
            warned.setdefault(stay.warned_s, set()).add(stay.node)
    return [
        Instant(
            time_s=time_s,
            left=frozenset(left.get(time_s, ())),
            usable=frozenset(usable.get(time_s, ())),
            warned=frozenset(warned.get(time_s, ())),
        )
        for time_s in sorted(left.keys() | usable.keys() | warned.keys())
        if time_s < window_s
    ]


class _Job:
    """State of the training job: its current activity, and how its time was spent."""

    def __init__(self, system: System, usable: frozenset[str]) -> None:
        """Start in a first configuration, which takes no time to set up."""
        self._system, self._now_s = system, 0.0
        self._usable: set[str] = set(usable)
        self._doomed: set[str] = set()  # nodes that are announced to leave
        self._members = system.working(usable)  # in the current configuration, or the one being set up
        self._spent = dict.fromkeys(Spent, 0.0)
        self._stretches: list[EqualIterations] = []
        self._fresh: list[EqualIterations] = []  # since the last checkpoint
        self._copied: list[EqualIterations] = []  # of the last checkpoint, until `_copy_end_s`
        self._copy_end_s = 0.0
        self._switches_s: deque[float] = deque()  # times at which new configurations take over
        self._must_save, self._grown, self._failed = False, False, False
        self._must_recover = not system.rate(len(self._members))
        self._num_recoveries = 0
        self._begin()

    def happen(self, instant: Instant) -> None:
        """React to nodes that leave, become usable or are announced to leave."""
        self.advance(instant.time_s)
        self._usable = (self._usable - instant.left) | instant.usable
        self._doomed = (self._doomed - instant.left) | instant.warned
        self._grown |= bool(instant.usable)
        if self._members & instant.left:
            self._fail()
        elif self._doing is Spent.WAITING:
            self._stop()
            self._begin()
        elif self._doing is Spent.EFFECTIVE:
            self._until_s = self._iterations_end_s()

    def advance(self, to_s: float) -> None:
        """Advance to just before that instant: what ends at it has not ended yet."""
        while self._switches_s and self._switches_s[0] < to_s:
            self._run(self._switches_s.popleft())
            self._switch()
        self._run(to_s)

    def result(self, window_s: float, node_s: float) -> FailureRun:
        """The result at the end of the window, to which the job has advanced."""
        if self._doing is Spent.EFFECTIVE:
            self._fresh.append(self._stretch(window_s - self._since_s))
        else:
            self._stop()
        self._keep(self._copied)
        self._keep(self._fresh)
        return FailureRun(
            system=self._system.name,
            window_s=window_s,
            spent_s=tuple(self._spent.items()),
            stretches=tuple(sorted(self._stretches, key=lambda stretch: stretch.start_s)),
            num_recoveries=self._num_recoveries,
            node_s=node_s,
        )

    def _fail(self) -> None:
        """Handle the loss of a member."""
        at_work = self._doing in (Spent.EFFECTIVE, Spent.CHECKPOINT)
        if at_work and self._system.restart is Restart.GOES_ON:
            self._undo()
            self._switches_s.append(self._now_s + self._system.recover_s)
            if self._doing is Spent.EFFECTIVE:
                self._until_s = self._iterations_end_s()
        else:
            self._stop()
            self._undo()
            self._must_save, self._must_recover = False, True
            self._begin()

    def _switch(self) -> None:
        """Switch to the new configuration; the old one's iteration is aborted."""
        self._stop()
        self._members = self._system.working(self._usable)
        self._num_recoveries += 1
        self._must_save, self._must_recover = False, not self._system.rate(len(self._members))
        self._begin()

    def _run(self, to_s: float) -> None:
        while self._until_s < to_s:
            self._now_s = self._until_s
            if self._doing is Spent.EFFECTIVE:
                self._end_iterations(round((self._until_s - self._since_s) / self._iteration_s))
                self._must_recover = self._is_changed()
                self._must_save = self._system.checkpoints is not None
            elif self._doing is Spent.CHECKPOINT:
                self._end_save(to_s)
            else:
                self._stop()
                self._must_recover, self._num_recoveries = False, self._num_recoveries + 1
            self._begin()
        self._now_s = to_s
        if self._doing is Spent.EFFECTIVE:
            self._end_iterations(_num_before(to_s, self._since_s, self._iteration_s))
        if self._copy_end_s < to_s:
            self._keep(self._copied)

    def _begin(self) -> None:
        """Begin the next activity: a checkpoint, a recovery or iterations."""
        self._since_s, checkpoints = self._now_s, self._system.checkpoints
        if self._must_save and checkpoints is not None:
            self._doing = Spent.CHECKPOINT
            self._until_s = max(self._now_s, self._copy_end_s) + checkpoints.save_s
            return
        if self._must_recover:
            self._members = self._system.working(self._usable - self._doomed)
            if not self._system.rate(len(self._members)):
                self._members = set()
                self._doing, self._until_s = Spent.WAITING, inf
                return
            self._grown = False
            begin_s = self._now_s
            if self._copied:  # the checkpoint to fall back to is being written
                begin_s = max(begin_s, self._copy_end_s)
            self._doing, self._until_s = Spent.RECOVERY, begin_s + self._system.recover_s
            return
        self._doing = Spent.EFFECTIVE
        self._iteration_s = self._system.samples_per_step / self._system.rate(len(self._members))
        self._until_s = self._iterations_end_s()

    def _stop(self) -> None:
        """End the current activity now; an iteration is aborted."""
        lasted_s = self._now_s - self._since_s
        if self._doing is Spent.EFFECTIVE:
            self._lose([self._stretch(lasted_s)])
        else:
            self._spent[self._doing] += lasted_s

    def _iterations_end_s(self) -> float:
        """When iterations end: at a change of nodes, or when the next checkpoint is due."""
        checkpoints = self._system.checkpoints
        if self._is_changed():
            count = 1.0
        elif checkpoints is None:
            count = inf
        else:
            first = checkpoints.every if checkpoints.first is None else checkpoints.first
            due = first if self._failed else checkpoints.every
            count = max(1, due - sum(stretch.num_iterations for stretch in self._fresh))
        return self._since_s + count * self._iteration_s

    def _is_changed(self) -> bool:
        """Whether the configuration is to change before the next iteration."""
        has_room = self._system.has_room(len(self._members))
        takes_in = self._grown and has_room and self._system.joins is Joins.AT_ONCE
        return takes_in or bool(self._doomed & self._members)

    def _end_iterations(self, count: int) -> None:
        """Record that many iterations as completed."""
        if not count:
            return
        self._fresh.append(self._stretch(self._iteration_s, count))
        self._since_s += count * self._iteration_s
        if self._system.checkpoints is None:
            self._keep(self._fresh)

    def _end_save(self, to_s: float) -> None:
        """Complete a checkpoint, and all whole rounds that end before `to_s`."""
        checkpoints = self._system.checkpoints
        assert checkpoints is not None, "nothing else saves"
        self._stop()
        self._keep(self._copied)
        self._copied, self._fresh = self._fresh, []
        self._must_save = self._failed = False
        if not self._must_recover and not self._is_changed():
            self._skip_rounds(checkpoints, to_s)
        self._copy_end_s = self._now_s + checkpoints.copy_s

    def _skip_rounds(self, checkpoints: Checkpoints, to_s: float) -> None:
        self._iteration_s = self._system.samples_per_step / self._system.rate(len(self._members))
        work_s = checkpoints.every * self._iteration_s
        round_s = max(work_s, checkpoints.copy_s) + checkpoints.save_s
        count = _num_before(to_s, self._now_s, round_s)
        if not count:
            return
        one = self._stretch(self._iteration_s)._replace(
            start_s=self._now_s,
            per_round=checkpoints.every,
            round_s=round_s,
        )
        self._keep(self._copied)
        if count > 1:
            self._keep([one._replace(num_rounds=count - 1)])
        self._copied = [one._replace(start_s=self._now_s + (count - 1) * round_s)]
        self._spent[Spent.CHECKPOINT] += count * (round_s - work_s)
        self._now_s += count * round_s

    def _stretch(self, lasted_s: float, count: int = 1) -> EqualIterations:
        """Iterations, or a part of one, from the start of the current activity on."""
        nodes = len(self._members)
        return EqualIterations(
            start_s=self._since_s,
            iteration_s=lasted_s,
            samples=lasted_s * self._system.rate(nodes),
            num_nodes=nodes,
            per_round=count,
        )

    def _keep(self, stretches: list[EqualIterations]) -> None:
        """Let iterations count for good; the list is emptied."""
        for stretch in stretches:
            idle_s = stretch.lasted_s * self._system.idle_share(stretch.num_nodes)
            redundant_s = (stretch.lasted_s - idle_s) * self._system.redundant_share
            self._spent[Spent.IDLE_NODES] += idle_s
            self._spent[Spent.REDUNDANT] += redundant_s
            self._spent[Spent.EFFECTIVE] += stretch.lasted_s - idle_s - redundant_s
        self._stretches += stretches
        stretches.clear()

    def _lose(self, stretches: list[EqualIterations]) -> None:
        """Let iterations never count; the list is emptied."""
        self._spent[Spent.LOST] += float_sum(stretch.lasted_s for stretch in stretches)
        self._stretches += (stretch._replace(samples=0.0) for stretch in stretches)
        stretches.clear()

    def _undo(self) -> None:
        """Roll back to the last checkpoint, after the loss of a member."""
        self._lose(self._copied)
        self._lose(self._fresh)
        self._failed = True


def _num_before(to_s: float, start_s: float, each_s: float) -> int:
    """How many activities of `each_s` seconds, back to back from `start_s`, end before `to_s`."""
    count = max(0, ceil((to_s - start_s) / each_s) - 1)
    while count and start_s + count * each_s >= to_s:
        count -= 1
    return count
