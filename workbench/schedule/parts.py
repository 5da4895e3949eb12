"""A scheduling problem split into independent parts: replicas that share no stage, rank or reader."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from workbench.schedule.action import Action, with_stages
from workbench.schedule.graph_aware import ScheduleNode

Group = tuple[int, ...]
Programs = dict[Group, tuple[Action, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part with its stages renumbered from 0, so that equal parts are equal.

    Args:
        stages: [S] ids in the whole problem, group by group.
        nodes, groups, chains: of the part, with the new numbers; `nodes[s]` is stage s.
    """

    stages: tuple[int, ...]
    nodes: tuple[ScheduleNode, ...]
    groups: tuple[Group, ...]
    chains: tuple[tuple[int, ...], ...]

    @property
    def group_of(self) -> tuple[int, ...]:
        """[S] index of each stage's group."""
        return tuple(index for index, group in enumerate(self.groups) for _ in group)

    def original(self, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Return the actions under the stage ids of the whole problem."""
        return with_stages(actions, lambda stage: None if stage is None else self.stages[stage])

    def original_programs(self, programs: Programs) -> Programs:
        """Return programs under the stage ids of the whole problem."""
        return {
            tuple(self.stages[stage] for stage in group): self.original(actions)
            for group, actions in programs.items()
        }


def part_by_part(
    nodes: Sequence[ScheduleNode],
    groups: Sequence[Group],
    programs_of: Callable[[Sequence[ScheduleNode], Sequence[Group]], Programs],
) -> Programs:
    """Return the programs of all groups, computed part by part; equal parts once."""
    programs_of_shape: dict[tuple[object, ...], Programs] = {}
    programs: Programs = {}
    for part in independent_parts(nodes, groups, ()):
        shape = part.nodes, part.groups
        if shape not in programs_of_shape:
            programs_of_shape[shape] = programs_of(*shape)
        programs |= part.original_programs(programs_of_shape[shape])
    return {group: programs[group] for group in map(tuple, groups)}


def independent_parts(
    nodes: Sequence[ScheduleNode], groups: Sequence[Group], chains: Sequence[tuple[int, ...]]
) -> tuple[Part, ...]:
    """Return the parts, in the order of their first groups; a stage in no chain is a chain of its own.

    Complexity: O(stages + consumers + size of all needs), apart from near-constant look-ups.
    """
    parent = {node.stage: node.stage for node in nodes}

    def root(stage: int) -> int:
        while parent[stage] != stage:
            parent[stage] = parent[parent[stage]]
            stage = parent[stage]
        return stage

    for linked in (*groups, *chains, *((n.stage, *(c.stage for c in n.consumers)) for n in nodes)):
        for stage in linked:
            parent[root(stage)] = root(linked[0])
    by_stage = {node.stage: node for node in nodes}
    groups_of: dict[int, list[Group]] = {}
    for group in groups:
        groups_of.setdefault(root(group[0]), []).append(group)
    chained = {stage for chain in chains for stage in chain}
    chains_of: dict[int, list[tuple[int, ...]]] = {}
    for chain_stages in (*chains, *((node.stage,) for node in nodes if node.stage not in chained)):
        chains_of.setdefault(root(chain_stages[0]), []).append(chain_stages)
    return tuple(_part(by_stage, own_groups, chains_of[first]) for first, own_groups in groups_of.items())


def _part(nodes: dict[int, ScheduleNode], groups: Sequence[Group], chains: Sequence[tuple[int, ...]]) -> Part:
    stages = tuple(stage for group in groups for stage in group)
    number = {stage: index for index, stage in enumerate(stages)}
    renumbered = (
        replace(
            nodes[stage],
            stage=number[stage],
            consumers=tuple(replace(c, stage=number[c.stage]) for c in nodes[stage].consumers),
        )
        for stage in stages
    )
    return Part(
        stages=stages,
        nodes=tuple(renumbered),
        groups=tuple(tuple(number[stage] for stage in group) for group in groups),
        chains=tuple(tuple(number[stage] for stage in chain) for chain in chains),
    )
