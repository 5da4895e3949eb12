"""Keys of plans that differ only in where layers are cut: their rows and orders of passes are equal."""

from collections.abc import Collection
from typing import Any

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.lru_cache import Identity, LruCache, value_key
from workbench.plan.plan import Plan
from workbench.plan.routing import Routing, routing_of
from workbench.plan.stage import Stage

Needs = tuple[tuple[bool, bool, bool], ...]  # carries, computes an input's gradient, computes weights'

# by module, layers and modules present: the results of `_edges` and `_needs`
BorderFacts = dict[tuple[str, tuple[int, int], tuple[frozenset[str], ...]], tuple[tuple[Any, ...], Needs]]
Present = dict[tuple[str, int], tuple[frozenset[str], ...]]  # (module, replica) -> modules in microbatches


class Frame:
    """Everything that decides something about a plan, as one key that is hashed once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Frame) and self.parts == other.parts)


_PRESENT: LruCache[Present] = LruCache(1024)
_UNIQUE: LruCache[Frame] = LruCache(4096)  # one object of equal frames: they are compared in full once
_WITHOUT_PROGRAMS: LruCache[Frame] = LruCache(64)  # of the last stages
_BORDER_FACTS: LruCache[BorderFacts] = LruCache(16)  # of models; filled on use


@cached_on_instance
def frame_of(plan: Plan) -> Frame:
    """Return the plan's frame: everything but the layers of its stages, and what these show at their borders.

    That is the size of what leaves a stage, which gradients are computed in and downstream of it, and which
    edges end in it. Weights are not part of it, so neither are gradient groups, nor who updates which
    weights. Models and clusters are compared by identity.

    Complexity: O(stages + items + actions).
    """
    settings = plan.settings
    fixed = (
        Identity(plan.model),
        Identity(plan.cluster),  # who sends between unequal grids goes by its links
        *map(value_key, (plan.batch, plan.microbatches)),
        settings.precision,
        settings.boundaries,
        tuple(  # who waits for reduced gradients goes by how often they are
            [
                (own.module, own.instances, own.is_gathered_once)
                for own in settings.modules
                if own.shards_parameters
            ]
        ),
    )
    without_programs = _WITHOUT_PROGRAMS.get_or(
        (*fixed, value_key(plan.stages)), lambda: Frame((*fixed, *_borders(plan)))
    )
    frame = Frame((without_programs, value_key(plan.token_shards), value_key(plan.programs)))
    return _UNIQUE.get_or(frame, lambda: frame)


def _borders(plan: Plan) -> tuple[tuple[Any, ...], ...]:
    """Return the order of stages, and for each its placement and what it shows at its borders."""
    routing = routing_of(plan)
    position_of = {
        stage.id: position for chain in plan.chain.values() for position, stage in enumerate(chain)
    }
    in_order = sorted(plan.stages, key=lambda stage: (stage.module, stage.layers, stage.replica))
    modules = {stage.module for stage in plan.stages}
    present = _PRESENT.get_or(
        (Identity(plan.model), Identity(plan.batch), value_key(plan.microbatches), *sorted(modules)),
        lambda: _present(routing, modules),
    )
    facts, stages = _BORDER_FACTS.get_or(Identity(plan.model), dict), []
    for stage in plan.stages:
        key = stage.module, stage.layers, present.get((stage.module, stage.replica), ())
        if key not in facts:
            facts[key] = _edges(routing, stage), _needs(routing, *key)
        grid = stage.ranks, stage.ep, stage.joint_replicas
        identity = stage.id, stage.module, stage.replica, *grid, position_of[stage.id]
        stages.append((identity, facts[key]))
    return tuple([stage.id for stage in in_order]), tuple(stages)


def _present(routing: Routing, modules: Collection[str]) -> Present:
    return {
        name: tuple(dict.fromkeys(map(routing.present, microbatches)))
        for name, microbatches in routing.plan.microbatches_of.items()
        if name[0] in modules
    }


def _edges(routing: Routing, stage: Stage) -> tuple[Any, ...]:
    """Return what leaves the stage, and the edges that begin or end in it."""
    model, (first, last) = routing.plan.model, stage.layers
    leaving = tuple(
        (layer.emits, layer.out_width) for layer in _last(model.module(stage.module).layers, last)
    )
    starting = tuple(
        edge.name for edge in model.edges_out_of(stage.module) if first <= edge.after_layer < last
    )
    ending = tuple(edge.name for edge in model.edges_into(stage.module) if edge.entered_in(stage.layers))
    return leaving, starting, ending


def _needs(
    routing: Routing, module: str, layers: tuple[int, int], present: tuple[frozenset[str], ...]
) -> Needs:
    """Return, for each set of modules present in its microbatches, the gradients the stage needs."""
    needs_of_sets = []
    for modules in present:
        flow = routing.flow_of(modules)
        needs = flow.needs[module][slice(*layers)]
        needs_of_sets.append(
            (
                any(_last(flow.carries[module], layers[1])),
                any(need.input_grad for need in needs),
                any(need.weight_grad for need in needs),
            )
        )
    return tuple(needs_of_sets)


def _last(of_layers: tuple[Any, ...], last: int) -> tuple[Any, ...]:
    """Return the entry of a stage's last layer; empty if there is no such layer, which `check` refuses."""
    return of_layers[max(0, last - 1) : last]
