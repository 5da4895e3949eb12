"""List scheduling of passes in time: what a group does next is decided when it becomes free."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from workbench.schedule.action import Action, Pass
from workbench.schedule.pass_graph import Group, PassGraph

_ROUNDING = 1e-9  # shares of a microbatch are fractions


@dataclass(frozen=True, slots=True, kw_only=True)
class PassChain:
    """Stages of one replica of a module, and how they are to be scheduled.

    Args:
        stages: in layer order.
        limit: most that a group may hold for the chain. A microbatch is held from its forward to its
            last pass, or, without a backward, until it is read. None: no limit.
        sizes: what a microbatch on a stage counts, say in bytes. Empty: all of the chain's stages in
            one group together count one, so that the limit is in microbatches.
        order: the whole order of the chain's passes in each group, where it is given.
        just_in_time: forwards wait until a reader is at the forward before the one that needs them.
    """

    stages: tuple[int, ...]
    limit: float | None = None
    sizes: Mapping[int, float] = field(default_factory=dict)
    order: Mapping[Group, Sequence[Action]] = field(default_factory=dict)
    just_in_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Tie-breaking of the scheduler.

    Args:
        deep_first: of several forwards, the one nearest to the loss first; else the farthest.
        patience: a weight gradient does not start when a known arrival comes within this share of
            its duration.
    """

    deep_first: bool = True
    patience: float = 0.0


def list_schedule(
    graph: PassGraph, chains: Sequence[PassChain], policy: Policy
) -> dict[Group, tuple[Action, ...]]:
    """Programs of all groups: the order in which passes start when time runs.

    A free group does the first of these that is possible: the next pass of a given order; the
    backward that has waited longest; a forward within its limit and its turn; a weight gradient;
    a forward that nobody reads. A limit keeps room for the later stages of the same chain in the
    group. When nothing at all can start, the possible forward nearest to the loss starts in spite
    of its limit.

    Every pass starts after its inputs have ended, so the order of starts is a total order of which
    all programs are restrictions: nothing can deadlock.

    Raises:
        ValueError: given orders that wait for each other.

    Complexity: O(A log A) for A passes, times the stages of a group.
    """
    run = _Run(graph, chains, policy)
    run.play()
    return {group: tuple(started) for group, started in zip(graph.groups, run.started, strict=True)}


class _Place:
    """One group's queues."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages  # without a given order, in the order in which their forwards are tried
        self.orders: list[tuple[int, ...]] = []
        self.done: list[int] = []  # of each order
        self.backwards: list[tuple[float, int, int]] = []  # (ready, -microbatch order, number)
        self.weights: list[tuple[int, int]] = []
        self.arrivals: list[tuple[float, int]] = []  # (end of its last running input, number)
        self.busy = False


class _Run:
    def __init__(self, graph: PassGraph, chains: Sequence[PassChain], policy: Policy) -> None:
        self.started: list[list[Action]] = [[] for _ in graph.groups]
        self._graph, self._chains, self._policy = graph, chains, policy
        self._missing = [len(needed) for needed in graph.inputs]
        self._unread = [self._readers(number) for number in range(len(graph.actions))]
        self._chain_of = {stage: index for index, chain in enumerate(chains) for stage in chain.stages}
        self._next = dict.fromkeys(graph.nodes, 0)
        self._held: dict[tuple[int, int], float] = {}
        self._share, self._room = self._shares()
        self._wanted = {stage: self._prefixes(stage) for stage in graph.nodes}
        self._places = self._set_up()
        self._ends: list[tuple[float, int]] = []
        self._now = 0.0
        self._touched = list(range(len(graph.groups)))

    def play(self) -> None:
        left = len(self._graph.actions)
        while left:
            self._decide()
            if not self._ends:
                self._force()
                continue
            self._now = self._ends[0][0]
            while self._ends and self._ends[0][0] == self._now:
                _, number = heapq.heappop(self._ends)
                if number < 0:
                    self._touch(-1 - number)
                else:
                    self._end(number)
                    left -= 1

    def _set_up(self) -> list[_Place]:
        graph, sign = self._graph, -1 if self._policy.deep_first else 1
        ordered = {a.stage for chain in self._chains for actions in chain.order.values() for a in actions}
        places = []
        for group in graph.groups:
            free = [stage for stage in group if stage not in ordered]
            state = _Place(sorted(free, key=lambda stage: sign * graph.position[stage]))
            for chain in self._chains:
                if group in chain.order:
                    state.orders.append(tuple(graph.number[action] for action in chain.order[group]))
                    state.done.append(0)
            places.append(state)
        self._ordered = ordered
        return places

    def _shares(self) -> tuple[dict[int, float], dict[int, float]]:
        """Stage -> what a microbatch on it counts, and on it and the later stages of its chain beside it."""
        share: dict[int, float] = {}
        room: dict[int, float] = {}
        for chain in self._chains:
            beside: dict[int, list[int]] = {}
            for stage in chain.stages:
                beside.setdefault(self._graph.group_of[stage], []).append(stage)
            for stages in beside.values():
                after = 0.0
                for stage in reversed(stages):
                    share[stage] = chain.sizes.get(stage, 1 / len(stages))
                    after += share[stage]
                    room[stage] = after
        return share, room

    def _prefixes(self, stage: int) -> list[tuple[int, list[int]]]:
        """Per reader: its stage, and how many own forwards its first j + 1 forwards need."""
        return [
            (consumer.stage, list(accumulate((max(needs, default=-1) + 1 for needs in consumer.needs), max)))
            for consumer in self._graph.nodes[stage].consumers
        ]

    def _readers(self, number: int) -> int:
        """Forwards that read this forward, where it is not kept for a backward."""
        action = self._graph.actions[number]
        kinds = [self._graph.actions[later].kind for later in self._graph.followers[number]]
        return len(kinds) if action.kind is Pass.F and all(kind is Pass.F for kind in kinds) else -1

    # Time

    def _touch(self, group: int) -> None:
        heapq.heappush(self._touched, group)

    def _decide(self) -> None:
        """Let every group that may have something to do choose, lowest first, until none starts anything."""
        while self._touched:
            group = heapq.heappop(self._touched)
            if self._places[group].busy:
                continue
            number = self._choice(group)
            if number is not None:
                self._start(group, number)

    def _start(self, group: int, number: int) -> None:
        graph, action = self._graph, self._graph.actions[number]
        self._places[group].busy = True
        self.started[group].append(action)
        end = self._now + graph.duration[number]
        heapq.heappush(self._ends, (end, number))
        for later in graph.followers[number]:
            if self._missing[later] == 1:
                heapq.heappush(self._places[self._group(later)].arrivals, (end, later))
        if action.kind is Pass.F:
            self._next[_stage(action)] += 1
            self._hold(action, 1)
            for earlier in graph.inputs[number]:
                self._touch(self._group(earlier))  # a producer may be waiting for its turn

    def _end(self, number: int) -> None:
        graph, action = self._graph, self._graph.actions[number]
        group = self._group(number)
        self._places[group].busy = False
        self._touch(group)
        self._release(number, action)
        for later in graph.followers[number]:
            self._missing[later] -= 1
            if self._missing[later] == 0:
                self._ready(later)

    def _ready(self, number: int) -> None:
        action, group = self._graph.actions[number], self._group(number)
        self._touch(group)
        if action.stage in self._ordered or action.kind is Pass.F:
            return
        state = self._places[group]
        if action.kind is Pass.W:
            heapq.heappush(state.weights, (action.microbatch or 0, number))
        else:
            heapq.heappush(state.backwards, (self._now, action.microbatch or 0, number))

    def _force(self) -> None:
        """Nothing runs and nothing may start: let a forward pass its limit."""
        possible = [
            (self._graph.position[stage], number)
            for state in self._places
            for stage in state.stages
            if (number := self._next_forward(stage)) is not None
        ]
        if not possible:
            waiting = next(
                a for a, missing in zip(self._graph.actions, self._missing, strict=True) if missing
            )
            raise ValueError(f"pass {waiting} can never run: the given orders wait for each other")
        _, number = max(possible)
        self._start(self._group(number), number)

    # Memory

    def _hold(self, action: Action, sign: int) -> None:
        stage = _stage(action)
        key = self._chain_of[stage], self._graph.group_of[stage]
        self._held[key] = self._held.get(key, 0.0) + sign * self._share[stage]

    def _release(self, number: int, action: Action) -> None:
        """Give back what this pass was the last to need."""
        if action.kind is Pass.F:
            if self._unread[number] == 0:
                self._hold(action, -1)
            for earlier in self._graph.inputs[number]:
                self._unread[earlier] -= 1
                if self._unread[earlier] == 0:
                    self._hold(self._graph.actions[earlier], -1)
                    self._touch(self._group(earlier))
        elif action.kind is not Pass.I or not self._graph.exists(action._replace(kind=Pass.W)):
            self._hold(action, -1)

    # Choice

    def _choice(self, group: int) -> int | None:
        state = self._places[group]
        for index, order in enumerate(state.orders):
            done = state.done[index]
            if done < len(order) and self._missing[order[done]] == 0:
                state.done[index] += 1
                return order[done]
        if state.backwards:
            return heapq.heappop(state.backwards)[-1]
        forward = self._forward(state)
        if forward is not None and not self._is_idle(forward):
            return forward
        if state.weights:
            if self._waits(group, state):
                return None
            return heapq.heappop(state.weights)[-1]
        return forward

    def _forward(self, place: _Place) -> int | None:
        """The first possible one that somebody reads or that has a backward, else any possible one."""
        idle = None
        for stage in place.stages:
            number = self._next_forward(stage)
            if number is None or not self._may(stage):
                continue
            if not self._is_idle(number):
                return number
            idle = number if idle is None else idle
        return idle

    def _next_forward(self, stage: int) -> int | None:
        """The stage's next forward, if its inputs are there."""
        own = self._next[stage]
        if own == self._graph.nodes[stage].num_microbatches:
            return None
        number = self._graph.number[Action(stage, Pass.F, own)]
        return number if self._missing[number] == 0 else None

    def _may(self, stage: int) -> bool:
        """Whether the next forward is within its limit and its turn has come."""
        index = self._chain_of[stage]
        chain = self._chains[index]
        if chain.limit is not None:
            held = self._held.get((index, self._graph.group_of[stage]), 0.0)
            if held + self._room[stage] > chain.limit + _ROUNDING:
                return False
        return not chain.just_in_time or self._is_due(stage)

    def _is_due(self, stage: int) -> bool:
        own, needed = self._next[stage], 0
        for reader, prefix in self._wanted[stage]:
            if not prefix:
                continue
            if own < prefix[min(self._next[reader], len(prefix) - 1)]:
                return True
            needed = max(needed, prefix[-1])
        return own >= needed

    def _is_idle(self, number: int) -> bool:
        return not self._graph.followers[number]

    def _waits(self, group: int, place: _Place) -> bool:
        """Whether something better than a weight gradient is about to arrive; then we come back for it."""
        limit = self._now + self._policy.patience * self._graph.duration[place.weights[0][-1]]
        while place.arrivals and place.arrivals[0][0] <= self._now:
            heapq.heappop(place.arrivals)
        for end, number in place.arrivals:
            action = self._graph.actions[number]
            if end >= limit or action.kind is Pass.W:
                continue
            if action.kind is Pass.F and action.stage not in self._ordered:
                stage = _stage(action)
                if action.microbatch != self._next[stage] or not self._may(stage):
                    continue
            heapq.heappush(self._ends, (end, -1 - group))
            return True
        return False

    def _group(self, number: int) -> int:
        return self._graph.group_of[_stage(self._graph.actions[number])]


def _stage(action: Action) -> int:
    assert action.stage is not None
    return action.stage
