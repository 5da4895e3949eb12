"""`sim.failures.simulate` step by step in SimPy: an event per iteration, checkpoint and recovery.

The slower form that `sim.failures.simulate` replaces, kept to compare results and times with.
"""

from collections.abc import Callable, Generator
from functools import partial

from simpy.core import Environment
from simpy.events import URGENT, Event, Process
from simpy.exceptions import Interrupt

from sim.failures.run import EqualIterations, FailureRun, Spent
from sim.failures.simulate import Instant, instants, node_seconds, window_of
from sim.failures.training_system import Checkpoints, Joins, Restart, System
from workbench.elastic.availability import Availability

Flow = Generator[Event, object, None]


def play_failures(system: System, trace: Availability, until_s: float | None = None) -> FailureRun:
    """Compute the result of `simulate_failures` by simulating every iteration by itself.

    Raises:
        ValueError: a window that is not positive.

    Complexity: O(iterations + events x nodes).
    """
    window_s = window_of(trace, until_s)
    stays = trace.stays()
    first, *later = instants(stays, system.creation_s, window_s)
    env = Environment()
    job = _Job(env, system, first.usable)
    for instant in later:
        _First(env, instant.time_s, partial(job.happen, instant))
    env.process(job.run())
    env.run(until=window_s)
    return job.result(window_s, node_seconds(stays, window_s))


class _First(Event):
    """A timeout scheduled before all others of the same instant."""

    def __init__(self, env: Environment, delay_s: float, then: Callable[[], None]) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self.callbacks = [lambda _: then()]
        env.schedule(self, URGENT, delay_s)


class _Job:
    """The training job: its next action and the account of its time."""

    def __init__(self, env: Environment, system: System, usable: frozenset[str]) -> None:
        self._env, self._system = env, system
        self._usable, self._doomed = set(usable), set[str]()
        self._members = set(usable)
        self._spent = dict.fromkeys(Spent, 0.0)
        self._iterations: list[EqualIterations] = []
        self._at_risk: list[int] = []  # iterations since the last checkpoint
        self._must_save, self._grown, self._failed = False, False, False
        self._must_recover = not system.rate(len(usable))
        self._num_recoveries = self._num_copied = self._num_undone = 0
        self._copies: Process | None = None  # of the last asynchronous checkpoint
        self._doing: tuple[Spent, float] = (Spent.WAITING, 0.0)

    def happen(self, instant: Instant) -> None:
        """Apply an event: nodes leave, become usable or are warned."""
        self._usable = (self._usable - instant.left) | instant.usable
        self._doomed = (self._doomed - instant.left) | instant.warned
        self._grown |= bool(instant.usable)
        if self._members & instant.left:
            at_work = self._doing[0] in (Spent.EFFECTIVE, Spent.CHECKPOINT)
            if at_work and self._system.restart is Restart.GOES_ON:
                self._undo()
                take_over = partial(self._process.interrupt, Restart.GOES_ON)
                _First(self._env, self._system.recover_s, take_over)
            else:
                self._process.interrupt(Restart.STOPS)
        elif self._doing[0] is Spent.WAITING:
            self._process.interrupt(Spent.WAITING)

    def result(self, window_s: float, node_s: float) -> FailureRun:
        """Close the accounts at the end of the window."""
        kind, since_s = self._doing
        if kind is Spent.EFFECTIVE:
            self._end_iteration(since_s, window_s)
        else:
            self._spent[kind] += window_s - since_s
        self._keep()
        return FailureRun(
            system=self._system.name,
            window_s=window_s,
            spent_s=tuple(self._spent.items()),
            stretches=tuple(self._iterations),
            num_recoveries=self._num_recoveries,
            node_s=node_s,
        )

    def run(self) -> Flow:
        """Simulate until the window ends."""
        process = self._env.active_process
        assert process is not None, "a process runs it"
        self._process = process
        while True:
            try:
                yield from self._next()
            except Interrupt as failure:
                if failure.cause is Restart.STOPS:
                    self._undo()
                    self._must_save, self._must_recover = False, True
                elif failure.cause is Restart.GOES_ON:
                    self._take_over()

    def _take_over(self) -> None:
        """Switch to the new configuration; the iteration in progress is cut off."""
        self._members, self._num_recoveries = set(self._usable), self._num_recoveries + 1
        self._must_save, self._must_recover = False, not self._system.rate(len(self._members))

    def _next(self) -> Flow:
        checkpoints = self._system.checkpoints
        if self._must_save and checkpoints is not None:
            if self._copies is not None and self._copies.is_alive:
                yield from self._until(Spent.CHECKPOINT, self._copies)
            yield from self._spend(Spent.CHECKPOINT, checkpoints.save_s)
            self._must_save = self._failed = False
            if checkpoints.copy_s:
                self._num_copied = len(self._at_risk)
                self._copies = self._env.process(self._copy(checkpoints.copy_s))
            else:
                self._keep()
        elif self._must_recover:
            yield from self._recover()
        else:
            yield from self._iterate()

    def _copy(self, copy_s: float) -> Flow:
        """Count the iterations at risk as saved after that time, unless undone before."""
        num_undone = self._num_undone
        yield self._env.timeout(copy_s)
        if num_undone == self._num_undone:
            self._keep(self._num_copied)

    def _recover(self) -> Flow:
        members = self._usable - self._doomed
        if not self._system.rate(len(members)):
            self._members = set()
            yield from self._until(Spent.WAITING, self._env.event())
        self._members, self._grown = members, False
        if self._num_copied and self._copies is not None and self._copies.is_alive:
            yield from self._until(Spent.RECOVERY, self._copies)
        yield from self._spend(Spent.RECOVERY, self._system.recover_s)
        self._must_recover = False
        self._num_recoveries += 1

    def _iterate(self) -> Flow:
        start_s, system = self._env.now, self._system
        self._doing = (Spent.EFFECTIVE, start_s)
        try:
            yield self._env.timeout(system.samples_per_step / system.rate(len(self._members)))
        except Interrupt:
            lasted_s = self._env.now - start_s
            self._spent[Spent.LOST] += lasted_s
            self._iterations.append(self._stretch(start_s, lasted_s)._replace(samples=0.0))
            raise
        self._end_iteration(start_s, self._env.now)
        if system.checkpoints is None:
            self._keep()
        changed = (self._grown and system.joins is Joins.AT_ONCE) or bool(self._doomed & self._members)
        due = system.checkpoints is not None and self._is_due(system.checkpoints)
        self._must_recover = changed
        self._must_save = due or (changed and system.checkpoints is not None)

    def _is_due(self, checkpoints: Checkpoints) -> bool:
        first = checkpoints.every if checkpoints.first is None else checkpoints.first
        return len(self._at_risk) - self._num_copied >= (first if self._failed else checkpoints.every)

    def _stretch(self, start_s: float, lasted_s: float) -> EqualIterations:
        nodes = len(self._members)
        samples = lasted_s * self._system.rate(nodes)
        return EqualIterations(start_s=start_s, iteration_s=lasted_s, samples=samples, num_nodes=nodes)

    def _end_iteration(self, start_s: float, end_s: float) -> None:
        self._iterations.append(self._stretch(start_s, end_s - start_s))
        self._at_risk.append(len(self._iterations) - 1)

    def _keep(self, count: int | None = None) -> None:
        """Count the first iterations at risk, by default all, as final."""
        for index in self._at_risk[:count]:
            kept = self._iterations[index]
            idle_s = kept.iteration_s * self._system.idle_share(kept.num_nodes)
            redundant_s = (kept.iteration_s - idle_s) * self._system.redundant_share
            self._spent[Spent.IDLE_NODES] += idle_s
            self._spent[Spent.REDUNDANT] += redundant_s
            self._spent[Spent.EFFECTIVE] += kept.iteration_s - idle_s - redundant_s
        del self._at_risk[:count]
        self._num_copied = 0

    def _undo(self) -> None:
        """Roll back to the last checkpoint after losing a member."""
        for index in self._at_risk:
            lost = self._iterations[index]
            self._spent[Spent.LOST] += lost.iteration_s
            self._iterations[index] = lost._replace(samples=0.0)
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
