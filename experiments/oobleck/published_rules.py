"""The rules by which the authors' published simulator simulates Varuna and Bamboo, restated.

Source:  github.com/SymbioticLab/Oobleck, branch `sosp23-artifact` @ 7966556, tools/simulator,
         varuna_simulator.py and bamboo_simulator.py (MIT), read and written anew. They are neither the rules
         of `sim.failures.simulate` nor the chapter's text; the printed averages come from them:

- Nodes meet before they train, and meet again after a loss; training goes on meanwhile as before, the lost
  node included. When they have met, the next iteration starts; the one that runs is dropped, its time
  belongs to the next. Of two meetings at once the second to end finds nobody: training stops.
- The average is over the time from the end of the first meeting to the end of the last iteration.
- Varuna: a loss undoes the iterations since the last checkpoint, not the running one, and the first
  iteration to end after it is followed by a checkpoint. A checkpoint fails, and undoes ten iterations, if
  the queue of events holds a loss in front of it in the order in which a heap stores it, whatever its time.
- Bamboo: two pipelines of 12 on 30 nodes, six nodes wait. A loss makes iterations half as long again until
  the nodes meet next; they do so when a node of a pipeline is lost, not when a waiting one is.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from experiments.oobleck.systems import CHECKPOINT_EVERY, CHECKPOINT_EVERY_FREE, published_rates, recovery
from workbench.elastic.availability import Availability, Change

CREATION_MS, GLOBAL_MEETING_MS, NUM_STAGES, SLOWDOWN = 45_000, 30_000, 12, 1.5
LIKELY_AGAIN = 0.05  # nodes whose loss ends a pipeline, above which Bamboo meets

Position = tuple[int, int]  # pipeline, stage


class _EventKind(IntEnum):
    """Kinds of events, in the order in which they happen at one instant."""

    ARRIVE = 1
    LEAVE = 2
    USABLE = 3
    MET_GLOBALLY = 4
    MET_LOCALLY = 5
    ITERATION_ENDS = 6
    CHECKPOINT_ENDS = 7


@dataclass(order=True, slots=True)
class _Event:
    time_ms: int
    kind: _EventKind
    node: str = field(default="", compare=False)
    meeting: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Node:
    is_usable: bool = False
    positions: list[Position] = field(default_factory=list)


@dataclass(slots=True)
class _Iteration:
    start_ms: int
    counts: bool = True


class _Played:
    """The common state of both systems."""

    def __init__(self, rates: Mapping[int, float], samples_per_step: float) -> None:
        self._rates, self._samples = rates, samples_per_step
        self._events: list[_Event] = []
        self._nodes: dict[str, _Node] = {}
        self._meeting: list[str] | None = None  # who has come, while they meet
        self._num_meetings, self._num_pipelines, self._num_waiting = 0, 0, 0
        self._iteration_ms, self._start_ms, self._last_end_ms = 0, -1, 0
        self._iterations: list[_Iteration] = []
        self._end_ms = 0  # of the last iteration

    def average(self, trace: Availability) -> float:
        """Average samples per second."""
        for event in trace.events:
            kind = _EventKind.ARRIVE if event.change is Change.JOIN else _EventKind.LEAVE
            self._push(round(event.time_s * 1000), kind, event.node)
        last_ms = round(trace.end_s * 1000)
        while self._events and (first := heapq.heappop(self._events)).time_ms < last_ms:
            self._happen(first)
        counted = sum(iteration.counts for iteration in self._iterations)
        return counted * self._samples / (self._end_ms - self._start_ms) * 1000

    def _happen(self, event: _Event) -> None:
        if event.kind is _EventKind.ARRIVE:
            self._nodes[event.node] = _Node()
            self._push(event.time_ms + CREATION_MS, _EventKind.USABLE, event.node)
        elif event.kind is _EventKind.LEAVE:
            self._leave(self._nodes.pop(event.node), event.time_ms)
        elif event.kind is _EventKind.USABLE and event.node in self._nodes:
            self._come(event)
        elif event.kind in (_EventKind.MET_GLOBALLY, _EventKind.MET_LOCALLY):
            self._met(event)
        elif event.kind is _EventKind.ITERATION_ENDS and event.meeting == self._num_meetings:
            self._end_iteration(event.time_ms)

    def _push(self, time_ms: int, kind: _EventKind, node: str = "") -> None:
        event = _Event(time_ms=time_ms, kind=kind, node=node, meeting=self._num_meetings)
        heapq.heappush(self._events, event)

    def _come(self, event: _Event) -> None:
        self._nodes[event.node].is_usable = True
        if self._meeting is not None:
            self._meeting.append(event.node)
        elif not self._num_pipelines:
            self._meet(event.time_ms, _EventKind.MET_GLOBALLY)
        else:
            self._num_waiting += 1

    def _meet(self, now_ms: int, kind: _EventKind) -> None:
        self._meeting = [name for name, node in self._nodes.items() if node.is_usable]
        self._push(now_ms + self._meeting_ms(kind), kind)

    def _met(self, event: _Event) -> None:
        """End a meeting: all nodes that came join, unless one of them has left again.

        Of two simultaneous meetings the second to end finds no nodes, and training stops until the next.
        """
        arrivals = self._meeting or []
        if any(name not in self._nodes for name in arrivals):
            self._meet(event.time_ms, event.kind)
            return
        self._num_pipelines = len(arrivals) // NUM_STAGES
        num_placed = self._num_pipelines * NUM_STAGES
        for order, name in enumerate(arrivals):
            self._nodes[name].positions = [divmod(order, NUM_STAGES)] if order < num_placed else []
        self._num_waiting = len(arrivals) - num_placed
        self._meeting, self._num_meetings = None, self._num_meetings + 1
        if self._num_pipelines:
            usable = sum(node.is_usable for node in self._nodes.values())
            rate = self._rates[max(min(self._rates), min(max(self._rates), usable))]
            self._iteration_ms = int(self._samples / rate * 1000)
            if self._start_ms < 0:
                self._start_ms = self._last_end_ms = event.time_ms
            self._push(event.time_ms + self._iteration_ms, _EventKind.ITERATION_ENDS)

    def _meeting_ms(self, kind: _EventKind) -> int:
        raise NotImplementedError

    def _leave(self, node: _Node, now_ms: int) -> None:
        raise NotImplementedError

    def _end_iteration(self, now_ms: int) -> None:
        raise NotImplementedError


class _Varuna(_Played):
    def __init__(
        self,
        rates: Mapping[int, float],
        samples_per_step: float,
        restart_ms: int,
        save_ms: int,
        interval: int,
    ) -> None:
        """Unless `every` is 10, checkpoints are free and never fail, but restarts still take time."""
        super().__init__(rates, samples_per_step)
        self._restart_ms, self._save_ms, self._every = restart_ms, save_ms, interval
        self._is_free = interval != CHECKPOINT_EVERY
        self._saved_ms, self._num_ended, self._has_lost = -1, 0, False

    def _meeting_ms(self, kind: _EventKind) -> int:
        return self._restart_ms - self._save_ms

    def _leave(self, node: _Node, now_ms: int) -> None:
        self._has_lost = True
        for iteration in self._iterations:
            if iteration.start_ms >= self._saved_ms:
                iteration.counts = False
        self._meet(now_ms, _EventKind.MET_GLOBALLY)

    def _end_iteration(self, now_ms: int) -> None:
        self._num_ended += 1
        self._iterations.append(_Iteration(start_ms=self._last_end_ms))
        self._end_ms = now_ms
        if self._num_ended % self._every == 0 or self._has_lost:
            self._has_lost = False
            now_ms = now_ms if self._is_free else self._save(now_ms)
            self._saved_ms = now_ms if self._is_free else self._saved_ms
        self._last_end_ms = now_ms
        self._push(now_ms + self._iteration_ms, _EventKind.ITERATION_ENDS)

    def _save(self, now_ms: int) -> int:
        saved_ms = now_ms + self._save_ms
        self._push(saved_ms + self._save_ms, _EventKind.CHECKPOINT_ENDS)
        kinds = [event.kind for event in self._events]  # as the heap stores them
        if _EventKind.LEAVE in kinds[: kinds.index(_EventKind.CHECKPOINT_ENDS)]:
            self._num_ended = max(0, self._num_ended - self._every)
            for iteration in self._iterations[-self._every :]:
                iteration.counts = False
        else:
            self._saved_ms = saved_ms
        return saved_ms


class _Bamboo(_Played):
    def __init__(
        self, rates: Mapping[int, float], samples_per_step: float, rebalance_ms: int, slowdown: float
    ) -> None:
        super().__init__(rates, samples_per_step)
        self._rebalance_ms, self._slowdown = rebalance_ms, slowdown
        self._lost_at: tuple[int, int] | None = None  # iterations by then, time
        self._is_prolonged = False

    def _meeting_ms(self, kind: _EventKind) -> int:
        return GLOBAL_MEETING_MS if kind is _EventKind.MET_GLOBALLY else self._rebalance_ms

    def _met(self, event: _Event) -> None:
        super()._met(event)
        if self._meeting is None:
            self._lost_at, self._is_prolonged = None, False

    def _leave(self, node: _Node, now_ms: int) -> None:
        """Give a node's stage to its predecessor, if neither has two stages already."""
        if node.positions and not self._is_taken_over(node):
            self._meet(now_ms, _EventKind.MET_GLOBALLY)
        elif self._meeting is None and self._num_pipelines and self._lost_at is None:
            self._lost_at, self._is_prolonged = (len(self._iterations), now_ms), False
            self._iteration_ms = int(self._iteration_ms * self._slowdown)

    def _is_taken_over(self, node: _Node) -> bool:
        if len(node.positions) > 1:
            return False
        pipeline, stage = node.positions[0]
        before = (pipeline, (stage - 1) % NUM_STAGES)
        for other in self._nodes.values():
            if before in other.positions:
                if len(other.positions) > 1:
                    return False
                other.positions.append(node.positions[0])
                return True
        return True

    def _end_iteration(self, now_ms: int) -> None:
        if self._lost_at is not None and not self._is_prolonged and self._lost_at[0] == len(self._iterations):
            more_ms = int((now_ms - self._lost_at[1]) * (self._slowdown - 1))
            self._push(now_ms + more_ms, _EventKind.ITERATION_ENDS)
            self._is_prolonged = True
            return
        self._iterations.append(_Iteration(start_ms=self._last_end_ms))
        self._end_ms = self._last_end_ms = now_ms
        if self._wants_to_meet():
            self._meet(now_ms, _EventKind.MET_LOCALLY)
        else:
            self._push(now_ms + self._iteration_ms, _EventKind.ITERATION_ENDS)

    def _wants_to_meet(self) -> bool:
        doubled = sum(len(node.positions) > 1 for node in self._nodes.values())
        active = self._num_pipelines * NUM_STAGES - doubled
        risky = 2 * doubled / active > LIKELY_AGAIN
        more = (active + self._num_waiting) // NUM_STAGES > self._num_pipelines
        return (doubled > 0 and (self._num_waiting >= doubled or risky)) or more


def restated_average(system: str, model: str, trace: Availability, slowdown: float = SLOWDOWN) -> float:
    """Samples per second of "varuna", "varuna_no_ckpt" or "bamboo" by the published rules and constants.

    `slowdown` is the factor on Bamboo's iterations after a loss.

    Raises:
        ValueError: a system of another name.

    Complexity: O(iterations x (events + log events)).
    """
    name = system.removesuffix("_no_ckpt")
    if system not in ("varuna", "varuna_no_ckpt", "bamboo"):
        raise ValueError(f"no restated rules for {system!r}: want varuna, varuna_no_ckpt or bamboo")
    rates, recovery_times = published_rates(name, model), recovery(name, model)
    samples, recover_ms = (
        float(recovery_times["samples_per_step"]),
        round(1000 * float(recovery_times["recover_s"])),
    )
    if system == "bamboo":
        return _Bamboo(rates, samples, recover_ms, slowdown).average(trace)
    save_ms = round(1000 * float(recovery_times["checkpoint_s"]))
    interval = CHECKPOINT_EVERY if system == "varuna" else CHECKPOINT_EVERY_FREE
    return _Varuna(rates, samples, recover_ms, save_ms, interval).average(trace)
