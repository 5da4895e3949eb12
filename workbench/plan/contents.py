"""What stages have in common whose layers are equal but for their names, as blocks of a model are."""

from collections.abc import Hashable

from workbench.model.layer import Layer
from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Plan, Stage
from workbench.plan.sequence import token_borders

_NUMBERS: LruCache[tuple[int, ...]] = LruCache(1024)


def contents(plan: Plan, stage: Stage) -> Hashable:
    """A key, within a model and a module, of what a rank of the stage computes but for the gradients.

    Of every layer all but its name, and whether tokens are divided or joined there; the layer in front,
    whose output enters; and whether the module ends here. Degrees are no part of it.

    Complexity: O(layers), once for each place of a plan where layers are cut.
    """
    known = _known(plan)
    key = stage.module, stage.layers, stage.tp
    if key not in known:
        known[key] = _contents(plan, stage)
    return known[key]


@cached_on_instance
def _known(plan: Plan) -> dict[tuple[str, tuple[int, int], int], Hashable]:
    """By module, layers and tensor-parallel degree; filled on use."""
    return {}


def _contents(plan: Plan, stage: Stage) -> Hashable:
    numbers = _numbers(plan, stage.module)
    first, last = stage.layers
    borders = token_borders(plan, stage)
    divided = tuple(
        tuple(index - first for index in indices)
        for indices in (borders.divided, borders.divides, borders.joins)
    )
    return numbers[first:last], divided, numbers[first - 1] if first else None, last == len(numbers)


def layer_kinds(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Of every layer of a stage a number, within a model and a module; equal ones differ in name alone."""
    return _numbers(plan, stage.module)[slice(*stage.layers)]


def _numbers(plan: Plan, module: str) -> tuple[int, ...]:
    """[layers] equal ones have one number; equal operators are one object where a model repeats them."""

    def number() -> tuple[int, ...]:
        found: dict[Hashable, int] = {}
        return tuple(
            found.setdefault(_shape(layer), len(found)) for layer in plan.model.module(module).layers
        )

    return _NUMBERS.get_or((Identity(plan.model), module), number)


def _shape(layer: Layer) -> Hashable:
    return Identity(layer.operators), layer.kind, layer.out_width, layer.emits, layer.trainable, layer.tied
