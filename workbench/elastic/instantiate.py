"""Choose pipelines from the templates so that every node works and the step is shortest."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from workbench.arrays import Ints
from workbench.compiled import compiled
from workbench.elastic.batch_distribution import distribute
from workbench.elastic.node_specification import NodeSpecification, TemplateSet
from workbench.elastic.template import Template

SumSeconds = Callable[[int, int], float]  # (nodes of a template, pipelines) -> seconds of its all-reduce


def unsummed(size: int, num_pipelines: int) -> float:
    """No all-reduce time: for pipelines alone, as in the source."""
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """Pipelines by their number of nodes, ascending, with the microbatches of each.

    `iteration_s` is the slowest pipeline's, by the templates' formula; `sum_s` is the all-reduce of
    gradients over all pipelines that follows.
    """

    sizes: tuple[int, ...]
    microbatches: tuple[int, ...]
    iteration_s: float
    sum_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.iteration_s + self.sum_s

    def samples_per_s(self, microbatch: int) -> float:
        """Throughput with `microbatch` samples per microbatch."""
        return sum(self.microbatches) * microbatch / self.step_s


def multisets(sizes: range, num_nodes: int, fewest: int) -> Iterator[tuple[int, ...]]:
    """All ways to use `num_nodes` nodes in full with at least `fewest` pipelines, sizes ascending.

    Oobleck chapter, Eq. 2.5. Lazy: for small n0 their number grows like that of integer partitions, 1.7
    million for 64 nodes with templates from 1 node on.

    Complexity: O(pipelines) per multiset.
    """

    def grow(start: int, left: int, missing: int) -> Iterator[tuple[int, ...]]:
        if left == 0 and missing <= 0:
            yield ()
        for size in range(start, min(sizes.stop - 1, left) + 1):
            if missing > 1 and size * missing > left:
                return
            for others in grow(size, left - size, missing - 1):
                yield (size, *others)

    yield from grow(sizes.start, num_nodes, fewest)


def instantiate(planned: TemplateSet, sizes: Sequence[int], num_microbatches: int) -> Instantiation:
    """Pipelines of those sizes with the batch distributed by Eq. 2.6.

    T_i is the planned iteration over its microbatches. Differs: "the iteration time of one microbatch",
    read literally, is the same for every depth and would give a pipeline of twice the nodes no more work.

    Raises:
        ValueError: fewer microbatches than pipelines.
    """
    ascending = tuple(sorted(sizes))
    templates = [planned.of_size(size) for size in ascending]
    counts = distribute([template.microbatch_s for template in templates], num_microbatches)
    return _with_counts(ascending, templates, counts, sum_s=0.0)


def fastest(
    planned: TemplateSet, num_nodes: int, num_microbatches: int, sum_s: SumSeconds = unsummed
) -> Instantiation:
    """The instantiation with the shortest step, without enumerating all of them.

    A step is its slowest pipeline, then the all-reduce of gradients, which takes as long as that of the
    slowest template to reduce among its pipelines. Within a time t a template of n nodes does c_n(t)
    microbatches; t suffices for r pipelines if some multiset of r templates does them all, an unbounded
    knapsack over (pipelines, nodes). The least t is one of the templates' iteration times with 1..N_b
    microbatches, found by bisection. A longer t pays off only with a shorter all-reduce: over another
    number of pipelines, or without the slowest templates to reduce. Ties: the shorter pipelines, then
    fewest of them, then smallest sizes.

    Differs: minimises the step itself rather than the variance of Eq. 2.6 of the Oobleck chapter, whose
    steps are pipelines without the all-reduce.

    Args:
        sum_s: seconds of the all-reduce; which templates take longer does not depend on the number of
            pipelines.

    Raises:
        ValueError: fewer nodes than (f + 1) n0, or fewer microbatches than f + 1 pipelines.

    Complexity: O(s x k x log(N_b p) x pipelines x nodes x p), compiled, for s different all-reduce times of
    templates and k times t at which a shorter one is found; without all-reduces both are 1.
    """
    specification = planned.specification
    _check(specification, num_nodes, num_microbatches)
    usable = [size for size in specification.sizes if size <= num_nodes]
    most = min(num_nodes // specification.smallest, num_microbatches)
    of_most_s = {size: sum_s(size, most) for size in usable}
    pipelines = _Pipelines(planned, usable, num_nodes, num_microbatches)
    best: Instantiation | None = None
    for limit_s in sorted(set(of_most_s.values()), reverse=True):
        sizes = [size for size in usable if of_most_s[size] <= limit_s]
        heaviest = max(sizes, key=of_most_s.__getitem__)
        sums_s = {count: sum_s(heaviest, count) for count in range(specification.num_faults + 1, most + 1)}
        best = _better(best, pipelines, sizes, sums_s)
    if best is None:
        raise ValueError(
            f"{num_microbatches} microbatches are fewer than the pipelines that {num_nodes} nodes need with "
            f"templates of up to {specification.largest}: want a larger global batch"
        )
    return best


def _check(specification: NodeSpecification, num_nodes: int, num_microbatches: int) -> None:
    if not specification.covers(num_nodes):
        raise ValueError(
            f"{num_nodes} nodes do not hold {specification.num_faults + 1} pipelines of "
            f"{specification.smallest} nodes or more: want at least {specification.threshold}"
        )
    if num_microbatches < specification.num_faults + 1:
        raise ValueError(
            f"{num_microbatches} microbatches cannot be distributed to {specification.num_faults + 1} "
            f"pipelines: want at least {specification.num_faults + 1}"
        )


def _better(
    best: Instantiation | None, pipelines: "_Pipelines", sizes: Sequence[int], sums_s: Mapping[int, float]
) -> Instantiation | None:
    """The shortest step with pipelines of these sizes, or the best so far if none is shorter.

    Args:
        sums_s: all-reduce seconds by number of pipelines, ascending.
    """
    while sums_s:
        before_s = inf if best is None else best.step_s - min(sums_s.values())
        within_s = pipelines.least_s(sizes, sums_s, before_s)
        if within_s is None:
            break
        count = min(pipelines.able(sizes, sums_s, within_s), key=sums_s.__getitem__)
        if best is None or within_s + sums_s[count] < best.step_s:
            best = pipelines.instantiation(sizes, count, within_s, sums_s[count])
        sums_s = {other: other_s for other, other_s in sums_s.items() if other_s < sums_s[count]}
    return best


class _Pipelines:
    """The work that pipelines of some templates, on all nodes together, can do within a time."""

    def __init__(
        self, planned: TemplateSet, sizes: Sequence[int], num_nodes: int, num_microbatches: int
    ) -> None:
        self._planned, self._num_nodes, self._num_microbatches = planned, num_nodes, num_microbatches
        self._times = {size: planned.of_size(size).iterations_s(num_microbatches) for size in sizes}
        self._instants = np.unique(np.concatenate(list(self._times.values())))

    def least_s(self, sizes: Sequence[int], counts: Collection[int], before_s: float) -> float | None:
        """The least time in which one of these numbers of pipelines does the batch; None: not before
        `before_s`.
        """

        def suffices(index: int) -> bool:
            return bool(self.able(sizes, counts, float(self._instants[index])))

        end = int(np.searchsorted(self._instants, before_s))
        if end == 0 or not suffices(end - 1):
            return None
        return float(self._instants[bisect_left(range(end - 1), x=True, key=suffices)])

    def able(self, sizes: Sequence[int], counts: Collection[int], within_s: float) -> list[int]:
        """The numbers of pipelines that can do the batch within a time."""
        work, _ = self._work(sizes, max(counts), within_s)
        return [count for count in counts if work[count, self._num_nodes] >= self._num_microbatches]

    def instantiation(self, sizes: Sequence[int], count: int, within_s: float, sum_s: float) -> Instantiation:
        """`count` pipelines that do the batch within a time, the smallest sizes."""
        _, last_size = self._work(sizes, count, within_s)
        pipeline_sizes = _backtracked(last_size, count, self._num_nodes)
        capacities = [self._capacity(size, within_s) for size in pipeline_sizes]
        templates = [self._planned.of_size(size) for size in pipeline_sizes]
        return _with_counts(pipeline_sizes, templates, _reduced(capacities, self._num_microbatches), sum_s)

    def _work(self, sizes: Sequence[int], most: int, within_s: float) -> tuple[Ints, Ints]:
        counts = [self._capacity(size, within_s) for size in sizes]
        return most_work(np.array(sizes, np.int64), np.array(counts, np.int64), most, self._num_nodes)

    def _capacity(self, size: int, within_s: float) -> int:
        """Microbatches of a pipeline within a time."""
        return int(self._times[size].searchsorted(within_s, side="right"))


def _backtracked(last_size: Ints, replicas: int, num_nodes: int) -> tuple[int, ...]:
    sizes = []
    for count in range(replicas, 0, -1):
        sizes.append(int(last_size[count, num_nodes]))
        num_nodes -= sizes[-1]
    return tuple(sorted(sizes))


def _reduced(counts: Sequence[int], num_microbatches: int) -> list[int]:
    """Reduce capacities to the microbatches needed, starting with the largest; each keeps at least one."""
    kept, spare = list(counts), sum(counts) - num_microbatches
    for index in reversed(range(len(kept))):
        surplus = min(spare, kept[index] - 1)
        kept[index] -= surplus
        spare -= surplus
    return kept


def _with_counts(
    sizes: tuple[int, ...], templates: Sequence[Template], counts: Sequence[int], sum_s: float
) -> Instantiation:
    slowest = max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))
    return Instantiation(sizes=sizes, microbatches=tuple(counts), iteration_s=slowest, sum_s=sum_s)


@compiled
def most_work(sizes: Ints, counts: Ints, most: int, num_nodes: int) -> tuple[Ints, Ints]:
    """Microbatches that r pipelines on exactly n nodes can do, and the size taken last.

    Args:
        sizes: [p] nodes of the templates.
        counts: [p] microbatches each does, 0 if none.
        most: maximum number of pipelines.

    Returns:
        [most + 1][num_nodes + 1] work, -1 if the nodes cannot be used in full; the last size.

    Complexity: O(most x num_nodes x p).
    """
    done = np.full((most + 1, num_nodes + 1), -1, np.int64)
    taken = np.zeros((most + 1, num_nodes + 1), np.int64)
    done[0, 0] = 0
    for replicas in range(1, most + 1):
        for nodes in range(num_nodes + 1):
            for index in range(sizes.size):
                left = nodes - sizes[index]
                if left < 0 or counts[index] == 0 or done[replicas - 1, left] < 0:
                    continue
                work = done[replicas - 1, left] + counts[index]
                if work > done[replicas, nodes]:
                    done[replicas, nodes] = work
                    taken[replicas, nodes] = sizes[index]
    return done, taken
