"""Graph-aware 1F1B: one forward one backward on a DAG of stages with unequal numbers of microbatches."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, pairwise
from math import lcm

from workbench.schedule.action import Action, Pass

Time = int | Fraction  # in rounds: one microbatch at the sinks; most are ints, which compare faster
ROUND = 1


@dataclass(frozen=True, slots=True)
class Consumer:
    """A stage that reads another's output; `needs[j]` are the microbatches its microbatch j reads."""

    stage: int
    needs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ScheduleNode:
    """What a schedule needs to know of a stage.

    Args:
        stage: id in the whole plan.
        num_microbatches: with indices 0..n-1.
        backward: [num_microbatches] whether the microbatch has a backward here.
        consumers: stages that read its output.
        weights: [num_microbatches] whether that backward has weight gradients, so a W if split. None: all
            have.
    """

    stage: int
    num_microbatches: int
    backward: tuple[bool, ...]
    consumers: tuple[Consumer, ...] = ()
    weights: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        for name, flags in (("backward", self.backward), ("weights", self.weights)):
            if flags is not None and len(flags) != self.num_microbatches:
                raise ValueError(
                    f"stage {self.stage}: {name} must say one thing per microbatch, "
                    f"got {len(flags)} for {self.num_microbatches} microbatches"
                )

    def trains(self, microbatch: int) -> bool:
        """Whether the microbatch has weight gradients here."""
        return self.backward[microbatch] and (self.weights is None or self.weights[microbatch])


@dataclass(slots=True)
class _Times:
    """Virtual times of one stage's passes."""

    forward: list[Time]
    backward: dict[int, Time]

    @property
    def all(self) -> Iterator[Time]:
        """Times of all passes."""
        return chain(self.forward, self.backward.values())

    def before(self, microbatch: int) -> Time:
        """Return the time of the preceding forward; before the first, one round earlier."""
        return self.forward[microbatch - 1] if microbatch else self.forward[0] - ROUND


def graph_aware_1f1b(
    nodes: Sequence[ScheduleNode], groups: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[Action, ...]]:
    """Return the programs of all groups of stages.

    Sinks run F0 B0 F1 B1 ... in lockstep. Every other stage stays one consumer forward ahead: it
    runs what a consumer's forward j reads while that consumer runs forward j - 1, and a
    microbatch's backward after the last backward of those that read it. So the forwards before
    the first backward are those that the consumers' first n + 1 forwards read, n being the
    consumer's own count, and then forwards alternate with backwards. A chain with equal
    microbatches gets ordinary 1F1B.

    Stages of one group share ranks and their passes are merged in time: in a round, forwards in
    forward order and backwards in reverse. A stage that feeds its own group runs immediately before
    its consumer instead of one forward ahead; unrelated stages of a group are warmed up to the
    depth of the deepest; an unread stage runs beside the stage whose ranks it shares.

    All programs are restrictions of one total order in which every pass comes after its inputs.
    That is why no choice of counts, needs or groups can deadlock.

    Source: Cornstarch (arXiv v1), section 4.1 (modality parallelism), from the 1F1B of Narayanan et al.
        2019, PipeDream, SOSP.
    Differs: the paper assumes equal microbatches in all modules and one stage per group.

    Args:
        nodes: the stages; any order.
        groups: stages that share the same ranks, in forward order. Each stage is in one.

    Returns:
        Per group, its F and B actions in issue order. Equal times: backwards first, then by
        the order of the groups, then by microbatch.

    Raises:
        ValueError: groups are no partition of the stages, needs name microbatches or stages that
            do not exist, or the stages form a cycle.

    Complexity: O(A log A) for A actions plus the size of all needs.
    """
    check_dag(nodes, groups)
    stages = _with_hosts({node.stage: node for node in nodes}, groups)
    position = topological_positions(stages, groups)
    group_of = {stage: group for group in groups for stage in group}
    lead = _lead_of_shallow(stages, groups, position)

    times: dict[int, _Times] = {}
    for stage in sorted(stages, key=position.__getitem__, reverse=True):
        node, mates = stages[stage], group_of[stage]
        forward = _forward_times(node, times, mates)
        if lead.get(stage, 0):
            forward = [time - lead[stage] for time in forward]
        times[stage] = _Times(forward, _backward_times(node, forward, times))
    return {group: _merge(group, times, position) for group in groups}


def _forward_times(node: ScheduleNode, times: dict[int, _Times], group: tuple[int, ...]) -> list[Time]:
    """Return strictly increasing times, none later than the forwards that read them."""
    earliest: dict[int, Time] = {}
    for consumer in node.consumers:
        reader, num_done = times[consumer.stage], 0
        for microbatch, needs in enumerate(consumer.needs):
            num_needed = max(needs, default=-1) + 1
            count = num_needed - num_done
            if count <= 0:
                continue
            start, end = reader.before(microbatch), reader.forward[microbatch]
            shift = 1 if consumer.stage in group else 0  # sharing ranks: just before, not one ahead
            for step in range(count):
                time = _between(start, end, step + shift, count)
                produced = num_done + step
                if produced not in earliest or time < earliest[produced]:
                    earliest[produced] = time
            num_done = num_needed
    forward: list[Time] = []
    for produced in range(node.num_microbatches):
        if produced in earliest:
            forward.append(earliest[produced])
        else:
            forward.append(forward[-1] + ROUND if forward else -ROUND)
    return forward


def _backward_times(node: ScheduleNode, forward: list[Time], times: dict[int, _Times]) -> dict[int, Time]:
    """Return times that are never earlier than the backwards of those that read a microbatch."""
    latest: dict[int, Time] = {}
    for consumer in node.consumers:
        for produced, time in _released(node, consumer, times[consumer.stage]):
            if produced not in latest or time > latest[produced]:
                latest[produced] = time
    backward: dict[int, Time] = {}
    previous: Time | None = None
    for produced in (index for index, has_backward in enumerate(node.backward) if has_backward):
        if produced in latest:
            backward[produced] = latest[produced]
        else:  # has its own loss and no reader: after its forward, in order
            alone = forward[produced] + ROUND
            backward[produced] = alone if previous is None else max(alone, previous)
        previous = backward[produced]
    return backward


def _released(node: ScheduleNode, consumer: Consumer, reader: _Times) -> Iterator[tuple[int, Time]]:
    """Yield (microbatch, time) of what each backward is the last to need, spread up to the next backward."""
    order = sorted(reader.backward, key=lambda microbatch: (reader.backward[microbatch], microbatch))
    last_reader: dict[int, int] = {}
    for microbatch in order:
        for produced in consumer.needs[microbatch]:
            last_reader[produced] = microbatch
    released: dict[int, list[int]] = {}
    for produced in sorted(last_reader):
        if node.backward[produced]:
            released.setdefault(last_reader[produced], []).append(produced)
    ends = [*(reader.backward[following] for _, following in pairwise(order)), None][: len(order)]
    for microbatch, end in zip(order, ends, strict=True):
        start = reader.backward[microbatch]
        members = released.get(microbatch, [])
        for step, produced in enumerate(members):
            yield produced, _between(start, start + ROUND if end is None else end, step, len(members))


def _between(start: Time, end: Time, step: int, num_steps: int) -> Time:
    """Return start + (end - start) step / num_steps; the ends, the common case, without arithmetic."""
    if step == 0:
        return start
    return end if step == num_steps else start + (end - start) * Fraction(step, num_steps)


def _merge(group: tuple[int, ...], times: dict[int, _Times], position: dict[int, int]) -> tuple[Action, ...]:
    parts = lcm(*{time.denominator for stage in group for time in times[stage].all})

    def in_parts(time: Time) -> int:
        """Convert to whole parts of a round, which compare ten times as fast as fractions."""
        return time.numerator * (parts // time.denominator)

    keyed: list[tuple[int, int, int, int, Action]] = []
    for stage in group:
        order_key, stage_times = position[stage], times[stage]
        keyed += [
            (in_parts(time), 1, order_key, microbatch, Action(stage, Pass.F, microbatch))
            for microbatch, time in enumerate(stage_times.forward)
        ]
        keyed += [
            (in_parts(time), 0, -order_key, microbatch, Action(stage, Pass.B, microbatch))
            for microbatch, time in stage_times.backward.items()
        ]
    return tuple(action for *_, action in sorted(keyed))


def _with_hosts(
    stages: dict[int, ScheduleNode], groups: Sequence[tuple[int, ...]]
) -> dict[int, ScheduleNode]:
    """Let the stage whose ranks it shares "read" an unread copy in proportion, which gives it times.

    Copies that depend on a stage that is not idle are left alone, which rules out cycles.
    """
    position = topological_positions(stages, groups)
    order = sorted(stages, key=position.__getitem__)
    idle: set[int] = set()  # runs forward only, for nobody or for idle stages
    for stage in reversed(order):
        readers = [consumer.stage for consumer in stages[stage].consumers if any(consumer.needs)]
        if not any(stages[stage].backward) and idle.issuperset(readers):
            idle.add(stage)
    fed: set[int] = set()  # downstream of a stage that is not idle
    for stage in order:
        if stage not in idle or stage in fed:
            fed.update(consumer.stage for consumer in stages[stage].consumers)

    hosted = dict(stages)
    for group in groups:
        hosts = [stage for stage in group if stage not in idle]
        for stage in group:
            node = stages[stage]
            if hosts and stage in idle - fed and not any(any(consumer.needs) for consumer in node.consumers):
                host = stages[hosts[-1]]
                reads = _in_proportion(node.num_microbatches, host.num_microbatches)
                hosted[stage] = replace(node, consumers=(Consumer(host.stage, reads),))
    return hosted


def _in_proportion(num_own: int, num_reader: int) -> tuple[tuple[int, ...], ...]:
    firsts = [reader * num_own // num_reader for reader in range(num_reader + 1)]
    return tuple(tuple(range(first, end)) for first, end in pairwise(firsts))


def _lead_of_shallow(
    stages: dict[int, ScheduleNode], groups: Sequence[tuple[int, ...]], position: dict[int, int]
) -> dict[int, int]:
    """Return by how many rounds a stage runs ahead to match the deepest unrelated stage of its group."""
    depth: dict[int, int] = {}
    downstream: dict[int, set[int]] = {}  # stages reachable from each stage
    for stage in sorted(stages, key=position.__getitem__, reverse=True):
        readers = [consumer.stage for consumer in stages[stage].consumers]
        depth[stage] = max((depth[reader] + 1 for reader in readers), default=0)
        downstream[stage] = set(readers).union(*(downstream[reader] for reader in readers))
    lead: dict[int, int] = {}
    for group in groups:
        if len(group) > 1 and not any(downstream[stage] & set(group) for stage in group):
            deepest = max(depth[stage] for stage in group)
            lead.update((stage, deepest - depth[stage]) for stage in group)
    return lead


def topological_positions(
    stages: dict[int, ScheduleNode], groups: Sequence[tuple[int, ...]]
) -> dict[int, int]:
    """Order stages with producers first; ties go by the order of the groups."""
    order_in_groups = {
        stage: index for index, stage in enumerate(stage for group in groups for stage in group)
    }
    num_inputs = dict.fromkeys(stages, 0)
    for node in stages.values():
        for consumer in node.consumers:
            num_inputs[consumer.stage] += 1
    ready = [(order_in_groups[stage], stage) for stage, count in num_inputs.items() if count == 0]
    heapq.heapify(ready)
    position: dict[int, int] = {}
    while ready:
        _, stage = heapq.heappop(ready)
        position[stage] = len(position)
        for consumer in stages[stage].consumers:
            num_inputs[consumer.stage] -= 1
            if num_inputs[consumer.stage] == 0:
                heapq.heappush(ready, (order_in_groups[consumer.stage], consumer.stage))
    if len(position) < len(stages):
        stuck = sorted(set(stages) - set(position))
        raise ValueError(f"stages must form no cycle, got one among stages {stuck}")
    return position


def check_dag(nodes: Sequence[ScheduleNode], groups: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError where groups are no partition of the stages, or needs name what does not exist."""
    stages = {node.stage: node for node in nodes}
    grouped = sorted(stage for group in groups for stage in group)
    if len(stages) < len(nodes) or grouped != sorted(stages):
        listed = sorted(node.stage for node in nodes)
        raise ValueError(f"every stage must stand in one group, once: stages {listed}, in groups {grouped}")
    check_needs(stages)


def check_needs(stages: Mapping[int, ScheduleNode]) -> None:
    """Raise ValueError where needs name stages or microbatches that do not exist."""
    for node in stages.values():
        for consumer in node.consumers:
            if consumer.stage not in stages:
                raise ValueError(
                    f"stage {node.stage}: its consumer, stage {consumer.stage}, is not there; "
                    f"stages are {sorted(stages)}"
                )
            num_needs = stages[consumer.stage].num_microbatches
            if len(consumer.needs) != num_needs:
                raise ValueError(
                    f"stage {node.stage}: needs must name one set per microbatch of stage {consumer.stage}, "
                    f"which has {num_needs}, got {len(consumer.needs)}"
                )
            for microbatch, needs in enumerate(consumer.needs):
                for microbatch_read in needs:
                    if not 0 <= microbatch_read < node.num_microbatches:
                        raise ValueError(
                            f"stage {node.stage} has microbatches 0..{node.num_microbatches - 1}, but "
                            f"microbatch {microbatch} of stage {consumer.stage} reads {microbatch_read}"
                        )
