"""The cost that a strategy balances: forward and backward seconds of each layer on a typical microbatch."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.cost.model import CostModel, Work
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.block_modules import BlockModule, part_of
from workbench.model.frozen import FrozenRule, Needs, gradient_needs
from workbench.model.layer import Layer
from workbench.model.model_graph import ModelGraph
from workbench.plan.joint import in_turn
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.narrow_products import multiplying
from workbench.plan.plan import Plan
from workbench.plan.recomputed_layers import recomputed_layers
from workbench.plan.sequence import dividing
from workbench.plan.work import even_work_of, work_of
from workbench.planner.assembly import layout_of
from workbench.timing.grid_links import GridCost, GridLinks

Shapes = Sequence[tuple[Work, float]]  # distinct microbatch shapes, and the share of each


class AlikeLayers(NamedTuple):
    """Which layers of a module have equal prices.

    Args:
        needs: by layer, the gradients that run.
        firsts: by layer, the index of the first layer with the same operators, output and gradients.
    """

    needs: tuple[Needs, ...]
    firsts: tuple[int, ...]


_ALIKE: LruCache[AlikeLayers] = LruCache(256)
_SHAPES: LruCache[Shapes] = LruCache(1024)


def alike_layers(model: ModelGraph, module: str, rule: FrozenRule = FrozenRule.EXACT) -> AlikeLayers:
    """Which layers of a model's module have equal prices. Complexity: of `gradient_needs`, once per model."""
    return _ALIKE.get_or((Identity(model), module, rule), lambda: _alike_layers(model, module, rule))


def _alike_layers(model: ModelGraph, module: str, rule: FrozenRule) -> AlikeLayers:
    needs = gradient_needs(model, rule=rule)[module]
    first_of: dict[object, int] = {}
    firsts = []
    for index, (layer, need) in enumerate(zip(model.module(module).layers, needs, strict=True)):
        key = layer.kind, layer.operators, layer.out_width, layer.emits, layer.trainable, need
        firsts.append(first_of.setdefault(key, index))
    return AlikeLayers(needs, tuple(firsts))


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Mean seconds of a layer over the microbatches of the batch."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """One forward and one backward: what frozen-aware partitioning balances."""
        return self.forward_s + self.backward_s


def mean_cost(
    machine: GridCost,
    layer: Layer,
    need: Needs,
    shapes: Shapes,
    *,
    recomputed: bool,
    parts: Collection[BlockModule] = (),
) -> LayerCost:
    """The mean cost of one layer over microbatch shapes.

    Recomputation adds one forward where any gradient of the layer runs, and the measured overhead of a
    checkpoint.

    Args:
        parts: of a block that are recomputed if the layer is not.

    Complexity: O(shapes).
    """
    again = recomputed and need.any
    part = part_of(layer, parts) if parts and need.any and not again else None
    forward_s = backward_s = 0.0
    for work, share in shapes:
        time = machine.layer_time(layer, work)
        is_measured = again and time.checkpoint is not None
        forward_s += share * (time.checkpointed_forward_s(need) if is_measured else time.forward_s)
        backward_s += share * (time.backward_s(need) + (time.again_s() if again else 0.0))
        if part is not None:
            backward_s += share * machine.layer_time(part, work).forward_s
    return LayerCost(forward_s, backward_s)


def machine_of(job: Job, layout: ModuleLayout, cost: CostModel) -> GridCost:
    """The cost model of a layout's ranks; with pools, of the device where the layout starts."""
    links = GridLinks(None, None)
    if job.pools and layout.rank_offset is not None:
        first = (layout.rank_offset,)
        cost, links = cost.on(job.cluster.device_of(first)), GridLinks(job.cluster.joining(first), None)
    cost = dividing(multiplying(cost, job.settings, layout.module), job.settings, layout.module)
    cost = cost.with_expert_parallel(layout.ep)
    return GridCost(cost, layout.tp, layout.cp, job.settings.precision, links)


def layer_costs(
    job: Job, draft: Plan, layout: ModuleLayout, cost: CostModel, rule: FrozenRule
) -> tuple[LayerCost, ...]:
    """Forward and backward seconds of each layer of a module.

    Source: Cornstarch (ICML) section 3.1, T_l = F_l + B_l with B_l by the frozen rule.
    Differs: averaged over the microbatches of the batch, since sizes vary; context-parallel ranks of a
    draft without token shards count as sharing rows evenly. Averaged over joint replicas, too, of which a
    pass takes the slowest.

    Complexity: O(layers + distinct layers x distinct microbatch shapes).
    """
    machine, settings = machine_of(job, layout, cost), job.settings.of(layout.module)
    layers, alike = job.model.module(layout.module).layers, alike_layers(job.model, layout.module, rule)
    shapes = _shapes(draft, layout.module, layout.joint_replicas)
    again = recomputed_layers(settings.recompute, settings.recompute_layers, layers)
    kinds = list(zip(alike.firsts, again, strict=True))
    cost_of = {
        (first, is_again): mean_cost(
            machine,
            layers[first],
            alike.needs[first],
            shapes,
            recomputed=is_again,
            parts=settings.computed_again,
        )
        for first, is_again in set(kinds)
    }
    return tuple(cost_of[kind] for kind in kinds)


def believed_layers_s(
    job: Job, draft: Plan, cost: CostModel, layer_s: Callable[[LayerCost], float]
) -> dict[str, tuple[float, ...]]:
    """Module -> seconds of each layer over a typical microbatch, by a planner's estimate."""
    return {
        module.name: tuple(
            layer_s(layer)
            for layer in layer_costs(job, draft, layout_of(job, module.name), cost, FrozenRule.EXACT)
        )
        for module in job.model.modules
    }


def _shapes(draft: Plan, module: str, num_joint: int) -> Shapes:
    """Distinct microbatch shapes of a module and the share of each; token owners follow from the stages."""
    owned = (Identity(draft.token_shards), Identity(draft.stages)) if draft.token_shards else ()
    key = Identity(draft.model), Identity(draft.batch), value_key(draft.microbatches), owned, module
    return _SHAPES.get_or((*key, num_joint), lambda: _distinct(draft, module, num_joint))


def _distinct(draft: Plan, module: str, num_joint: int) -> Shapes:
    work_of_microbatch = work_of if draft.token_shards and num_joint == 1 else even_work_of
    microbatches = (microbatch for microbatch in draft.microbatches if microbatch.module == module)
    parts = (part for microbatch in microbatches for part in in_turn(microbatch, num_joint))
    of_parts = [work_of_microbatch(draft, part) for part in parts]
    objects = {id(work): work for work in of_parts}  # most are one object: fewer to hash
    works: Counter[Work] = Counter()
    for number, times in Counter(map(id, of_parts)).items():
        works[objects[number]] += times
    total = sum(works.values())
    return [(work, times / total) for work, times in works.items()]
