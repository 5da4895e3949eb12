"""Exact mapping of GPUs to stages: the minimum of the planning objective for all node counts at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from workbench.arrays import Ints
from workbench.compiled import compiled
from workbench.elastic.chain import LayerChain
from workbench.elastic.template import Template, TemplateStage

NEVER = np.int64(1) << 60
WIDTH_BITS = 8  # a parent is (layer << 9) | (width << 1) | whether the stage was the slowest
Cuts = tuple[tuple[int, int, int], ...]  # (first layer, end, index of the width), stage by stage


def exact_templates(chain: LayerChain, gpus_per_node: int, node_counts: Iterable[int]) -> dict[int, Template]:
    """The template with the least planned iteration time for each number of nodes.

    Objective: Oobleck chapter, section 2.4.1.2, T1 + T2 + T3 with four microbatches per stage, over the
    number of stages, the cuts between layers and the GPUs of every stage; no stage spans nodes, all GPUs
    are used, memory limits hold. Given the slowest stage's time B, the objective is a sum over stages (w +
    4B before it, 4B for it, 2w + 3B after it), so the rest is a shortest path over (GPUs used, layers
    placed), shared by all node counts. B ranges over the times of all possible stages: a range of them is
    bounded from below by one path search with the range's ends, and halved unless no node count can improve
    within it. Differs: exact. The source's divide and conquer keeps one best answer per subproblem although
    the composition depends on more than its time.

    Args:
        chain: layers with times and bytes by width.
        gpus_per_node: M; widths above M are not used.
        node_counts: of the templates wanted.

    Returns:
        By node count; a count that no template fits is absent.

    Raises:
        ValueError: a node count below 1, or no width that fits into a node.

    Complexity: a path search is O(G x L x W x layers of a stage) for G GPUs; a few dozen of them in
    practice, at worst one per distinct stage time.
    """
    counts = sorted(set(node_counts))
    if not counts or counts[0] < 1:
        raise ValueError(f"node counts must be >= 1, got {counts}")
    if chain.widths[0] > gpus_per_node:
        raise ValueError(
            f"stages of {chain.widths} GPUs do not fit into nodes of {gpus_per_node}: "
            f"want a width of at most {gpus_per_node}"
        )
    search = _Search(chain, gpus_per_node, counts)
    search.run()
    return {num: search.template(num) for num in counts if num in search.best}


@dataclass(frozen=True, slots=True)
class _Range:
    """Candidates first..last for the slowest stage, and the node counts that may improve there."""

    first: int
    last: int
    bounds: tuple[tuple[int, int], ...]  # (node count, no objective in the range is lower)


class _Search:
    """Best-first branch and bound over ranges of the slowest stage's time."""

    def __init__(self, chain: LayerChain, gpus_per_node: int, counts: Sequence[int]) -> None:
        self._chain, self._node_gpus, self._counts = chain, gpus_per_node, counts
        within = sum(width <= gpus_per_node for width in chain.widths)
        self._prefix = np.ascontiguousarray(chain.units()[:within])
        self._reach = np.ascontiguousarray(chain.reaches()[:within])
        self._widths = np.array(chain.widths[:within], np.int64)
        self._candidates = self._stage_units()
        layers = np.diff(self._prefix, axis=1)
        self._least_units = int(layers.min(axis=0).sum())  # of one pass, all layers on their best width
        self._least_gpu_units = int((layers * self._widths[:, None]).min(axis=0).sum())
        self.best: dict[int, int] = {}
        self._cuts: dict[int, Cuts] = {}

    def run(self) -> None:
        """Search until no range can hold a better template for any node count."""
        if not self._candidates.size:
            return
        queue: list[tuple[float, int, _Range]] = []
        whole = _Range(0, self._candidates.size - 1, tuple((num, 0) for num in self._counts))
        heappush(queue, (0.0, 0, whole))
        num_pushed = 1
        while queue:
            for part in self._parts(heappop(queue)[2]):
                urgency = min(bound / self.best.get(num, NEVER) for num, bound in part.bounds)
                heappush(queue, (urgency, num_pushed, part))
                num_pushed += 1

    def template(self, num_nodes: int) -> Template:
        stages = (
            TemplateStage(
                first=first,
                end=end,
                num_gpus=int(self._widths[index]),
                time_s=float(self._prefix[index, end] - self._prefix[index, first]) * self._chain.unit_s,
            )
            for first, end, index in self._cuts[num_nodes]
        )
        return Template(num_nodes=num_nodes, gpus_per_node=self._node_gpus, stages=tuple(stages))

    def _stage_units(self) -> Ints:
        """Distinct times of all stages that memory allows, ascending."""
        num = self._chain.num_layers
        ends = np.arange(num + 1)
        allowed = (ends > np.arange(num)[:, None]) & (ends <= self._reach[:, :, None])
        return np.unique((self._prefix[:, None, :] - self._prefix[:, :-1, None])[allowed])

    def _parts(self, parent: _Range) -> tuple[_Range, ...]:
        """Both halves of a range, or nothing if it cannot hold a better template."""
        active = [(num, bound) for num, bound in parent.bounds if bound < self.best.get(num, NEVER)]
        first, last = self._narrowed(parent, [num for num, _ in active])
        if not active or first > last:
            return ()
        low, high = int(self._candidates[first]), int(self._candidates[last])
        largest = max(num for num, _ in active)
        tables = cheapest(
            self._prefix, self._widths, self._reach, self._node_gpus, largest * self._node_gpus, low, high
        )
        costs = tables[1][:, -1]
        for num, _ in active:
            if costs[num * self._node_gpus] < self.best.get(num, NEVER):
                self._offer(num, self._cuts_of(tables[2], tables[3], num))
        if first == last:
            return ()  # the bound is the objective itself
        bounds = tuple((num, int(costs[num * self._node_gpus])) for num, _ in active)
        improvable = tuple((num, bound) for num, bound in bounds if bound < self.best.get(num, NEVER))
        middle = (first + last) // 2
        return (_Range(first, middle, improvable), _Range(middle + 1, last, improvable)) if improvable else ()

    def _narrowed(self, parent: _Range, nums: Sequence[int]) -> tuple[int, int]:
        """The range without times too short for the work or too long to beat the best so far.

        n nodes do at least the chain's least GPU time, so B >= that / GPUs; and the objective is at least
        one pass + 3 n B, as there are at least n stages.
        """
        if not nums:
            return 1, 0
        shortest = min(-(-self._least_gpu_units // (num * self._node_gpus)) for num in nums)
        longest = max((self.best.get(num, NEVER) - self._least_units) // (3 * num) for num in nums)
        first = int(np.searchsorted(self._candidates, shortest, side="left"))
        last = int(np.searchsorted(self._candidates, longest, side="right")) - 1
        return max(parent.first, first), min(parent.last, last)

    def _offer(self, num_nodes: int, cuts: Cuts) -> None:
        value = objective([int(self._prefix[p, end] - self._prefix[p, first]) for first, end, p in cuts])
        if value < self.best.get(num_nodes, NEVER):
            self.best[num_nodes] = value
            self._cuts[num_nodes] = cuts

    def _cuts_of(self, before: NDArray[np.int32], after: NDArray[np.int32], num_nodes: int) -> Cuts:
        """Follow the parents back from all layers on all GPUs."""
        used, end, table = num_nodes * self._node_gpus, self._chain.num_layers, after
        cuts = []
        while end:
            code = int(table[used, end])
            first, index = code >> (WIDTH_BITS + 1), (code >> 1) & ((1 << WIDTH_BITS) - 1)
            cuts.append((first, end, index))
            if table is after and code & 1:
                table = before
            used, end = used - int(self._widths[index]), first
        return tuple(reversed(cuts))


def objective(stage_units: Sequence[int]) -> int:
    """T1 + T2 + T3 with four microbatches per stage; of equally slow stages the last counts."""
    longest = max(stage_units)
    slowest = len(stage_units) - 1 - list(stage_units)[::-1].index(longest)
    return sum(stage_units) + (3 * len(stage_units) + slowest - 1) * longest + sum(stage_units[slowest:])


@compiled
def cheapest(  # noqa: C901, PLR0912  (one pass over shared arrays)
    prefix: Ints, widths: Ints, reach: Ints, node_gpus: int, num_gpus: int, low: int, high: int
) -> tuple[Ints, Ints, NDArray[np.int32], NDArray[np.int32]]:
    """Least costs of reaching (GPUs used, layers placed) before and after the slowest stage.

    A stage before the slowest costs w + 4 low, the slowest 2 w + 2 low, one after it 2 w + 3 low, where w
    <= high for all and w >= low for the slowest; with low == high, stages after it are below that. For low
    == high the cost of (n nodes, all layers) is the objective of the best template with that bottleneck,
    and in general it is a lower bound for all bottlenecks in low..high.

    Args:
        prefix: [W][L + 1] units of the first layers.
        widths: [W] GPUs.
        reach: [W][L] furthest end of a stage, from memory.
        node_gpus, num_gpus: of a node, and of the largest pipeline.

    Returns:
        [G + 1][L + 1] costs before and after the slowest stage, then their parents.

    Complexity: O(G x L x W x layers of a stage).
    """
    num_layers = prefix.shape[1] - 1
    before = np.full((num_gpus + 1, num_layers + 1), NEVER)
    after = np.full((num_gpus + 1, num_layers + 1), NEVER)
    parent_before = np.full((num_gpus + 1, num_layers + 1), -1, np.int32)
    parent_after = np.full((num_gpus + 1, num_layers + 1), -1, np.int32)
    before[0, 0] = 0
    below = high if low < high else high - 1
    for used in range(num_gpus):
        room = node_gpus - used % node_gpus
        for first in range(num_layers):
            cost0, cost1 = before[used, first], after[used, first]
            if cost0 == NEVER and cost1 == NEVER:
                continue
            for index in range(widths.size):
                if widths[index] > room:
                    break
                to, start = used + widths[index], prefix[index, first]
                if to > num_gpus:
                    break
                for end in range(first + 1, reach[index, first] + 1):
                    units = prefix[index, end] - start
                    if units > high:
                        break
                    code = (first << (WIDTH_BITS + 1)) | (index << 1)
                    if cost0 < NEVER:
                        if cost0 + units + 4 * low < before[to, end]:
                            before[to, end] = cost0 + units + 4 * low
                            parent_before[to, end] = code
                        if units >= low and cost0 + 2 * units + 2 * low < after[to, end]:
                            after[to, end] = cost0 + 2 * units + 2 * low
                            parent_after[to, end] = code | 1
                    if units <= below and cost1 + 2 * units + 3 * low < after[to, end]:
                        after[to, end] = cost1 + 2 * units + 3 * low
                        parent_after[to, end] = code
    return before, after, parent_before, parent_after
