"""What plans have in common that differ in where layers are cut alone: their rows and orders are equal."""

from collections.abc import Collection
from typing import Any

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.plan import ModuleSettings, Plan, Sharding, Stage
from workbench.plan.routing import Routing, routing_of

Needs = tuple[tuple[bool, bool, bool], ...]  # carries, computes an input's gradient, computes weights'

# by module, layers and modules present: what `_edges` and `_needs` say
Shown = dict[tuple[str, tuple[int, int], tuple[frozenset[str], ...]], tuple[tuple[Any, ...], Needs]]
Present = dict[tuple[str, int], tuple[frozenset[str], ...]]  # (module, replica) -> modules in microbatches


class Frame:
    """Everything that decides something of a plan, as one key that is hashed once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Frame) and self.parts == other.parts)


_PRESENT: LruCache[Present] = LruCache(1024)
_ONE: LruCache[Frame] = LruCache(4096)  # of equal frames, so that they are compared in full once
_BARE: LruCache[Frame] = LruCache(64)  # of the last stages
_SHOWN: LruCache[Shown] = LruCache(16)  # of models; filled on use


@cached_on_instance
def frame_of(plan: Plan) -> Frame:
    """The plan's frame: all but the layers of its stages, and of these what they show at their borders.

    That is the size of what leaves a stage, which gradients run in it and behind it, and which edges end in
    it. Weights are no part of it, so gradient groups are not, nor who updates which of them. Models and
    clusters are told apart as objects.

    Complexity: O(stages + items + actions).
    """
    settings = plan.settings
    named = (
        Identity(plan.model),
        Identity(plan.cluster),  # who sends between unequal grids goes by its links
        *(value_key(each) for each in (plan.batch, plan.microbatches)),
        settings.precision,
        settings.boundaries,
        tuple([(each.module, each.instances) for each in settings.modules if _is_gathered(each)]),
    )
    bare = _BARE.get_or((*named, value_key(plan.stages)), lambda: Frame((*named, *_borders(plan))))
    frame = Frame((bare, value_key(plan.token_shards), value_key(plan.programs)))
    return _ONE.get_or(frame, lambda: frame)


def _borders(plan: Plan) -> tuple[tuple[Any, ...], ...]:
    """The order of stages, and of each where it stands and what it shows."""
    routing = routing_of(plan)
    index_of = {stage.id: at for chain in plan.chain.values() for at, stage in enumerate(chain)}
    in_order = sorted(plan.stages, key=lambda stage: (stage.module, stage.layers, stage.replica))
    modules = {stage.module for stage in plan.stages}
    present = _PRESENT.get_or(
        (Identity(plan.model), Identity(plan.batch), value_key(plan.microbatches), *sorted(modules)),
        lambda: _present(routing, modules),
    )
    shown, stages = _SHOWN.get_or(Identity(plan.model), dict), []
    for stage in plan.stages:
        key = stage.module, stage.layers, present.get((stage.module, stage.replica), ())
        if key not in shown:
            shown[key] = _edges(routing, stage), _needs(routing, *key)
        place = stage.id, stage.module, stage.replica, stage.ranks, stage.ep, index_of[stage.id]
        stages.append((place, shown[key]))
    return tuple([stage.id for stage in in_order]), tuple(stages)


def _is_gathered(own: ModuleSettings) -> bool:
    """Whether passes wait for weights; sharded optimizer states change the sums and updates behind them."""
    return own.sharding is Sharding.PARAMETERS


def _present(routing: Routing, modules: Collection[str]) -> Present:
    return {
        name: tuple(dict.fromkeys(map(routing.present, microbatches)))
        for name, microbatches in routing.plan.microbatches_of.items()
        if name[0] in modules
    }


def _edges(routing: Routing, stage: Stage) -> tuple[Any, ...]:
    """What leaves the stage, and the edges that begin or end in it."""
    model, (first, last) = routing.plan.model, stage.layers
    leaving = tuple(
        (layer.emits, layer.out_width) for layer in _last(model.module(stage.module).layers, last)
    )
    begun = tuple(edge.name for edge in model.edges_out_of(stage.module) if first <= edge.after_layer < last)
    ended = tuple(edge.name for edge in model.edges_into(stage.module) if edge.entered_in(stage.layers))
    return leaving, begun, ended


def _needs(
    routing: Routing, module: str, layers: tuple[int, int], present: tuple[frozenset[str], ...]
) -> Needs:
    """For each set of modules that its microbatches have."""
    found = []
    for modules in present:
        flow = routing.flow_of(modules)
        needs = flow.needs[module][slice(*layers)]
        found.append(
            (
                any(_last(flow.carries[module], layers[1])),
                any(need.input_grad for need in needs),
                any(need.weight_grad for need in needs),
            )
        )
    return tuple(found)


def _last(of_layers: tuple[Any, ...], last: int) -> tuple[Any, ...]:
    """Of the last layer of a stage; nothing for one that is not there, which `check` refuses."""
    return of_layers[max(0, last - 1) : last]
