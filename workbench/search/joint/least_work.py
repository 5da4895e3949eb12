"""What passes of a module over each sample take at least: of all ranks, and of those that wait for them."""

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
from workbench.job.job import Job
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, TokenCount
from workbench.model.model_graph import Module
from workbench.plan.build import chunked_microbatches
from workbench.plan.routing import routing_of
from workbench.plan.work import even_work_of
from workbench.planner.assembly import empty_draft
from workbench.planner.layer_cost import alike_layers
from workbench.planner.layout_search import usable_ranks
from workbench.search.joint.choice import Choice

SIZES = [2.0**power for power in range(10, 34)]  # bytes of a rank in an all-gather
DISTINCT = 64  # samples, up to which kinds of calls are told apart that have one of them

Weight = Callable[[str], float]
"""Of a second on a device of that kind."""


def even(device: str) -> float:
    """A second is a second."""
    return 1.0


class Part(NamedTuple):
    """Layers of a module on the way of a sample: from `first` to before `end`."""

    module: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples with as much work.

    Args:
        ids: of them.
        num_items: of each, over which calls are counted.
        layers: calls of every layer, the same object for those that are alike.
    """

    ids: frozenset[int]
    num_items: int
    layers: tuple[Calls, ...]


class _Choice(NamedTuple):
    """So many times one of these calls, each by what its area and its way weigh."""

    num: int
    areas_s: Floats
    ways_s: Floats


@dataclass(frozen=True, slots=True)
class Along:
    """A module's work along a way: what is left to choose, and what is not.

    Args:
        area_s: by its share of a rank, of calls that are the least by area, whatever they weigh.
        way_s: of calls that have only one kind, the mean over the samples on the way.
        choices: all else, by the same shares.
    """

    area_s: float
    way_s: float
    choices: tuple[_Choice, ...]

    def least_s(self, area_weight: float, way_weight: float) -> float:
        """The least of both together. Complexity: O(choices x kinds of calls)."""
        chosen_s = sum(
            num * float(np.min(area_weight * areas_s + way_weight * ways_s))
            for num, areas_s, ways_s in self.choices
        )
        return area_weight * self.area_s + way_weight * self.way_s + chosen_s


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Of a module, over all samples that have items of it.

    Where all items are alike, or samples of no more than `DISTINCT` sizes: kinds of calls, see `LeastCalls`.
    Else the best rate of any call and the least way at once, see `LeastTimes`.
    """

    groups: tuple[Samples, ...]

    @property
    def samples(self) -> frozenset[int]:
        return frozenset().union(*(group.ids for group in self.groups))

    @property
    def area_s(self) -> float:
        """Ranks times seconds of the calls that are the least by area."""
        return sum(len(each.ids) * each.num_items * _least_s(each.layers) for each in self.groups)

    def along(self, share: float, part: Part | None, on_way: frozenset[int]) -> Along:
        """Along a way of some samples through a part of the layers; None: it does not come by.

        Args:
            share: of a rank that the module's area counts.
        """
        area_s = way_s = 0.0
        choices: list[_Choice] = []
        for group in self.groups:
            num_on, num = (len(group.ids & on_way) if part is not None else 0), len(group.ids)
            inside = group.layers[part.first : part.end] if part is not None and num_on else ()
            of_one = share * group.num_items
            area_s += of_one * (num * _least_s(group.layers) - num_on * _least_s(inside))
            for times, calls in _counted(inside):
                areas_s, ways_s = of_one * calls[:, 0], calls[:, 1] / len(on_way)
                if len(calls) > 1:
                    choices.append(_Choice(num_on * times, areas_s, ways_s))
                    continue
                area_s += num_on * times * float(areas_s[0])
                way_s += num_on * times * float(ways_s[0])
        return Along(area_s, way_s, tuple(choices))


def _counted(layers: Sequence[Calls]) -> Iterator[tuple[int, Calls]]:
    """Layers that are alike once, and how many there are."""
    by_id = {id(calls): calls for calls in layers}
    yield from ((num, by_id[key]) for key, num in Counter(map(id, layers)).items())


def _least_s(layers: Sequence[Calls]) -> float:
    return sum(num * float(calls[:, 0].min()) for num, calls in _counted(layers))


def kinds_of_device(job: Job) -> tuple[str, ...]:
    """Of the job's cluster."""
    return tuple(dict.fromkeys(node.device for node in job.cluster.nodes))


def least_works(job: Job, cost: CostModel, layout: Choice | None, weight: Weight) -> dict[str, LeastWork]:
    """Of every module, on any kind of device, each by the weight of its seconds.

    Args:
        layout: the choice whose degrees stay; None: they are open.

    Complexity: that of `LeastCalls.of` for every kind of layer of modules whose items are alike; of others
        O(distinct samples x kinds of layers), and one bound of a table for every product's shape.
    """
    draft = empty_draft(job, "bound")
    routing = routing_of(draft)
    alone = chunked_microbatches(draft, {place: [[sample]] for place, sample in enumerate(job.batch)})
    found: dict[str, LeastWork] = {}
    for module in job.model.modules:
        mine: dict[tuple[Work, tuple[Needs, ...]], list[int]] = {}
        for each in alone:
            if each.module == module.name:
                key = even_work_of(draft, each), routing.flow(each).needs[module.name]
                mine.setdefault(key, []).append(each.replica)
        rows = {row for work, _ in mine for row in work.rows}
        module_work = _ModuleWork(
            job, cost, layout, module, weight, [(w, len(ids)) for (w, _), ids in mine.items()]
        )
        are_alike = len(rows) == 1 and len({needs for _, needs in mine}) == 1 and module_work.degrees
        of = module_work.alike(*rows) if are_alike else module_work.distinct
        found[module.name] = LeastWork(
            tuple(
                Samples(frozenset(ids), len(work.rows) if are_alike else 1, of(work, needs))
                for (work, needs), ids in mine.items()
            )
        )
    return found


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
        self._num_ranks = usable_ranks(job)
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
        """Of tensor parallelism; none: they are not known."""
        if self._stages:
            return tuple(sorted({stage.tp for stage in self._stages}))
        heads = [
            op.num_kv_heads
            for each in self._module.layers
            for op in each.operators
            if isinstance(op, Attention)
        ]
        common = math.gcd(*heads)
        return tuple(tp for tp in range(1, min(common, self._num_ranks) + 1) if common % tp == 0)

    def alike(self, row: RowWork) -> Callable[[Work, tuple[Needs, ...]], tuple[Calls, ...]]:
        """Calls of every layer, of items that are all like this one."""
        kinds = self._kinds(Work((row,)))

        @cache
        def calls(at: int, need: Needs) -> Calls:
            layer = self._module.layers[at]
            return undominated(np.concatenate([weight * least.of(layer, need) for weight, least in kinds]))

        return lambda work, needs: tuple(map(calls, self._firsts, needs))

    def distinct(self, work: Work, needs: tuple[Needs, ...]) -> tuple[Calls, ...]:
        """Calls of every layer that have one of samples of several sizes: where there are few of them, of so
        many tokens; else one, the least of all."""
        assert self._stock is not None, "it has items"
        kinds = self._kinds(work)
        are_few = self._num_works <= DISTINCT and self.degrees
        most = self._stock.tokens(TokenCount.IN)
        tokens = ranges(self._least_tokens / self._num_ranks, most)
        known = {}
        for at, need in dict.fromkeys(zip(self._firsts, needs, strict=True)):
            layer = self._module.layers[at]
            found = (
                weight * (least.among_others(layer, need, tokens) if are_few else least.at_best(layer, need))
                for weight, least in kinds
            )
            known[at, need] = undominated(np.concatenate(list(found)))
        return tuple(known[each] for each in zip(self._firsts, needs, strict=True))

    def _kinds(self, one: Work) -> list[tuple[Floats, LeastCalls]]:
        """By what area and way weigh, calls of such an item on every kind of device."""
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
        """Of every kind of device: as plans may have it run layers, and what these take at least."""
        precision, pieces = (
            self._job.settings.precision,
            self._job.settings.of(self._module.name).collective_pieces,
        )
        for device in kinds_of_device(self._job):
            cost = self._cost.on(device)
            if device not in self._least:
                assert self._stock is not None, "it has items"
                self._least[device] = LeastTimes(
                    cost, precision, self._stock, degrees=self.degrees, cuts_tokens=False
                )
                self._cutting[device] = self._least[device].cutting_tokens()
                self._bytes_per_s[device] = most_bytes_per_s(self._job.cluster, cost)
            whole = cost.summing_in(pieces)
            divided = whole.dividing_tokens(), whole.dividing_tokens(SavedInput.WHOLE)
            yield device, (whole, *divided), self._least[device]

    def _grids(self, device: str) -> Iterator[tuple[int, Link | None]]:
        """Tensor-parallel degrees, and everything that may join so many ranks of a kind."""
        for tp in self.degrees:
            yield from ((tp, link) for link in links_of(self._job.cluster, device, tp))


def links_of(cluster: Cluster, device: str, num_ranks: int) -> tuple[Link | None, ...]:
    """What joins so many ranks side by side, from the first of every kind of node."""
    if num_ranks == 1:
        return (None,)
    found: dict[Link, None] = {}
    first = 0
    for node in cluster.nodes:
        ranks = range(first, first + num_ranks)
        first += node.num_ranks
        if node.device == device and ranks.stop <= cluster.num_ranks:
            found[ring_link(cluster, ranks)] = None
    return tuple(found)


def most_bytes_per_s(cluster: Cluster, cost: CostModel) -> float:
    """That a rank gets of others' keys in an all-gather with as many of its own, or over a link in it.

    Or in an all-to-all, of four as large as its own keys alone, in which it has those and their values. What
    was measured may be faster than its link is said to be.
    """
    own = (link for node in cluster.nodes for link in (node.link, node.card) if link is not None)
    found = 0.0
    seconds = cost.collectives.seconds
    for link in {cluster.intra, cluster.inter, *own}:
        for num, size in product((2, 4, 8), SIZES):
            gather_s = seconds(Collective.ALL_GATHER, num * size, num, link)
            exchange_s = seconds(Collective.ALL_TO_ALL, size, num, link)
            found = max(found, size / gather_s, 2 * size / (4 * exchange_s))
        found = max(found, link.bytes_per_s)
    return found
