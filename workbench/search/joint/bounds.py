"""What no plan of a job beats: work over ranks, and the way of one sample."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from workbench.cost.least_time import NOTHING, LeastTime, LeastTimes, least_of
from workbench.cost.model import CostModel, Work
from workbench.job.job import Job
from workbench.plan.build import chunked_microbatches
from workbench.plan.routing import routing_of
from workbench.plan.work import even_work_of
from workbench.planner.assembly import empty_draft
from workbench.planner.layer_cost import alike_layers
from workbench.planner.layout_search import usable_ranks
from workbench.search.joint.choice import Choice
from workbench.timing.price import least_update_s

ROUNDING = 1 - 1e-6  # of areas, which are whole numbers where tokens are shared
WHOLE_PARTS = 0.99  # of weights, whose parts on tensor-parallel ranks are whole numbers


LowerBound = Callable[[Job, CostModel, Choice | None], float]
"""That no value of a judge is below, with a layout that stays or none."""


def no_bound(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Of a judge whose values are known to be positive, and no more."""
    return 0.0


def lower_bound_s(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Seconds that no plan of the job takes less than, among those that a search may find.

    All work at the best rates that the machine's tables have for the job's own shapes, and the update of
    every weight once, spread evenly over all ranks that may be used. With a layout that stays, also every
    module's work over the ranks that hold it, and the longest way of one sample there and back, each of its
    passes on as many ranks as one stage has.

    Why it holds: a rank does its passes and then its STEP one after the other, so a step takes no less than
    the mean over ranks of their sum. Passes take together no less than they are counted, see `LeastTimes`,
    whatever the degrees, stages, microbatches, order and settings; recomputation, messages, waiting and
    unequal shares only add. Every trained weight is updated by one rank at least. A module may have
    context-parallel ranks or not, on any kind of device: of these families the least counts.

    Args:
        layout: the choice whose stages stay on their ranks; None: layouts are open.

    Complexity: O(distinct samples x kinds of layers), and one bound of a table for every product's shape.
    """
    work, updates_s = _works(job, cost, layout, even), _updates_s(job, cost, even)
    totals = {
        name: update_s + sum(each[name].all_s for each in work if name in each)
        for name, update_s in updates_s.items()
    }
    found = [sum(totals.values()) / usable_ranks(job)]
    if layout is not None:
        held = {
            module: {r for s in layout.stages if s.module == module for r in s.flat_ranks}
            for module in totals
        }
        found += [totals[module] / len(ranks) for module, ranks in held.items() if ranks]
        found += [_way_s(job, layout, each) for each in work]
    return ROUNDING * max(found)


def least_rank_s(job: Job, cost: CostModel, layout: Choice | None, weight: "Weight") -> float:
    """Seconds of all ranks together that a step takes at least, each by what a device's seconds weigh.

    As `lower_bound_s`, of which it is the sum over ranks: it holds for plans on any number of them.
    """
    work = _works(job, cost, layout, weight)
    passes_s = sum(each.all_s for sample in work for each in sample.values())
    return ROUNDING * (passes_s + sum(_updates_s(job, cost, weight).values()))


Weight = Callable[[str], float]
"""Of a second on a device of that kind."""


def even(device: str) -> float:
    """A second is a second."""
    return 1.0


def _works(job: Job, cost: CostModel, layout: Choice | None, weight: Weight) -> list[dict[str, LeastTime]]:
    """By sample and module."""
    draft = empty_draft(job, "bound")
    routing = routing_of(draft)
    alone = chunked_microbatches(draft, {place: [[sample]] for place, sample in enumerate(job.batch)})
    works = [
        (each.replica, each.module, routing.flow(each).needs[each.module], even_work_of(draft, each))
        for each in alone
    ]
    found: list[dict[str, LeastTime]] = [{} for _ in job.batch]
    for module in job.model.modules:
        mine = [(sample, needs, work) for sample, name, needs, work in works if name == module.name]
        if not mine:
            continue
        stock = Work(tuple(row for _, _, work in mine for row in work.rows))
        families = list(_families(job, cost, layout, module.name, stock))
        firsts = alike_layers(job.model, module.name).firsts
        known: dict[tuple[object, ...], LeastTime] = {}
        for sample, needs, work in mine:
            key = needs, work
            if key not in known:
                kinds = Counter(zip(firsts, needs, strict=True))
                tried = (
                    [least.of(module.layers[at], work, need).scaled(num) for (at, need), num in kinds.items()]
                    for _, least in families
                )
                known[key] = least_of(
                    sum(times, NOTHING).scaled(weight(device))
                    for (device, _), times in zip(families, tried, strict=True)
                )
            found[sample][module.name] = known[key]
    return found


def _families(
    job: Job, cost: CostModel, layout: Choice | None, module: str, stock: Work
) -> Iterator[tuple[str, LeastTimes]]:
    """Every kind of device, without and with context-parallel ranks."""
    stages = [stage for stage in layout.stages if stage.module == module] if layout else []
    most_tp = max((stage.tp for stage in stages), default=usable_ranks(job))
    may_divide = any(stage.cp > 1 for stage in stages) if layout else usable_ranks(job) > 1
    must_divide = bool(stages) and all(stage.cp > 1 for stage in stages)
    for device in _devices(job):
        precision = job.settings.precision
        least = LeastTimes(cost.on(device), precision, stock, num_ranks=most_tp, cuts_tokens=False)
        if not must_divide:
            yield device, least
        if may_divide:
            yield device, least.cutting_tokens()


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
            for device in _devices(job)
        )
    return found


def _devices(job: Job) -> tuple[str, ...]:
    """Kinds of them."""
    return tuple(dict.fromkeys(node.device for node in job.cluster.nodes))


def _way_s(job: Job, layout: Choice, work: Mapping[str, LeastTime]) -> float:
    """The longest chain of modules that read one another, there and back."""
    longest: dict[str, float] = {}
    for module in job.model.modules:  # a module stands behind those that it reads
        widest = max((s.tp * s.cp for s in layout.stages if s.module == module.name), default=1)
        own_s = work[module.name].way_s / widest if module.name in work else 0.0
        ahead = (longest.get(edge.source, 0.0) for edge in job.model.edges_into(module.name))
        longest[module.name] = own_s + max(ahead, default=0.0)
    return max(longest.values())
