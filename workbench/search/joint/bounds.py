"""What no plan of a job beats: work over ranks, and the way of one sample; in closed form."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from workbench.cost.least_time import LeastTime, least_time
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.model.frozen import Needs
from workbench.plan.build import chunked_microbatches
from workbench.plan.routing import routing_of
from workbench.plan.work import work_of
from workbench.planner.assembly import empty_draft
from workbench.planner.layout_search import usable_ranks
from workbench.search.joint.choice import Choice
from workbench.search.joint.evaluate import LEAST_SHARE

ROUNDING = 1 - 1e-6  # of areas, which are whole numbers where tokens are shared


LowerBound = Callable[[Job, CostModel, Choice | None], float]
"""That no value of a judge is below, with a layout that stays or none."""


def no_bound(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Of a judge whose values are known to be positive, and no more."""
    return 0.0


class ModuleWork(NamedTuple):
    """Seconds times ranks of one sample in one module.

    Args:
        way_s: forward, and gradients through the layers, which others wait for.
        weights_s: gradients of weights, for which nobody waits.
    """

    way_s: float
    weights_s: float


def lower_bound_s(job: Job, cost: CostModel, layout: Choice | None) -> float:
    """Seconds that no plan of the job takes less than, among those that a search may find.

    Attention counts where no module has context-parallel ranks, which may be simulated tile by tile.
    All work at the best rates of the machine, spread evenly over all ranks that may be used. With a layout
    that stays, also every module's work over the ranks that hold it, and the longest way of one sample
    there and back, each of its passes on as many ranks as one stage has.

    Args:
        layout: the choice whose stages stay on their ranks; None: layouts are open.

    Complexity: O(distinct samples x layers).
    """
    is_whole = layout is not None and all(stage.cp == 1 for stage in layout.stages)
    work = _works(job, cost, counts_attention=is_whole)
    totals = {
        module.name: sum(sum(each[module.name]) for each in work if module.name in each)
        for module in job.model.modules
    }
    found = [sum(totals.values()) / usable_ranks(job)]
    if layout is not None:
        held = {
            module: {r for s in layout.stages if s.module == module for r in s.flat_ranks}
            for module in totals
        }
        found += [totals[module] / len(ranks) for module, ranks in held.items() if ranks]
        found += [_way_s(job, layout, each) for each in work]
    share = 1.0 if is_whole else LEAST_SHARE
    return share * ROUNDING * max(found)


def _works(job: Job, cost: CostModel, *, counts_attention: bool) -> list[dict[str, ModuleWork]]:
    """By sample and module."""
    draft = empty_draft(job, "bound")
    chunks = {place: [[sample]] for place, sample in enumerate(job.batch)}
    alone = chunked_microbatches(draft, chunks)
    routing = routing_of(draft)
    machines = list(_machines(job, cost))
    found: list[dict[str, ModuleWork]] = [{} for _ in job.batch]
    known: dict[tuple[object, ...], ModuleWork] = {}
    for microbatch in alone:
        needs = routing.flow(microbatch).needs[microbatch.module]
        work = work_of(draft, microbatch)
        key = microbatch.module, work, needs
        if key not in known:
            layers = job.model.module(microbatch.module).layers
            each = (
                [
                    least_time(
                        machine,
                        layer,
                        work,
                        job.settings.precision,
                        counts_attention=counts_attention,
                    )
                    for layer in layers
                ]
                for machine in machines
            )
            known[key] = min((_total(times, needs) for times in each), key=sum)
        found[microbatch.replica][microbatch.module] = known[key]
    return found


def _machines(job: Job, cost: CostModel) -> Iterator[CostModel]:
    """One of every kind of device."""
    for device in dict.fromkeys(node.device for node in job.cluster.nodes):
        yield cost.on(device)


def _total(times: list[LeastTime], needs: tuple[Needs, ...]) -> ModuleWork:
    way_s = sum(
        time.forward_s + need.input_grad * time.input_grad_s for time, need in zip(times, needs, strict=True)
    )
    weights_s = sum(need.weight_grad * time.weight_grad_s for time, need in zip(times, needs, strict=True))
    return ModuleWork(way_s, weights_s)


def _way_s(job: Job, layout: Choice, work: Mapping[str, ModuleWork]) -> float:
    """The longest chain of modules that read one another, there and back."""
    longest: dict[str, float] = {}
    for module in job.model.modules:  # a module stands behind those that it reads
        widest = max((s.tp * s.cp for s in layout.stages if s.module == module.name), default=1)
        own_s = work[module.name].way_s / widest if module.name in work else 0.0
        ahead = (longest.get(edge.source, 0.0) for edge in job.model.edges_into(module.name))
        longest[module.name] = own_s + max(ahead, default=0.0)
    return max(longest.values())
