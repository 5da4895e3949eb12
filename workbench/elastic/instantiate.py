"""Which pipelines to instantiate from the templates, so that every node works and the step is short."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.arrays import Floats, Ints
from workbench.compiled import compiled
from workbench.elastic.batch_distribution import distribute
from workbench.elastic.node_specification import TemplateSet
from workbench.elastic.template import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """Pipelines by their number of nodes, ascending, with the microbatches of each.

    `iteration_s` is the slowest pipeline's, by the templates' formula; the all-reduce between
    pipelines is not in it.
    """

    sizes: tuple[int, ...]
    microbatches: tuple[int, ...]
    iteration_s: float

    def samples_per_s(self, microbatch: int) -> float:
        """Throughput with that many samples in a microbatch."""
        return sum(self.microbatches) * microbatch / self.iteration_s


def multisets(sizes: range, num_nodes: int, fewest: int) -> Iterator[tuple[int, ...]]:
    """All ways to use `num_nodes` nodes in full with `fewest` pipelines or more, sizes ascending.

    Oobleck chapter, Eq. 2.5. Lazily: for small n0 their number grows like that of integer
    partitions, 1.7 million for 64 nodes from templates of 1 node on.

    Complexity: O(pipelines) per multiset.
    """

    def grow(start: int, left: int, missing: int) -> Iterator[tuple[int, ...]]:
        if left == 0 and missing <= 0:
            yield ()
        for size in range(start, min(sizes.stop - 1, left) + 1):
            if missing > 1 and size * missing > left:
                return
            for rest in grow(size, left - size, missing - 1):
                yield (size, *rest)

    yield from grow(sizes.start, num_nodes, fewest)


def instantiate(planned: TemplateSet, sizes: Sequence[int], num_microbatches: int) -> Instantiation:
    """Pipelines of those sizes with the batch distributed by Eq. 2.6.

    T_i is the planned iteration over its microbatches. Differs: "the iteration time of one
    microbatch", read literally, is the same for every depth and would give a pipeline of twice the nodes
    no more work.

    Raises:
        ValueError: fewer microbatches than pipelines.
    """
    chosen = tuple(sorted(sizes))
    templates = [planned.of_size(size) for size in chosen]
    counts = distribute([template.microbatch_s for template in templates], num_microbatches)
    return _with_counts(chosen, templates, counts)


def fastest(planned: TemplateSet, num_nodes: int, num_microbatches: int) -> Instantiation:
    """The instantiation with the shortest iteration of all, without enumerating them.

    Within a time t a template of n nodes does c_n(t) microbatches; t suffices when some multiset of
    templates does them all, an unbounded knapsack over (pipelines, nodes). The least t is one of the
    templates' iteration times with 1..N microbatches, found by bisection.
    Differs: minimises the slowest pipeline's time itself rather than the variance of Eq. 2.6.

    Raises:
        ValueError: fewer nodes than (f + 1) n0, or fewer microbatches than f + 1 pipelines.

    Complexity: O(log(N_b p) x pipelines x nodes x p), compiled.
    """
    specification = planned.specification
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
    usable = [size for size in specification.sizes if size <= num_nodes]
    times = {size: planned.of_size(size).iterations_s(num_microbatches) for size in usable}
    instants = np.unique(np.concatenate(list(times.values())))
    low, high = 0, instants.size - 1
    while low < high:
        middle = (low + high) // 2
        if _chosen(planned, times, num_nodes, num_microbatches, float(instants[middle])) is not None:
            high = middle
        else:
            low = middle + 1
    sizes = _chosen(planned, times, num_nodes, num_microbatches, float(instants[low]))
    if sizes is None:
        raise ValueError(
            f"{num_microbatches} microbatches are fewer than the pipelines that {num_nodes} nodes need with "
            f"templates of up to {specification.largest}: want a larger global batch"
        )
    return _filled(planned, sizes, times, float(instants[low]), num_microbatches)


def _chosen(
    planned: TemplateSet,
    times: dict[int, Floats],
    num_nodes: int,
    num_microbatches: int,
    within_s: float,
) -> tuple[int, ...] | None:
    """Sizes that use all nodes and do the batch within a time; fewest pipelines, then smallest sizes."""
    counts = [int(np.searchsorted(each, within_s, side="right")) for each in times.values()]
    most = min(num_nodes // planned.specification.smallest, num_microbatches)
    done, taken = most_work(np.array(list(times), np.int64), np.array(counts, np.int64), most, num_nodes)
    for replicas in range(planned.specification.num_faults + 1, most + 1):
        if done[replicas, num_nodes] >= num_microbatches:
            return _followed(taken, replicas, num_nodes)
    return None


def _followed(taken: Ints, replicas: int, num_nodes: int) -> tuple[int, ...]:
    sizes = []
    for left in range(replicas, 0, -1):
        sizes.append(int(taken[left, num_nodes]))
        num_nodes -= sizes[-1]
    return tuple(sorted(sizes))


def _filled(
    planned: TemplateSet,
    sizes: tuple[int, ...],
    times: dict[int, Floats],
    within_s: float,
    num_microbatches: int,
) -> Instantiation:
    """Give back what the pipelines could do more than asked, the largest first and one at least kept."""
    counts = [int(np.searchsorted(times[size], within_s, side="right")) for size in sizes]
    spare = sum(counts) - num_microbatches
    for index in reversed(range(len(counts))):
        given = min(spare, counts[index] - 1)
        counts[index] -= given
        spare -= given
    return _with_counts(sizes, [planned.of_size(size) for size in sizes], counts)


def _with_counts(
    sizes: tuple[int, ...], templates: Sequence[Template], counts: Sequence[int]
) -> Instantiation:
    slowest = max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))
    return Instantiation(sizes=sizes, microbatches=tuple(counts), iteration_s=slowest)


@compiled
def most_work(sizes: Ints, counts: Ints, most: int, num_nodes: int) -> tuple[Ints, Ints]:
    """Microbatches that r pipelines on exactly n nodes can do, and the size taken last.

    Args:
        sizes: [p] nodes of the templates. counts: [p] microbatches each does, 0 where it does none.
        most: pipelines at most.

    Returns:
        [most + 1][num_nodes + 1] work, -1 where the nodes cannot be used in full; the last size.

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
