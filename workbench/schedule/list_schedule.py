"""List scheduling of passes in time: a group decides what to do next when it becomes free."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

import numpy as np

from workbench.arrays import Flags, Floats, Ints
from workbench.schedule.action import Action
from workbench.schedule.list_loop import WEIGHT, Rows, Rules, offsets, play, rows
from workbench.schedule.pass_graph import Group, PassGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class PassChain:
    """Stages of one replica of a module, and how they are to be scheduled.

    Args:
        stages: in layer order.
        limit: the most that a group may hold for the chain. A microbatch is held from its forward to its
            last pass, or, without a backward, until it is read. None: no limit.
        sizes: weight of a microbatch on a stage, e.g. bytes. Empty: the chain's stages in one group
            together weigh one, so that the limit is in microbatches.
        order: the complete order of the chain's passes in each group, if given.
        just_in_time: forwards wait until a reader has reached the forward before the one that needs them.
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
        patience: a weight gradient does not start if a known arrival comes within this fraction of
            its duration.
    """

    deep_first: bool = True
    patience: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule:
    """One schedule.

    Args:
        graph: what is scheduled.
        order: [A] numbers of all passes, by start.
        finish: when the last one ends if each starts as soon as its group is free and its inputs are ready.
        peaks: of every chain, the `peak_in_flight` of its stages.
    """

    graph: PassGraph
    order: Ints
    finish: float
    peaks: tuple[float, ...]

    @property
    def programs(self) -> dict[Group, tuple[Action, ...]]:
        """Programs of all groups, as restrictions of the order."""
        graph = self.graph
        started: list[list[Action]] = [[] for _ in graph.groups]
        groups = graph.passes.group[graph.passes.stage[self.order]]
        for number, group in zip(self.order.tolist(), groups.tolist(), strict=True):
            started[group].append(graph.actions[number])
        return {group: tuple(actions) for group, actions in zip(graph.groups, started, strict=True)}


class ListScheduler:
    """Orders the passes of a graph by simulating time.

    A free group does the first of these that is possible: the next pass of a given order; the
    backward that has waited longest; a forward within its limit and its turn; a weight gradient;
    a forward that nobody reads. A limit keeps room for the later stages of the same chain in the
    group. When nothing at all can start, the possible forward nearest to the loss starts in spite
    of its limit.

    Every pass starts after its inputs have ended, so the order of starts is a total order of which
    all programs are restrictions: nothing can deadlock.

    Args:
        graph: the passes; its durations are ignored.
        chains: every stage is in one.
    """

    def __init__(self, graph: PassGraph, chains: Sequence[PassChain]) -> None:
        self._graph, self._pools = graph, _pools(graph, chains)
        self._num_chains = len(chains)
        self._rules = _rules(graph, chains, self._pools)
        self._free = {
            deep_first: _free_stages(graph, self._rules.is_ordered, deep_first=deep_first)
            for deep_first in (True, False)
        }

    def schedules(self, policies: Iterable[Policy], duration: Sequence[float]) -> Iterator[ListSchedule]:
        """Yield a schedule per policy, for passes of these durations; policies without effect are skipped.

        Raises:
            ValueError: given orders that wait for each other.

        Complexity: O(A log A) for A passes, times the stages of a group; compiled.
        """
        has_choice = bool((np.diff(self._free[True].offsets) > 1).any())
        has_weights = bool((self._graph.passes.kind == WEIGHT).any())
        durations = np.array(duration, np.float64)
        distinct = dict.fromkeys(
            (policy.deep_first or not has_choice, policy.patience if has_weights else 0.0)
            for policy in policies
        )
        for deep_first, patience in distinct:
            yield self._schedule(deep_first, patience, durations)

    def _schedule(self, deep_first: bool, patience: float, durations: Floats) -> ListSchedule:  # noqa: FBT001
        graph = self._graph
        order, finish, peaks_held = play(
            graph.passes, self._rules, self._free[deep_first], durations, patience
        )
        if len(order) < len(graph.actions):
            missing = set(range(len(graph.actions))).difference(order.tolist())
            waiting = next(
                action
                for action, needed in zip(graph.actions, graph.inputs, strict=True)
                if not missing.isdisjoint(needed)
            )
            raise ValueError(f"pass {waiting} can never run: the given orders wait for each other")
        chain_peaks = [0.0] * self._num_chains
        for (owner, pool), peak in zip(self._pools, peaks_held.tolist(), strict=False):
            chain_peaks[owner] = max(chain_peaks[owner], peak / len(pool))
        return ListSchedule(graph=graph, order=order, finish=finish, peaks=tuple(chain_peaks))


def _pools(graph: PassGraph, chains: Sequence[PassChain]) -> list[tuple[int, list[int]]]:
    """Return stages of one chain in one group, in layer order, with the chain's index."""
    pools: dict[tuple[int, int], list[int]] = {}
    for index, chain in enumerate(chains):
        for stage in chain.stages:
            pools.setdefault((index, graph.group_of[stage]), []).append(stage)
    return [(index, pool) for (index, _), pool in pools.items()]


def _rules(graph: PassGraph, chains: Sequence[PassChain], pools: Sequence[tuple[int, list[int]]]) -> Rules:
    index_of = {stage: index for index, stage in enumerate(graph.nodes)}
    num_stages = len(index_of)
    pool_of = np.zeros(num_stages, np.int64)
    share, room, limit = (np.zeros(num_stages) for _ in range(3))
    waits_turn, is_ordered = (np.zeros(num_stages, np.bool_) for _ in range(2))
    for number, (owner, stages) in enumerate(pools):
        after = 0.0
        for stage in reversed(stages):
            stage_index, chain = index_of[stage], chains[owner]
            pool_of[stage_index], waits_turn[stage_index] = number, chain.just_in_time
            limit[stage_index] = inf if chain.limit is None else chain.limit
            share[stage_index] = chain.sizes.get(stage, 1 / len(stages))
            after += share[stage_index]
            room[stage_index] = after
    given_orders = [
        [chain.order[group] for chain in chains if group in chain.order] for group in graph.groups
    ]
    orders = rows([[graph.number[action] for action in order] for orders in given_orders for order in orders])
    is_ordered[graph.passes.stage[orders.values]] = True
    consumers = [node.consumers for node in graph.nodes.values()]
    return Rules(
        pool=pool_of,
        share=share,
        room=room,
        limit=limit,
        waits_turn=waits_turn,
        reader=np.array([index_of[c.stage] for readers in consumers for c in readers], np.int64),
        wanted=rows([_prefixes(c.needs) for readers in consumers for c in readers]),
        readers=offsets(consumers),
        is_ordered=is_ordered,
        orders=orders,
        orders_of=offsets(given_orders),
    )


def _prefixes(needs: Sequence[Sequence[int]]) -> list[int]:
    """[j] how many own forwards the first j + 1 forwards of a reader need."""
    return list(accumulate((max(microbatches, default=-1) + 1 for microbatches in needs), max))


def _free_stages(graph: PassGraph, is_ordered: Flags, *, deep_first: bool) -> Rows:
    """Return, by group, its stages without a given order, in the order in which forwards are tried."""
    sign = -1 if deep_first else 1
    index_of = {stage: index for index, stage in enumerate(graph.nodes)}
    return rows(
        [
            [
                index_of[stage]
                for stage in sorted(group, key=lambda stage: sign * graph.position[stage])
                if not is_ordered[index_of[stage]]
            ]
            for group in graph.groups
        ]
    )
