"""Keys of what stages compute, equal for stages whose layers differ in name alone, as blocks often do."""

from collections.abc import Hashable

from workbench.model.layer import Layer
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Plan
from workbench.plan.recomputed_layers import recomputed_in
from workbench.plan.routing import Routing
from workbench.plan.sequence import token_borders
from workbench.plan.stage import Stage

_NUMBERS: LruCache[tuple[int, ...]] = LruCache(1024)


def contents(plan: Plan, stage: Stage) -> Hashable:
    """Return a key, within a model and a module, of what a rank of the stage computes except for gradients.

    The key covers all of every layer but its name, whether backwards recompute it, and whether tokens are
    split or gathered there; the layer in front, whose output enters; and whether the module ends here.
    Parallel degrees are not part of it.

    Complexity: O(layers), once for each range of layers in a plan.
    """
    cache = _key_cache(plan)
    key = stage.module, stage.layers, stage.tp
    if key not in cache:
        cache[key] = _stage_contents(plan, stage)
    return cache[key]


def contents_and_needs(routing: Routing, stage: Stage) -> tuple[Hashable, ...]:
    """Return `contents`, and which gradients the layers compute, by modules present in microbatches."""
    present, flow_of = routing.present_in((stage.module, stage.replica)), routing.flow_of
    needs = [(one, flow_of(one).needs[stage.module][slice(*stage.layers)]) for one in dict.fromkeys(present)]
    return contents(routing.plan, stage), *needs


@cached_on_instance
def _key_cache(plan: Plan) -> dict[tuple[str, tuple[int, int], int], Hashable]:
    """Keys by module, layers and tensor-parallel degree; filled on use."""
    return {}


def _stage_contents(plan: Plan, stage: Stage) -> Hashable:
    numbers = layer_numbers(plan, stage.module)
    first, last = stage.layers
    borders = token_borders(plan, stage)
    divided = tuple(
        tuple(index - first for index in indices)
        for indices in (borders.divided, borders.divides, borders.joins)
    )
    front, again = numbers[first - 1] if first else None, recomputed_in(plan, stage)
    return numbers[first:last], again, divided, front, last == len(numbers)


def layer_numbers(plan: Plan, module: str) -> tuple[int, ...]:
    """[layers] number of each layer; within a model and module, equal ones are equal but for the name."""

    def number() -> tuple[int, ...]:
        number_of: dict[Hashable, int] = {}
        return tuple(
            number_of.setdefault(_shape(layer), len(number_of)) for layer in plan.model.module(module).layers
        )

    return _NUMBERS.get_or((Identity(plan.model), module), number)


def _shape(layer: Layer) -> Hashable:
    return Identity(layer.operators), layer.kind, layer.out_width, layer.emits, layer.trainable, layer.tied
