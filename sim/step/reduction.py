"""Gradient all-reduces: every rank has a lane for them, every group is a rendezvous of its ranks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import isnan, nan
from types import MappingProxyType
from typing import Protocol

from simpy.core import Environment

from sim.clock import after
from sim.step.exchange import ExchangeNames
from workbench.elastic.layerwise import LastBackward
from workbench.plan.lowered import Lowered
from workbench.schedule.action import Action, Pass


class Group:
    """One all-reduce: starts when all its ranks are at it, holds them until it ends."""

    __slots__ = ("duration_s", "index", "missing", "ranks")

    def __init__(self, index: int | None, ranks: Sequence[int], duration_s: float = 0.0) -> None:
        self.index = index
        self.ranks = ranks
        self.missing = len(ranks)
        self.duration_s = duration_s


class Reduction:
    """A REDUCE_GRAD on one rank: its groups in issue order."""

    __slots__ = ("action", "end_s", "groups", "missing", "num_done", "num_issued", "num_joined", "start_s")

    def __init__(self, action: Action, groups: Sequence[Group], missing: int = 0) -> None:
        self.action = action
        self.groups = groups
        self.missing = missing  # exchanges that reduce-scatter the gradients it adds up
        self.num_issued = self.num_joined = self.num_done = 0
        self.start_s = nan
        self.end_s = nan

    @property
    def has_ended(self) -> bool:
        return not isnan(self.end_s)

    @property
    def is_issued(self) -> bool:
        """Its current group may be joined, or is."""
        return self.missing == 0 and self.num_done < self.num_issued

    @property
    def current(self) -> Group:
        return self.groups[self.num_done]


class ReduceLanes:
    """Runs REDUCE_GRADs beside the passes, each rank's in program order.

    Those that add up parts of sharded weights begin when the parts have been scattered.

    `duration_s[action]` is the price of a whole REDUCE_GRAD on the rank of its stage that
    reduces most. Each group takes its part of that, in proportion to its elements; where
    stages of several replicas give a group different parts, all its ranks take the longest.
    A REDUCE_GRAD that no group belongs to holds each of its ranks for the whole price.

    Args:
        env: the clock.
        lowered: programs, groups and which REDUCE_GRAD covers which.
        duration_s: price of each action.
        reduced: called with a rank whenever one of its REDUCE_GRADs ends.
        overlapped: REDUCE_GRAD -> the backward in which its groups become whole one by one; each is then
            joined as soon as it is whole, in issue order. Others wait for that backward's end.
    """

    def __init__(
        self,
        env: Environment,
        lowered: Lowered,
        duration_s: Mapping[Action, float],
        reduced: Callable[[int], None],
        overlapped: Mapping[Action, LastBackward] = MappingProxyType({}),
    ) -> None:
        self._env = env
        self._reduced = reduced
        groups = priced_groups(lowered, duration_s)
        names = ExchangeNames(lowered)
        self.lanes: dict[int, list[Reduction]] = {}
        self._waiting: dict[
            Action, list[tuple[int, Reduction]]
        ] = {}  # by exchange: rank and what waits for it
        for program in lowered.plan.programs:
            sums = (action for action in program.actions if action.kind is Pass.REDUCE_GRAD)
            actions = [action for action in sums if not names.is_one(action)]
            awaited = names.awaited(program.actions) if actions else {}
            for rank in program.ranks if actions else ():
                self.lanes[rank] = lane = []
                for action in actions:
                    waits = awaited.get(action, ())
                    joined = _joined(lowered, rank, action, groups, duration_s)
                    lane.append(Reduction(action, joined, len(waits)))
                    for name in waits:
                        self._waiting.setdefault(name, []).append((rank, lane[-1]))
                _check_once(rank, lane)
        self._position = dict.fromkeys(self.lanes, 0)
        self._in_backward = self._within(overlapped, lowered)

    def issue(self, rank: int, nth: int) -> None:
        """The passes before the rank's nth REDUCE_GRAD have ended."""
        self._issue(rank, self.lanes[rank][nth], len(self.lanes[rank][nth].groups))

    def exchanged(self, name: Action) -> None:
        """A gather or a reduction of sharded weights has ended."""
        for rank, reduction in self._waiting.get(name, ()):
            reduction.missing -= 1
            self._look(rank, reduction)

    def began(self, action: Action, duration_s: float) -> None:
        """A pass has begun, which nothing will slow down."""
        for rank, reduction, shares in self._in_backward.get(action, ()):
            for place, share in enumerate(shares, start=1):
                after(self._env, share * duration_s, self._whole, (rank, reduction, place))

    def _whole(self, arrived: tuple[int, Reduction, int]) -> None:
        self._issue(*arrived)

    def _issue(self, rank: int, reduction: Reduction, num_groups: int) -> None:
        """The first groups of a reduction may be joined."""
        reduction.num_issued = max(reduction.num_issued, num_groups)
        self._look(rank, reduction)

    def _look(self, rank: int, reduction: Reduction) -> None:
        """Join the reduction's current group if it is the rank's turn to."""
        lane, position = self.lanes[rank], self._position[rank]
        if position < len(lane) and lane[position] is reduction:
            self._join(reduction)

    def _within(
        self, overlapped: Mapping[Action, LastBackward], lowered: Lowered
    ) -> dict[Action, list[tuple[int, Reduction, Sequence[float]]]]:
        """Backward -> (rank, its reduction, by group the share of the backward after which it is whole)."""
        found: dict[Action, list[tuple[int, Reduction, Sequence[float]]]] = {}
        for rank, lane in self.lanes.items():
            for reduction in lane:
                overlap = overlapped.get(reduction.action)
                if overlap is None or reduction.groups[0].index is None:
                    continue
                share = dict(zip(lowered.reductions[reduction.action], overlap.shares, strict=True))
                mine = [share[group.index] for group in reduction.groups if group.index is not None]
                found.setdefault(overlap.backward, []).append((rank, reduction, list(accumulate(mine, max))))
        return found

    def _join(self, reduction: Reduction) -> None:
        """Be at the current group, if it may be joined and was not yet."""
        if reduction.num_joined > reduction.num_done or not reduction.is_issued:
            return
        reduction.num_joined += 1
        group = reduction.current
        group.missing -= 1
        if group.missing == 0:
            for rank in group.ranks:
                current = self.lanes[rank][self._position[rank]]
                if isnan(current.start_s):
                    current.start_s = self._env.now
            after(self._env, group.duration_s, self._end, group)

    def _end(self, group: Group) -> None:
        for rank in group.ranks:
            lane = self.lanes[rank]
            reduction = lane[self._position[rank]]
            reduction.num_done += 1
            if reduction.num_done < len(reduction.groups):
                self._join(reduction)
                continue
            reduction.end_s = self._env.now
            self._position[rank] += 1
            self._reduced(rank)
            if self._position[rank] < len(lane):
                self._join(lane[self._position[rank]])


def priced_groups(lowered: Lowered, duration_s: Mapping[Action, float]) -> dict[int, Group]:
    """Every gradient group, with its part of the price of the REDUCE_GRADs that it belongs to."""
    groups = {group.index: Group(group.index, group.ranks) for group in lowered.groups}
    elements = {group.index: group.num_elements for group in lowered.groups}
    stages = lowered.plan.stage
    for action, indices in lowered.reductions.items():
        if action not in duration_s:
            continue
        of_rank = dict.fromkeys(stages[action.stage or 0].flat_ranks, 0)
        for index in indices:
            for rank in groups[index].ranks:
                if rank in of_rank:
                    of_rank[rank] += elements[index]
        most = max(of_rank.values())
        for index in indices:
            part_s = duration_s[action] * (elements[index] / most) if most else 0.0
            groups[index].duration_s = max(groups[index].duration_s, part_s)
    return groups


class HasRanks(Protocol):
    """A gradient group, as far as membership goes."""

    @property
    def ranks(self) -> Sequence[int]: ...


def groups_of(indices: Sequence[int], groups: Mapping[int, HasRanks], rank: int) -> list[int | None]:
    """Groups that a rank reduces in a REDUCE_GRAD over `indices`; [None] where it has none there."""
    return [index for index in indices if rank in groups[index].ranks] or [None]


def _joined(
    lowered: Lowered,
    rank: int,
    action: Action,
    groups: Mapping[int, Group],
    duration_s: Mapping[Action, float],
) -> list[Group]:
    alone_s = 0.0 if action in lowered.reductions else duration_s[action]
    indices = groups_of(lowered.reductions.get(action, ()), groups, rank)
    return [Group(None, (rank,), alone_s) if index is None else groups[index] for index in indices]


def _check_once(rank: int, lane: Sequence[Reduction]) -> None:
    holder: dict[int, Action] = {}
    for reduction in lane:
        for group in reduction.groups:
            if group.index in holder:
                raise ValueError(
                    f"rank {rank}: gradient group {group.index} must be reduced once, "
                    f"it stands in {holder[group.index]} and {reduction.action}"
                )
            if group.index is not None:
                holder[group.index] = reduction.action
