"""What a strategy balances: forward and backward seconds of every layer on a typical microbatch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.cost.model import CostModel, Work
from workbench.job.job import Job, ModuleLayout
from workbench.model.frozen import FrozenRule, gradient_needs
from workbench.plan.plan import Plan, Recompute
from workbench.plan.sequence import dividing
from workbench.plan.work import work_of
from workbench.planner.assembly import layout_of


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Mean seconds of one layer over the microbatches of the batch."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """One forward and one backward: what frozen-aware partitioning balances."""
        return self.forward_s + self.backward_s


def layer_costs(
    job: Job, draft: Plan, layout: ModuleLayout, cost: CostModel, rule: FrozenRule
) -> tuple[LayerCost, ...]:
    """Forward and backward of each layer of a module.

    Source: Cornstarch (ICML) section 3.1, T_l = F_l + B_l with B_l by the frozen rule;
    recompute adds one forward where any gradient of the layer runs.
    Differs: averaged over the microbatches that the batch really has, since sizes vary.

    Complexity: O(layers x distinct microbatch shapes).
    """
    module = job.model.module(layout.module)
    cost = dividing(cost, job.settings, module.name).with_expert_parallel(layout.ep)
    link = None
    if job.pools and layout.rank_offset is not None:
        first = (layout.rank_offset,)
        cost, link = cost.on(job.cluster.device_of(first)), job.cluster.joining(first)
    needs = gradient_needs(job.model, rule=rule)[module.name]
    recompute = job.settings.of(module.name).recompute is Recompute.FULL
    shapes = _shapes(draft, module.name)
    found = []
    for layer, need in zip(module.layers, needs, strict=True):
        forward_s = backward_s = 0.0
        for work, share in shapes:
            time = cost.layer_time(
                layer, work, tp=layout.tp, cp=layout.cp, precision=job.settings.precision, link=link
            )
            forward_s += share * time.forward_s
            backward_s += share * time.backward_s(need)
            backward_s += share * (recompute and need.any) * time.forward_s
        found.append(LayerCost(forward_s, backward_s))
    return tuple(found)


def believed_layers_s(
    job: Job, draft: Plan, cost: CostModel, layer_s: Callable[[LayerCost], float]
) -> dict[str, tuple[float, ...]]:
    """Module -> seconds of each layer over a typical microbatch, as a planner believes them."""
    return {
        module.name: tuple(
            layer_s(layer)
            for layer in layer_costs(job, draft, layout_of(job, module.name), cost, FrozenRule.EXACT)
        )
        for module in job.model.modules
    }


def _shapes(draft: Plan, module: str) -> Sequence[tuple[Work, float]]:
    """Distinct microbatch shapes of a module and the share of each."""
    works = Counter(work_of(draft, m) for m in draft.microbatches if m.module == module)
    total = sum(works.values())
    return [(work, times / total) for work, times in works.items()]
