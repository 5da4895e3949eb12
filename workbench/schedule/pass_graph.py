"""All passes of a DAG of stages and what each waits for: the tables that schedulers use."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from workbench.schedule.action import Action, Pass
from workbench.schedule.graph_aware import ScheduleNode, topological_positions
from workbench.schedule.list_loop import BACKWARD, FORWARD, WEIGHT, Passes, rows
from workbench.schedule.precedence import longest_path

Group = tuple[int, ...]
Programs = Mapping[Group, Sequence[Action]]


def one_unit(action: Action) -> float:
    """Return unit durations: F = I = W = 1, and B = I + W."""
    return 2.0 if action.kind is Pass.B else 1.0


@dataclass(frozen=True, kw_only=True)
class PassGraph:
    """Passes by number, with their inputs, durations and positions.

    Args:
        actions: [A] the passes.
        inputs: [A] numbers of the passes whose results each needs: forwards that it reads, its own
            forward, the input gradients of those that read it, for W its own I.
        followers: [A] numbers of the passes that need its result.
        duration: [A] in any unit.
        groups: stages that share ranks.
        group_of: stage -> index of its group.
        position: stage -> position in an order with producers first.
        nodes: by stage.
    """

    actions: tuple[Action, ...]
    inputs: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    duration: tuple[float, ...]
    groups: tuple[Group, ...]
    group_of: dict[int, int]
    position: dict[int, int]
    nodes: dict[int, ScheduleNode]

    @cached_property
    def number(self) -> dict[Action, int]:
        """Pass -> its number."""
        return {action: index for index, action in enumerate(self.actions)}

    @cached_property
    def passes(self) -> Passes:
        """The same as arrays, stages by their index in `nodes`."""
        index_of = {stage: index for index, stage in enumerate(self.nodes)}
        stage = np.array([index_of[action.stage or 0] for action in self.actions], np.int64)
        kind = np.array([_CODES[kind] for _, kind, _ in self.actions], np.int64)
        microbatch = np.array([microbatch for _, _, microbatch in self.actions], np.int64)
        inputs, followers = rows(self.inputs), rows(self.followers)
        # Forwards with a backward are held for it; the others only until they are read.
        is_read = kind == FORWARD
        is_read[inputs.values[np.repeat(kind != FORWARD, np.diff(inputs.offsets))]] = False
        num_forwards = np.array([node.num_microbatches for node in self.nodes.values()], np.int64)
        # A W directly follows its I, of the same stage and microbatch.
        is_last = kind != FORWARD
        is_last[:-1] &= kind[1:] != WEIGHT
        return Passes(
            stage=stage,
            kind=kind,
            microbatch=microbatch,
            is_last=is_last,
            reads=np.where(is_read, np.diff(followers.offsets), -1),
            inputs=inputs,
            followers=followers,
            first=np.searchsorted(stage, np.arange(len(num_forwards))),
            num_forwards=num_forwards,
            group=np.array([self.group_of[stage] for stage in self.nodes], np.int64),
            position=np.array([self.position[stage] for stage in self.nodes], np.int64),
        )


_CODES = {Pass.F: FORWARD, Pass.B: BACKWARD, Pass.I: BACKWARD, Pass.W: WEIGHT}


def pass_graph(
    nodes: Sequence[ScheduleNode],
    groups: Sequence[Group],
    duration: Callable[[Action], float],
    *,
    backward: Pass,
    whole: Collection[Action] = (),
) -> PassGraph:
    """Return the passes of these stages.

    Args:
        backward: B (whole) or I (split, with W where weights train).
        whole: B that stay whole while the others are split.

    Complexity: O(passes + size of all needs).
    """
    by_stage = {node.stage: node for node in nodes}
    actions: list[Action] = []
    inputs: list[list[int]] = []
    first: dict[int, int] = {}  # number of a stage's first forward; the others follow
    backwards: dict[int, list[int | None]] = {}  # of a stage's microbatches
    for node in nodes:
        first[node.stage], backwards[node.stage] = len(actions), [None] * node.num_microbatches
        actions += [Action(node.stage, Pass.F, microbatch) for microbatch in range(node.num_microbatches)]
        inputs += [[] for _ in range(node.num_microbatches)]
        for microbatch, has_backward in enumerate(node.backward):
            if not has_backward:
                continue
            whole_backward = Action(node.stage, Pass.B, microbatch)
            is_split = backward is not Pass.B and whole_backward not in whole
            backwards[node.stage][microbatch] = len(actions)
            actions.append(Action(node.stage, Pass.I, microbatch) if is_split else whole_backward)
            inputs.append([first[node.stage] + microbatch])
            if is_split and node.trains(microbatch):
                inputs.append([len(actions) - 1])
                actions.append(Action(node.stage, Pass.W, microbatch))
    for node in nodes:
        for consumer in node.consumers:
            produced = first[node.stage], backwards[node.stage]
            reading = first[consumer.stage], backwards[consumer.stage]
            _add_reads(consumer.needs, produced, reading, inputs)
    followers: list[list[int]] = [[] for _ in actions]
    for index, needed in enumerate(inputs):
        for earlier in needed:
            followers[earlier].append(index)
    return PassGraph(
        actions=tuple(actions),
        inputs=tuple(map(tuple, inputs)),
        followers=tuple(map(tuple, followers)),
        duration=tuple(float(duration(action)) for action in actions),
        groups=tuple(groups),
        group_of={stage: index for index, group in enumerate(groups) for stage in group},
        position=topological_positions(by_stage, groups),
        nodes=by_stage,
    )


_StagePasses = tuple[int, Sequence[int | None]]  # a stage's first forward, and its backwards by microbatch


def _add_reads(
    needs: Sequence[Sequence[int]], producer: _StagePasses, reader: _StagePasses, inputs: Sequence[list[int]]
) -> None:
    """Add inputs: forwards need what they read, backwards the backwards of the forwards that read them."""
    first, backwards = producer
    first_read, reader_backwards = reader
    for microbatch, needed in enumerate(needs):
        reader_backward = reader_backwards[microbatch]
        for produced in needed:
            inputs[first_read + microbatch].append(first + produced)
            own_backward = backwards[produced]
            if reader_backward is not None and own_backward is not None:
                inputs[own_backward].append(reader_backward)


def finish_time(graph: PassGraph, programs: Programs) -> float:
    """Return when the last pass ends if each starts as soon as its group is free and its inputs are ready.

    Raises:
        ValueError: programs in which some pass can never run.

    Complexity: O(passes + inputs).
    """
    starts = start_times(graph, programs)
    return max((start + graph.duration[index] for index, start in starts.items()), default=0.0)


def start_times(graph: PassGraph, programs: Programs) -> dict[int, float]:
    """Return when each pass starts, by number, in an order in which every pass comes after its inputs.

    Raises:
        ValueError: programs in which some pass can never run.

    Complexity: O(passes + inputs).
    """
    next_in_group: list[list[int]] = [[] for _ in graph.actions]
    for actions in programs.values():
        for earlier, later in pairwise(graph.number[action] for action in actions):
            next_in_group[earlier].append(later)
    followers = [
        (*data_followers, *group_followers)
        for data_followers, group_followers in zip(graph.followers, next_in_group, strict=True)
    ]
    start = longest_path(followers, graph.duration)
    if len(start) < len(graph.actions):
        stuck = next(action for index, action in enumerate(graph.actions) if index not in start)
        raise ValueError(f"pass {stuck} can never run: its inputs wait for it")
    return start


def peak_in_flight(programs: Programs, stages: Sequence[int]) -> float:
    """Return the most microbatches whose activations any group holds at once for these stages.

    A microbatch counts from its F to its W, to its I or B if it has no W, and not at all if it has no
    backward; if a group has n of the stages, it counts 1/n on each.
    """
    peak = 0.0
    for group, actions in programs.items():
        own_stages = [stage for stage in group if stage in stages]
        if not own_stages:
            continue
        last = {(a.stage, a.microbatch): a for a in actions if a.stage in own_stages and a.kind is not Pass.F}
        num_held = 0
        for action in actions:
            key = action.stage, action.microbatch
            if key not in last:
                continue
            if action.kind is Pass.F:
                num_held += 1
                peak = max(peak, num_held / len(own_stages))
            elif last[key] == action:
                num_held -= 1
    return peak
