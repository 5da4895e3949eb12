"""Lower bounds on the step time of any plan: total work over ranks, and the critical path of one sample."""

from collections.abc import Callable, Iterator, Mapping

from workbench.cost.model import CostModel
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.model.model_graph import ModelGraph
from workbench.model.trained import trained_parameters
from workbench.search.joint.choice import Choice
from workbench.search.joint.least_work import LeastWork, Part, Weight, even, kinds_of_device, least_works
from workbench.timing.price import least_update_s

ROUNDING = 1 - 1e-6  # tokens shared between ranks are whole numbers, which rounds total work
WHOLE_PARTS = 0.99  # shards of weights on tensor-parallel ranks have whole sizes
ITERATIONS = 24  # of the golden-section search
GOLDEN = (5**0.5 - 1) / 2


LowerBound = Callable[[Job, CostModel, Choice | None], float]
"""A lower bound on a judge's values, for a fixed layout or, with None, for all of them."""


def no_bound(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """The trivial bound, 0, for a judge whose values are only known to be positive."""
    return 0.0


def lower_bound_s(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Lower bound in seconds on the step of every plan of the job that a search may find.

    A step takes at least the mean over ranks of what each one executes: all passes, and one update of every
    trained weight (the area bound). It also takes at least as long as any sample's path through modules that
    feed one another, forward and backward, call after call (the path bound). Large calls reduce the area;
    tensor- or context-parallel ranks shorten the path; no call does both. So a step takes at least any
    weighted mean of the two in which each layer uses the kind of call that is best for both together: the
    Lagrangian relaxation of the shortest step that area and paths all fit in, at the best multiplier (Held
    and Karp 1971, "The traveling-salesman problem and minimum spanning trees: part II", for its use as a
    bound). With a fixed layout the area may also be that of one module on the ranks that hold it.

    Why it holds: a rank runs its passes and then its STEP one after the other. Passes take at least what
    `LeastWork` counts, whatever the degrees, stages, microbatches, order and settings; recomputation,
    messages between stages, waiting and imbalance only add. Of the paths, the mean over samples is taken,
    which is at most the longest.

    Args:
        layout: a choice whose stages stay on their ranks; None: layouts are open.

    Complexity: that of `least_works`, plus `ITERATIONS` minima over all kinds of calls for every path through
    the modules.
    """
    works, updates_s = least_works(job, cost, layout, even), _updates_s(job, cost, even)
    ranks = dict.fromkeys(updates_s, job.usable_ranks)
    shares = [{module: 1 / num for module, num in ranks.items()}]
    if layout is not None:
        num_held = {m: len({r for s in layout.stages if s.module == m for r in s.flat_ranks}) for m in ranks}
        shares += [{module: 1 / num} for module, num in num_held.items() if num]
    return ROUNDING * max(
        weighed_s(works, updates_s, share, path) for share in shares for path in module_paths(job.model)
    )


def least_rank_s(job: Job, cost: CostModel, layout: Choice | None, weight: Weight) -> float:
    """Lower bound on the rank-seconds of a step, each weighted by its kind of device.

    This is the area of `lower_bound_s`: it holds for plans on any number of ranks.
    """
    works, updates_s = least_works(job, cost, layout, weight), _updates_s(job, cost, weight)
    return ROUNDING * (float_sum(updates_s.values()) + float_sum(work.area_s for work in works.values()))


def weighed_s(
    works: Mapping[str, LeastWork],
    updates_s: Mapping[str, float],
    shares: Mapping[str, float],
    path: tuple[Part, ...],
) -> float:
    """The largest weighted mean of the area, each module by its share of a rank, and of all samples' paths.

    It is concave in the weight of the paths: golden-section search.
    """
    fixed_s = float_sum(share * updates_s[module] for module, share in shares.items())
    on_path = frozenset.intersection(*(works[part.module].samples for part in path))
    part_of = {part.module: part for part in path}
    terms = [
        work.along(shares.get(module, 0.0), part_of.get(module), on_path) for module, work in works.items()
    ]

    def mean_s(weight: float) -> float:
        return (1 - weight) * fixed_s + float_sum(term.least_s(1 - weight, weight) for term in terms)

    low, high = 0.0, 1.0
    for _ in range(ITERATIONS):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if mean_s(left) >= mean_s(right) else (left, high)
    return max(mean_s(0.0), mean_s((low + high) / 2), mean_s(1.0))


def module_paths(model: ModelGraph) -> Iterator[tuple[Part, ...]]:
    """Every path of a sample through the modules, from one that reads no other to one that no other reads."""

    def onward(module: str, first: int) -> Iterator[tuple[Part, ...]]:
        edges = model.edges_out_of(module)
        if not edges:
            yield (Part(module, first, len(model.module(module).layers)),)
        for edge in edges:
            part = Part(module, first, edge.after_layer + 1)
            yield from ((part, *rest) for rest in onward(edge.target, edge.before_layer))

    for module in model.modules:
        if not model.edges_into(module.name):
            yield from onward(module.name, 0)


def _updates_s(job: Job, cost: CostModel, weight: Weight) -> dict[str, float]:
    """By module, seconds to update its trained weights on one rank, without weights that layers share."""
    updates_s = {}
    for module in job.model.modules:
        trained = sum(
            parameter.num_elements
            for layer in module.layers
            for parameter in trained_parameters(layer)
            if parameter.name not in {shared for _, shared in layer.tied}
        )
        updates_s[module.name] = WHOLE_PARTS * min(
            weight(device) * least_update_s(trained, cost.on(device), job.settings)
            for device in kinds_of_device(job)
        )
    return updates_s
