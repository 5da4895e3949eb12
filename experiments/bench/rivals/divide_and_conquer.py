"""GPU-stage mapping by divide and conquer with memoisation, as the Oobleck chapter describes it."""

from collections.abc import Callable

import numpy as np
from numba import njit

from workbench.arrays import Ints
from workbench.elastic.chain import LayerChain
from workbench.elastic.template import Template, TemplateStage

NEVER = np.int64(1) << 60


class GaveUpError(Exception):
    """The caller stopped the search before it finished."""


def divided_template(
    chain: LayerChain, gpus_per_node: int, num_nodes: int, may_go_on: Callable[[], bool] = lambda: True
) -> Template | None:
    """Find the template for a number of nodes by divide and conquer.

    Oobleck chapter, section 2.4.1.2, Eq. 2.1-2.4: layers, stages and GPUs are split in two at once,
    whole nodes first, then GPUs of a node; the answers of both parts give T1, T3 and the slowest stage
    of the whole, and of all splits the one with the least T1 + T2 + T3 is kept, per number of
    stages, layers and GPUs. All stage counts from the nodes' to the layers' are tried.
    Not exact: what a part contributes depends on where the slowest stage lies, so a part with a worse
    time of its own may be the better one. `exact_templates` is.

    Args:
        chain, gpus_per_node: as for `exact_templates`.
        num_nodes: of the template.
        may_go_on: asked between tables, some thousand times; the search has no clock of its own.

    Returns:
        The template, ties to the first split found; None where nothing fits.

    Raises:
        GaveUpError: `may_go_on` said no.

    Complexity: O(stages**2 x layers**3 x nodes**2) for many nodes, O(stages**2 layers**3 M**2) for one;
        four numbers per (GPUs, stages, run of layers) are kept.
    """
    tables = _Tables(chain, gpus_per_node, num_nodes)
    tables.fill_parts(may_go_on)
    return tables.answer()


class _Tables:
    """Tables by level: levels 0..M-1 are 1..M GPUs of one node, level M + n - 2 is n nodes."""

    def __init__(self, chain: LayerChain, gpus_per_node: int, num_nodes: int) -> None:
        self._chain, self._node_gpus, self._num_nodes = chain, gpus_per_node, num_nodes
        num = chain.num_layers
        self._num_levels = gpus_per_node + num_nodes - 1
        self._slots = np.full((self._num_levels, num + 1), -1, np.int64)
        self._todo: list[tuple[int, int]] = []
        for level in range(self._num_levels):
            fewest, most = self._stages(level)
            for stages in range(fewest, min(most, num) + 1):
                self._slots[level, stages] = len(self._todo)
                self._todo.append((level, stages))
        runs, slots = num * (num + 1) // 2, len(self._todo)
        self._where = np.array([num], np.int64)
        self._t1, self._t3 = np.full((slots, runs), NEVER), np.full((slots, runs), NEVER)
        self._slow = np.full((2, slots, runs), NEVER)
        self._place_single_stages()

    def fill_parts(self, may_go_on: Callable[[], bool]) -> None:
        """Solve all subproblems; the largest only for the whole model."""
        num = self._chain.num_layers
        for level, stages in self._todo:
            if not may_go_on():
                raise GaveUpError(f"stopped at {stages} stages on level {level} of {self._num_levels}")
            if stages == 1:
                continue
            slot, splits = int(self._slots[level, stages]), self._splits(level)
            if level == self._num_levels - 1:
                best_split(*self._arrays, splits, slot, stages, 0, num)
            else:
                fill(*self._arrays, splits, slot, stages)

    def answer(self) -> Template | None:
        """Return the best template of the whole model on all nodes over all stage counts."""
        level, num = self._num_levels - 1, self._chain.num_layers
        run = place_of(num, 0, num)
        best, chosen = int(NEVER), 0
        for stages in range(1, num + 1):
            slot = self._slots[level, stages]
            if slot < 0 or self._t1[slot, run] >= NEVER:
                continue
            steady = 3 * stages + int(self._slow[1, slot, run]) - 1
            value = int(self._t1[slot, run] + steady * self._slow[0, slot, run] + self._t3[slot, run])
            if value < best:
                best, chosen = value, stages
        if not chosen:
            return None
        return Template(
            num_nodes=self._num_nodes,
            gpus_per_node=self._node_gpus,
            stages=tuple(self._stages_of(level, chosen, 0, num)),
        )

    def _stages_of(self, level: int, stages: int, first: int, end: int) -> list[TemplateStage]:
        if stages == 1:
            gpus = level + 1
            time_s = self._chain.stage_s(first, end, gpus)
            return [TemplateStage(first=first, end=end, num_gpus=gpus, time_s=time_s)]
        splits = self._splits(level)
        row, left, cut = best_split(*self._arrays, splits, -1, stages, first, end)
        one, two = int(splits[row, 0]), int(splits[row, 1])
        return [*self._stages_of(one, left, first, cut), *self._stages_of(two, stages - left, cut, end)]

    @property
    def _arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        return self._t1, self._t3, self._slow, self._where, self._slots

    def _nodes(self, level: int) -> int:
        return max(1, level - self._node_gpus + 2)

    def _stages(self, level: int) -> tuple[int, int]:
        """Fewest and most stages: no stage spans nodes, and each has a GPU."""
        if level < self._node_gpus:
            return 1, level + 1
        return self._nodes(level), self._nodes(level) * self._node_gpus

    def _splits(self, level: int) -> Ints:
        """Pairs of levels that a level may be cut into: GPUs of a node, or whole nodes."""
        if level < self._node_gpus:
            pairs = [(gpus - 1, level - gpus) for gpus in range(1, level + 1)]
        else:
            nodes, whole = self._nodes(level), self._node_gpus - 2
            pairs = [(whole + one, whole + nodes - one) for one in range(1, nodes)]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _place_single_stages(self) -> None:
        units, reach, num = self._chain.units(), self._chain.reaches(), self._chain.num_layers
        for index, width in enumerate(self._chain.widths):
            if width > self._node_gpus:
                break
            slot = self._slots[width - 1, 1]
            for first in range(num):
                for end in range(first + 1, int(reach[index, first]) + 1):
                    run = place_of(num, first, end)
                    time = units[index, end] - units[index, first]
                    self._t1[slot, run] = self._t3[slot, run] = time
                    self._slow[0, slot, run], self._slow[1, slot, run] = time, 0


@njit(cache=True)  # type: ignore[untyped-decorator]
def place_of(num_layers: int, first: int, end: int) -> int:
    """Index of layers first..end-1 in a table of all runs."""
    return first * num_layers - first * (first - 1) // 2 + end - first - 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill(  # noqa: PLR0913, PLR0917  (tables of one struct of arrays)
    t1: Ints, t3: Ints, slow: Ints, where: Ints, slots: Ints, splits: Ints, slot: int, num_stages: int
) -> None:
    """Fill every run of layers of one (GPUs, stages) with the best split into two smaller problems.

    Complexity: O(splits x stages x layers**3 / 6).
    """
    num_layers = where[0]
    for first in range(num_layers - num_stages + 1):
        for end in range(first + num_stages, num_layers + 1):
            best_split(t1, t3, slow, where, slots, splits, slot, num_stages, first, end)


@njit(cache=True)  # type: ignore[untyped-decorator]
def best_split(  # noqa: PLR0913, PLR0917
    t1: Ints,
    t3: Ints,
    slow: Ints,
    where: Ints,
    slots: Ints,
    splits: Ints,
    slot: int,
    num_stages: int,
    first: int,
    end: int,
) -> tuple[int, int, int]:
    """Write a run's T1, T3 and slowest stage, and return the split (row of `splits`, stages, layer).

    Args:
        t1, t3: [slots][runs]; slow: [2][slots][runs] the slowest stage's units and index.
        where: [1] layers. slots: [levels][stages + 1] slot of a level and stage count, -1 without.
        splits: [X][2] levels that the GPUs may be cut into.
    """
    num_layers = where[0]
    best, chosen = NEVER, (-1, 0, 0)
    values = (NEVER, NEVER, NEVER, NEVER)
    for row in range(splits.shape[0]):
        for left in range(1, num_stages):
            one, two = slots[splits[row, 0], left], slots[splits[row, 1], num_stages - left]
            if one < 0 or two < 0:
                continue
            for cut in range(first + left, end - (num_stages - left) + 1):
                a, b = place_of(num_layers, first, cut), place_of(num_layers, cut, end)
                if t1[one, a] >= NEVER or t1[two, b] >= NEVER:
                    continue
                total = t1[one, a] + t1[two, b]
                if slow[0, one, a] > slow[0, two, b]:
                    longest, index, tail = slow[0, one, a], slow[1, one, a], t3[one, a] + t1[two, b]
                else:
                    longest, index, tail = slow[0, two, b], slow[1, two, b] + left, t3[two, b]
                value = total + (3 * num_stages + index - 1) * longest + tail
                if value < best:
                    best, chosen = value, (row, left, cut)
                    values = (total, tail, longest, index)
    if slot >= 0:
        run = place_of(num_layers, first, end)
        t1[slot, run], t3[slot, run] = values[0], values[1]
        slow[0, slot, run], slow[1, slot, run] = values[2], values[3]
    return chosen
