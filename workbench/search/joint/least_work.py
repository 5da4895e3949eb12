"""Lower bounds on a module's passes over each sample: total rank-seconds, and seconds on its path."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from workbench.arrays import Floats
from workbench.cost.collectives import Collective
from workbench.cost.execution import SavedInput
from workbench.cost.group_link import ring_link
from workbench.cost.hardware import Cluster, Link
from workbench.cost.least_calls import Calls, LeastCalls, undominated
from workbench.cost.least_products import ranges
from workbench.cost.least_time import LeastTimes
from workbench.cost.model import CostModel, RowWork, Work
from workbench.cost.products import ProductFormat, known_rate
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.model.frozen import Needs
from workbench.model.layer import TokenCount
from workbench.model.model_graph import Module
from workbench.plan.microbatches import chunked_microbatches
from workbench.plan.narrow_products import writing_gradients
from workbench.plan.routing import routing_of
from workbench.plan.work import even_work_of
from workbench.planner.assembly import empty_draft
from workbench.planner.layer_cost import alike_layers
from workbench.search.joint.choice import Choice

SIZES = [2.0**power for power in range(10, 34)]  # bytes per rank in an all-gather
DISTINCT = 64  # sample sizes, up to which calls are bounded for each one

Weight = Callable[[str], float]
"""Weight of a second on a kind of device."""


def even(device: str) -> float:
    """Weight 1 for every device."""
    return 1.0


class Part(NamedTuple):
    """Layers `first` to before `end` of a module, on a sample's path."""

    module: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples with equal work.

    Args:
        ids: of the samples.
        num_items: per sample, over which calls are counted.
        layers: possible calls of every layer; equal layers share one object.
    """

    ids: frozenset[int]
    num_items: int
    layers: tuple[Calls, ...]


class _CallChoice(NamedTuple):
    """`num` times one of these kinds of calls, with their weighted seconds by area and by path."""

    num: int
    areas_s: Floats
    paths_s: Floats


@dataclass(frozen=True, slots=True)
class PathTerms:
    """A module's work along a path: the calls still to choose, and the fixed rest.

    Args:
        area_s: weighted by the module's share of a rank, of calls that are best by area whatever the
            weights.
        path_s: of layers with only one kind of call, the mean over the samples on the path.
        choices: of all other layers, weighted likewise.
    """

    area_s: float
    path_s: float
    choices: tuple[_CallChoice, ...]

    def least_s(self, area_weight: float, path_weight: float) -> float:
        """Minimum of the weighted sum of area and path. Complexity: O(choices x kinds of calls)."""
        chosen_s = float_sum(
            num * float(np.min(area_weight * areas_s + path_weight * paths_s))
            for num, areas_s, paths_s in self.choices
        )
        return area_weight * self.area_s + path_weight * self.path_s + chosen_s


@dataclass(frozen=True, slots=True)
class LeastWork:
    """A module's least work, over all samples with items of it.

    If all items are alike, or samples have at most `DISTINCT` sizes: by kinds of calls, see `LeastCalls`.
    Otherwise the best rate of any call and the shortest path at once, see `LeastTimes`.
    """

    groups: tuple[Samples, ...]

    @property
    def samples(self) -> frozenset[int]:
        return frozenset().union(*(group.ids for group in self.groups))

    @property
    def area_s(self) -> float:
        """Rank-seconds of the calls that are best by area."""
        return float_sum(len(each.ids) * each.num_items * _least_s(each.layers) for each in self.groups)

    def along(self, share: float, part: Part | None, on_path: frozenset[int]) -> PathTerms:
        """Terms for a path of some samples through part of the layers; None: the path does not touch the
        module.

        Args:
            share: of a rank, by which the module's area is weighted.
        """
        area_s = path_s = 0.0
        choices: list[_CallChoice] = []
        for group in self.groups:
            num_on_path, num = (len(group.ids & on_path) if part is not None else 0), len(group.ids)
            inside = group.layers[part.first : part.end] if part is not None and num_on_path else ()
            area_weight = share * group.num_items
            area_s += area_weight * (num * _least_s(group.layers) - num_on_path * _least_s(inside))
            for times, calls in _counted(inside):
                areas_s, paths_s = area_weight * calls[:, 0], calls[:, 1] / len(on_path)
                if len(calls) > 1:
                    choices.append(_CallChoice(num_on_path * times, areas_s, paths_s))
                    continue
                area_s += num_on_path * times * float(areas_s[0])
                path_s += num_on_path * times * float(paths_s[0])
        return PathTerms(area_s, path_s, tuple(choices))


def _counted(layers: Sequence[Calls]) -> Iterator[tuple[int, Calls]]:
    """Distinct layers, each with the number of layers like it."""
    by_id = {id(calls): calls for calls in layers}
    yield from ((num, by_id[key]) for key, num in Counter(map(id, layers)).items())


def _least_s(layers: Sequence[Calls]) -> float:
    return float_sum(num * float(calls[:, 0].min()) for num, calls in _counted(layers))


def kinds_of_device(job: Job) -> tuple[str, ...]:
    """Kinds of devices in the job's cluster."""
    return tuple(dict.fromkeys(node.device for node in job.cluster.nodes))


def least_works(job: Job, cost: CostModel, layout: Choice | None, weight: Weight) -> dict[str, LeastWork]:
    """The least work of every module, on any kind of device, with seconds weighted by device.

    Args:
        layout: a choice whose degrees are fixed; None: they are open.

    Complexity: for modules whose items are alike, that of `LeastCalls.of` for every kind of layer; for
    others O(distinct samples x kinds of layers), plus one bound of a table for every product's shape.
    """
    draft = empty_draft(job, "bound")
    routing = routing_of(draft)
    alone = chunked_microbatches(draft, {index: [[sample]] for index, sample in enumerate(job.batch)})
    works: dict[str, LeastWork] = {}
    for module in job.model.modules:
        replicas_of_work: dict[tuple[Work, tuple[Needs, ...]], list[int]] = {}
        for each in alone:
            if each.module == module.name:
                key = even_work_of(draft, each), routing.flow(each).needs[module.name]
                replicas_of_work.setdefault(key, []).append(each.replica)
        rows = {row for work, _ in replicas_of_work for row in work.rows}
        module_work = _ModuleWork(
            job, cost, layout, module, weight, [(w, len(ids)) for (w, _), ids in replicas_of_work.items()]
        )
        are_alike = (
            len(rows) == 1 and len({needs for _, needs in replicas_of_work}) == 1 and module_work.degrees
        )
        calls_of = module_work.alike(*rows) if are_alike else module_work.distinct
        works[module.name] = LeastWork(
            tuple(
                Samples(frozenset(ids), len(work.rows) if are_alike else 1, calls_of(work, needs))
                for (work, needs), ids in replicas_of_work.items()
            )
        )
    return works


class _ModuleWork:
    def __init__(
        self,
        job: Job,
        cost: CostModel,
        layout: Choice | None,
        module: Module,
        weight: Weight,
        works: Sequence[tuple[Work, int]],
    ) -> None:
        self._job, self._cost, self._module, self._weight = job, cost, module, weight
        self._stages = [stage for stage in layout.stages if stage.module == module.name] if layout else []
        self._num_ranks = job.usable_ranks
        self._may_cut = any(stage.cp > 1 for stage in self._stages) if layout else self._num_ranks > 1
        self._must_cut = bool(self._stages) and all(stage.cp > 1 for stage in self._stages)
        self._stock = Work(tuple(row for work, num in works for row in work.rows * num)) if works else None
        self._num_works = len(works)
        self._least_tokens = min((work.tokens(TokenCount.IN) for work, _ in works), default=1)
        self._firsts = alike_layers(job.model, module.name).firsts
        self._least: dict[str, LeastTimes] = {}
        self._cutting: dict[str, LeastTimes] = {}
        self._bytes_per_s: dict[str, float] = {}
        self._sums_s: dict[str, dict[tuple[int, int, Link], float]] = {}

    @property
    def degrees(self) -> tuple[int, ...]:
        """Possible tensor-parallel degrees; none: unknown."""
        if self._stages:
            return tuple(sorted({stage.tp for stage in self._stages}))
        common = math.gcd(*self._module.kv_heads)
        return tuple(tp for tp in range(1, min(common, self._num_ranks) + 1) if common % tp == 0)

    def alike(self, row: RowWork) -> Callable[[Work, tuple[Needs, ...]], tuple[Calls, ...]]:
        """Calls of every layer if all items are like this one."""
        kinds = self._kinds(Work((row,)))

        @cache
        def calls(at: int, need: Needs) -> Calls:
            layer = self._module.layers[at]
            return undominated(np.concatenate([weight * least.of(layer, need) for weight, least in kinds]))

        return lambda work, needs: tuple(map(calls, self._firsts, needs))

    def distinct(self, work: Work, needs: tuple[Needs, ...]) -> tuple[Calls, ...]:
        """Calls of every layer for samples of several sizes: by number of tokens if there are few sizes, else
        one bound for all.
        """
        assert self._stock is not None, "it has items"
        kinds = self._kinds(work)
        are_few = self._num_works <= DISTINCT and self.degrees
        most_tokens = self._stock.tokens(TokenCount.IN)
        tokens = ranges(self._least_tokens / self._num_ranks, most_tokens)
        known = {}
        for at, need in dict.fromkeys(zip(self._firsts, needs, strict=True)):
            layer = self._module.layers[at]
            calls = (
                weight * (least.among_others(layer, need, tokens) if are_few else least.at_best(layer, need))
                for weight, least in kinds
            )
            known[at, need] = undominated(np.concatenate(list(calls)))
        return tuple(known[each] for each in zip(self._firsts, needs, strict=True))

    def _kinds(self, one: Work) -> list[tuple[Floats, LeastCalls]]:
        """Weights of area and path with the calls of such an item, for every kind of device."""
        assert self._stock is not None, "it has items"
        return [
            (
                np.array((self._weight(device), 1.0)),
                LeastCalls(
                    machines=machines,
                    precision=self._job.settings.precision,
                    one=one,
                    num_items=len(self._stock.rows),
                    grids=tuple(self._grids(device)),
                    num_ranks=max((s.tp * s.cp for s in self._stages), default=self._num_ranks),
                    most_bytes_per_s=self._bytes_per_s[device],
                    plain=None if self._must_cut else plain,
                    cutting=self._cutting[device] if self._may_cut else None,
                    sums_s=self._sums_s.setdefault(device, {}),
                ),
            )
            for device, machines, plain in self._machines()
        ]

    def _machines(self) -> Iterator[tuple[str, tuple[CostModel, ...], LeastTimes]]:
        """For every kind of device, its possible executions of layers and their least times."""
        precision, own = self._job.settings.precision, self._job.settings.of(self._module.name)
        for device in kinds_of_device(self._job):
            cost = writing_gradients(self._cost.on(device), self._job.settings)
            is_narrow = own.products is not ProductFormat.SAME
            if is_narrow and known_rate(cost.profile, own.products) is not None:  # else no plan has it there
                cost = cost.multiplying_in(own.products)
            if device not in self._least:
                assert self._stock is not None, "it has items"
                self._least[device] = LeastTimes(
                    cost, precision, self._stock, degrees=self.degrees, cuts_tokens=False
                )
                self._cutting[device] = self._least[device].cutting_tokens()
                self._bytes_per_s[device] = most_bytes_per_s(self._job.cluster, cost)
            whole = cost.summing_in(own.collective_pieces)
            divided = whole.dividing_tokens(), whole.dividing_tokens(SavedInput.WHOLE)
            yield device, (whole, *divided), self._least[device]

    def _grids(self, device: str) -> Iterator[tuple[int, Link | None]]:
        """Tensor-parallel degrees, each with every link that may join so many ranks of a device."""
        for tp in self.degrees:
            yield from ((tp, link) for link in links_of(self._job.cluster, device, tp))


def links_of(cluster: Cluster, device: str, num_ranks: int) -> tuple[Link | None, ...]:
    """Links that join `num_ranks` consecutive ranks, from the first of every kind of node."""
    if num_ranks == 1:
        return (None,)
    links: dict[Link, None] = {}
    first = 0
    for node in cluster.nodes:
        ranks = range(first, first + num_ranks)
        first += node.num_ranks
        if node.device == device and ranks.stop <= cluster.num_ranks:
            links[ring_link(cluster, ranks)] = None
    return tuple(links)


def most_bytes_per_s(cluster: Cluster, cost: CostModel) -> float:
    """Upper bound on the rate at which a rank receives other ranks' keys.

    In an all-gather with equally many keys of each rank, in an all-to-all of four messages as large as its
    own keys, through which it gets keys and values, or over a link. Measured rates may exceed the link's
    nominal one.
    """
    node_links = (link for node in cluster.nodes for link in (node.link, node.card) if link is not None)
    most = 0.0
    seconds = cost.collectives.seconds
    for link in {cluster.intra, cluster.inter, *node_links}:
        for num, size in product((2, 4, 8), SIZES):
            gather_s = seconds(Collective.ALL_GATHER, num * size, num, link)
            exchange_s = seconds(Collective.ALL_TO_ALL, size, num, link)
            most = max(most, size / gather_s, 2 * size / (4 * exchange_s))
        most = max(most, link.bytes_per_s)
    return most
