"""Totals of layers on one rank: seconds and bytes of passes, and elements that are held and updated."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from workbench.float_sum import float_sum
from workbench.model.experts import is_of_expert
from workbench.model.layer import Layer, Parameter, Shard
from workbench.model.trained import trained_parameters
from workbench.plan.plan import Settings
from workbench.planner.layout_choice import ModuleChoice
from workbench.planner.matrix_updates import NO_MATRICES, Matrices, joined, matrices_on


class Tied(NamedTuple):
    """A weight that several layers of a module use, as one tensor on a rank.

    Args:
        name: the name that these layers share.
        weights, trained: elements that the rank holds, and those of them that the optimizer updates.
        num_stages: stages of a pipeline that hold it, each on ranks of its own.
    """

    name: str
    weights: float
    trained: float
    num_stages: int = 1


class Elements(NamedTuple):
    """Elements of layers on one rank, known without the price of a pass.

    Args:
        weights, trained: elements that the rank holds, and those of them that the optimizer updates, with
            tied ones once.
        of_experts: updated elements of distributed experts, whose number of holders differs.
        expert_weights: likewise, of all that the rank holds.
        matrices: those of the updated elements that are Muon's.
        tied: weights that several layers use.
    """

    weights: float
    trained: float
    of_experts: float
    expert_weights: float
    matrices: Matrices = NO_MATRICES
    tied: tuple[Tied, ...] = ()


class Totals(NamedTuple):
    """Totals of layers on one rank over one microbatch: sums, but for the maximum of working memory.

    Args:
        num_layers: their number.
        forward_s, backward_s: recomputation is part of the backward.
        kept_bytes: kept from forward to backward.
        working_bytes: needed besides inside a pass, including recomputed activations.
        held: their elements.
    """

    num_layers: int
    forward_s: float
    backward_s: float
    kept_bytes: float
    working_bytes: float
    held: Elements


def elements_on(layer: Layer, choice: ModuleChoice, settings: Settings) -> Elements:
    """The elements of one layer on one rank."""
    expert_weights = 0.0
    if choice.num_expert_holders != choice.num_holders:
        expert_weights = float_sum(p.num_elements / choice.ep for p in layer.parameters() if is_of_expert(p))
    return Elements(
        weights=float_sum(p.num_elements / _num_cuts(p, choice) for p in layer.parameters()),
        trained=float_sum(p.num_elements / _num_cuts(p, choice) for p in trained_parameters(layer)),
        of_experts=expert_weights if layer.trainable else 0.0,
        expert_weights=expert_weights,
        matrices=matrices_on(settings, layer, choice),
        tied=_tied_on(layer, choice),
    )


def _tied_on(layer: Layer, choice: ModuleChoice) -> tuple[Tied, ...]:
    if not layer.tied:
        return ()
    shared = {name for _, name in layer.tied}
    trained = {parameter.name for parameter in trained_parameters(layer)}
    held = {p.name: p.num_elements / _num_cuts(p, choice) for p in layer.parameters() if p.name in shared}
    return tuple(Tied(name, elements, elements * (name in trained)) for name, elements in held.items())


def _num_cuts(parameter: Parameter, choice: ModuleChoice) -> int:
    """The number of ranks that a weight is cut over, or that its experts are distributed over."""
    if choice.ep > 1 and is_of_expert(parameter):
        return choice.ep
    return 1 if parameter.shard is Shard.REPLICATED else choice.tp


def elements_of(parts: Iterable[Elements]) -> Elements:
    """The elements of several layers on the same rank."""
    weights, trained, of_experts, expert_weights, matrices, tied = zip(*parts, strict=True)
    users = [each for of_layer in tied for each in of_layer]
    once = {each.name: each for each in users}
    more = Counter(each.name for each in users) - Counter(once.keys())  # uses besides the first
    again = [(each, more[each.name]) for each in once.values()]
    return Elements(
        float(float_sum(weights) - float_sum(each.weights * uses for each, uses in again)),
        float(float_sum(trained) - float_sum(each.trained * uses for each, uses in again)),
        float(float_sum(of_experts)),
        float(float_sum(expert_weights)),
        joined(matrices),
        tuple(once.values()),
    )


def total_of(layers: Sequence[Totals]) -> Totals:
    """Totals of consecutive layers. Complexity: O(layers)."""
    if not layers:
        return Totals(0, 0.0, 0.0, 0.0, 0.0, Elements(0.0, 0.0, 0.0, 0.0))
    num, forward, backward, kept, working, held = zip(*layers, strict=True)
    forward_s, backward_s, kept_bytes = (float(float_sum(values)) for values in (forward, backward, kept))
    return Totals(sum(num), forward_s, backward_s, kept_bytes, float(max(working)), elements_of(held))


def on_own_ranks(stages: Sequence[Totals]) -> tuple[Totals, ...]:
    """Stages of a pipeline, each on ranks of its own, with the number of them that hold each tied weight."""
    num_stages = Counter(each.name for stage in stages for each in stage.held.tied)
    tied = [
        tuple(each._replace(num_stages=num_stages[each.name]) for each in stage.held.tied) for stage in stages
    ]
    return tuple(
        stage._replace(held=stage.held._replace(tied=each)) for stage, each in zip(stages, tied, strict=True)
    )
