"""All passes of a DAG of stages and what each waits for: the tables that schedulers work on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workbench.schedule.action import Action, Pass
from workbench.schedule.graph_aware import Consumer, ScheduleNode, topological_positions
from workbench.schedule.precedence import longest_path

Group = tuple[int, ...]
Programs = Mapping[Group, Sequence[Action]]


def one_unit(action: Action) -> float:
    """F = I = W = 1, and B is I and W."""
    return 2.0 if action.kind is Pass.B else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassGraph:
    """Passes by number, with their places, durations and inputs.

    Args:
        actions: [A] the passes.
        number: pass -> its number.
        inputs: [A] numbers of the passes whose results it needs: forwards that it reads, its own
            forward, the input gradients of those that read it, for W its own I.
        followers: [A] the other way round.
        duration: [A] how long it takes, in any one unit.
        groups: stages that share ranks.
        group_of: stage -> place of its group.
        position: stage -> place in an order with producers first.
        nodes: stage -> what the scheduler knows of it.
    """

    actions: tuple[Action, ...]
    number: dict[Action, int]
    inputs: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    duration: tuple[float, ...]
    groups: tuple[Group, ...]
    group_of: dict[int, int]
    position: dict[int, int]
    nodes: dict[int, ScheduleNode]

    def exists(self, action: Action) -> bool:
        """Whether the stage has this pass of this microbatch."""
        return action in self.number


def pass_graph(
    nodes: Sequence[ScheduleNode],
    groups: Sequence[Group],
    duration: Callable[[Action], float],
    *,
    backward: Pass,
    whole: Collection[Action] = (),
) -> PassGraph:
    """The passes of these stages.

    Args:
        backward: B (whole) or I (split, with W where weights train).
        whole: B that stay whole where the others are split.

    Complexity: O(passes + size of all needs).
    """
    by_stage = {node.stage: node for node in nodes}
    actions = [action for node in nodes for action in _passes(node, backward, whole)]
    number = {action: index for index, action in enumerate(actions)}
    inputs: list[list[int]] = [[] for _ in actions]
    for index, action in enumerate(actions):
        if action.continues is not None:
            inputs[index].append(number[action.continues])
    backwards = {(a.stage, a.microbatch): index for a, index in number.items() if a.kind in (Pass.B, Pass.I)}
    for node in nodes:
        for consumer in node.consumers:
            _add_reads(node.stage, consumer, number, backwards, inputs)
    followers: list[list[int]] = [[] for _ in actions]
    for index, needed in enumerate(inputs):
        for earlier in needed:
            followers[earlier].append(index)
    return PassGraph(
        actions=tuple(actions),
        number=number,
        inputs=tuple(map(tuple, inputs)),
        followers=tuple(map(tuple, followers)),
        duration=tuple(float(duration(action)) for action in actions),
        groups=tuple(groups),
        group_of={stage: index for index, group in enumerate(groups) for stage in group},
        position=topological_positions(by_stage, groups),
        nodes=by_stage,
    )


def _add_reads(
    stage: int,
    consumer: Consumer,
    number: Mapping[Action, int],
    backwards: Mapping[tuple[int | None, int | None], int],
    inputs: list[list[int]],
) -> None:
    """Forwards wait for what they read, backwards for those of the forwards that read them."""
    for reader, needs in enumerate(consumer.needs):
        reads = number[Action(consumer.stage, Pass.F, reader)]
        gives = backwards.get((consumer.stage, reader))
        for own in needs:
            inputs[reads].append(number[Action(stage, Pass.F, own)])
            takes = backwards.get((stage, own))
            if gives is not None and takes is not None:
                inputs[takes].append(gives)


def _passes(node: ScheduleNode, backward: Pass, whole: Collection[Action]) -> list[Action]:
    found = [Action(node.stage, Pass.F, own) for own in range(node.num_microbatches)]
    for own, has_backward in enumerate(node.backward):
        in_one = Action(node.stage, Pass.B, own)
        if has_backward and (backward is Pass.B or in_one in whole):
            found.append(in_one)
        elif has_backward:
            found.append(Action(node.stage, Pass.I, own))
            if node.trains(own):
                found.append(Action(node.stage, Pass.W, own))
    return found


def finish_time(graph: PassGraph, programs: Programs) -> float:
    """When the last pass ends if each starts as soon as its group is free and its inputs are there.

    Raises:
        ValueError: programs in which some pass can never run.

    Complexity: O(passes + inputs).
    """
    starts = start_times(graph, programs)
    return max((start + graph.duration[index] for index, start in starts.items()), default=0.0)


def start_times(graph: PassGraph, programs: Programs) -> dict[int, float]:
    """When each pass starts, by its number, in an order in which every pass comes after its inputs.

    Raises:
        ValueError: programs in which some pass can never run.

    Complexity: O(passes + inputs).
    """
    after: list[list[int]] = [[] for _ in graph.actions]
    for actions in programs.values():
        for earlier, later in pairwise(graph.number[action] for action in actions):
            after[earlier].append(later)
    followers = [(*needing, *next_up) for needing, next_up in zip(graph.followers, after, strict=True)]
    start = longest_path(followers, graph.duration)
    if len(start) < len(graph.actions):
        stuck = next(action for index, action in enumerate(graph.actions) if index not in start)
        raise ValueError(f"pass {stuck} can never run: its inputs wait for it")
    return start


def peak_in_flight(programs: Programs, stages: Sequence[int]) -> float:
    """Most microbatches whose activations any group holds at once for these stages.

    A microbatch counts from its F to its W, to its I or B where it has no W, and not at all where
    it has no backward; on one of several of the stages in a group it counts its share.
    """
    worst = 0.0
    for group, actions in programs.items():
        mine = [stage for stage in group if stage in stages]
        if not mine:
            continue
        last = {(a.stage, a.microbatch): a for a in actions if a.stage in mine and a.kind is not Pass.F}
        held = 0
        for action in actions:
            key = action.stage, action.microbatch
            if key not in last:
                continue
            if action.kind is Pass.F:
                held += 1
                worst = max(worst, held / len(mine))
            elif last[key] == action:
                held -= 1
    return worst
