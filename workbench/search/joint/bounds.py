"""What no plan of a job beats: work over ranks and the way of one sample, weighed against each other."""

from collections.abc import Callable, Iterator, Mapping

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.model.model_graph import ModelGraph
from workbench.planner.layout_search import usable_ranks
from workbench.search.joint.choice import Choice
from workbench.search.joint.least_work import LeastWork, Part, Weight, even, kinds_of_device, least_works
from workbench.timing.price import least_update_s

ROUNDING = 1 - 1e-6  # of areas, which are whole numbers where tokens are shared
WHOLE_PARTS = 0.99  # of weights, whose parts on tensor-parallel ranks are whole numbers
LOOKS = 24  # at shares of the way, until the best of them is taken
GOLDEN = (5**0.5 - 1) / 2


LowerBound = Callable[[Job, CostModel, Choice | None], float]
"""That no value of a judge is below, with a layout that stays or none."""


def no_bound(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Of a judge whose values are known to be positive, and no more."""
    return 0.0


def lower_bound_s(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Seconds that no plan of the job takes less than, among those that a search may find.

    A step takes no less than the mean over ranks of what each does: all passes, and the update of every
    trained weight once (the area). Nor does it take less than any sample on its way through modules that read
    one another, forward and back, call after call (the way). Large calls make the area small, and tensor- or
    context-parallel ranks the way: no call does both. So a step takes no less than any mean of the two, in
    which each layer takes the kind of call that is best for both together: the Lagrangian relaxation of the
    least step whose area and ways all fit in it, at the best multiplier (Held and Karp 1971, "The
    traveling-salesman problem and minimum spanning trees: part II", for its use as a bound). With a layout
    that stays the area may also be one module's, on the ranks that hold it.

    Why it holds: a rank does its passes and then its STEP one after the other. Passes take no less than they
    are counted, see `LeastWork`, whatever the degrees, stages, microbatches, order and settings;
    recomputation, messages between stages, waiting and unequal shares only add. Of ways the mean over samples
    is taken, which is no more than the longest.

    Args:
        layout: the choice whose stages stay on their ranks; None: layouts are open.

    Complexity: that of `least_works`, and `LOOKS` minima over all kinds of calls for every way through the
    modules.
    """
    works, updates_s = least_works(job, cost, layout, even), _updates_s(job, cost, even)
    ranks = dict.fromkeys(updates_s, usable_ranks(job))
    shares = [{module: 1 / num for module, num in ranks.items()}]
    if layout is not None:
        held = {m: len({r for s in layout.stages if s.module == m for r in s.flat_ranks}) for m in ranks}
        shares += [{module: 1 / num} for module, num in held.items() if num]
    return ROUNDING * max(
        weighed_s(works, updates_s, share, way) for share in shares for way in ways(job.model)
    )


def least_rank_s(job: Job, cost: CostModel, layout: Choice | None, weight: Weight) -> float:
    """Seconds of all ranks together that a step takes at least, each by what a device's seconds weigh.

    As the area of `lower_bound_s`: it holds for plans on any number of ranks.
    """
    works, updates_s = least_works(job, cost, layout, weight), _updates_s(job, cost, weight)
    return ROUNDING * (sum(updates_s.values()) + sum(work.area_s for work in works.values()))


def weighed_s(
    works: Mapping[str, LeastWork],
    updates_s: Mapping[str, float],
    shares: Mapping[str, float],
    way: tuple[Part, ...],
) -> float:
    """The best mean of the area, each module's by its share of a rank, and of the ways of all samples.

    It is concave in what the ways weigh: golden-section search.
    """
    fixed_s = sum(share * updates_s[module] for module, share in shares.items())
    on_way = frozenset.intersection(*(works[part.module].samples for part in way))
    part_of = {part.module: part for part in way}
    terms = [
        work.along(shares.get(module, 0.0), part_of.get(module), on_way) for module, work in works.items()
    ]

    def mean_s(weight: float) -> float:
        return (1 - weight) * fixed_s + sum(each.least_s(1 - weight, weight) for each in terms)

    low, high = 0.0, 1.0
    for _ in range(LOOKS):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if mean_s(left) >= mean_s(right) else (left, high)
    return max(mean_s(0.0), mean_s((low + high) / 2), mean_s(1.0))


def ways(model: ModelGraph) -> Iterator[tuple[Part, ...]]:
    """Of a sample, from a module that reads no other to one that no other reads."""

    def onward(module: str, first: int) -> Iterator[tuple[Part, ...]]:
        edges = model.edges_out_of(module)
        if not edges:
            yield (Part(module, first, len(model.module(module).layers)),)
        for edge in edges:
            own = Part(module, first, edge.after_layer + 1)
            yield from ((own, *others) for others in onward(edge.target, edge.before_layer))

    for module in model.modules:
        if not model.edges_into(module.name):
            yield from onward(module.name, 0)


def _updates_s(job: Job, cost: CostModel, weight: Weight) -> dict[str, float]:
    """By module: of its trained weights, those aside that layers share; on one rank each."""
    found = {}
    for module in job.model.modules:
        trained = sum(
            parameter.num_elements
            for layer in module.layers
            if layer.trainable
            for parameter in layer.parameters()
            if parameter.name not in {shared for _, shared in layer.tied}
        )
        found[module.name] = WHOLE_PARTS * min(
            weight(device) * least_update_s(trained, cost.on(device), job.settings)
            for device in kinds_of_device(job)
        )
    return found
