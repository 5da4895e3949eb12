"""How unequally a router loads its experts: the coefficient of variation (CV) of their shares of the rows.

The shares are those that experts have in the long run. Counts of one microbatch vary besides, as random
choices do, by a squared CV of (num_experts - 1) / rows; 0 is a router whose choices are that alone.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 4: its losses are the squared CV of
the experts' importance and of their load. Trainers log that of counts, as NeMo AutoModel's `moe/layer_0/cv`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import floor, sqrt
from typing import TypeGuard

from workbench.model.experts import ROUTER, num_chosen, num_experts
from workbench.model.layer import Layer, Matmul, Operator
from workbench.model.model_graph import ModelGraph, Module


def load_cv(layer: Layer) -> float:
    """The CV of the shares of a layer's experts; 0 of a layer without any."""
    return next((each.load_cv for each in layer.operators if _is_router(each)), 0.0)


def with_load_cv(layer: Layer, cv: float) -> Layer:
    """The layer with this CV of its experts' shares; the layer itself where it has it, or has no experts."""
    if all(each.load_cv == cv for each in layer.operators if _is_router(each)):
        return layer
    return replace(layer, operators=_loaded(layer.operators, cv))


def with_expert_load(module: Module, cv: float) -> Module:
    """The module with this CV in every layer with experts.

    Raises:
        ValueError: no experts, or more than a router can reach that sends every token to the same ones.
    """
    mixtures = [layer for layer in module.layers if num_experts(layer)]
    if not mixtures and cv:
        raise ValueError(f"module {module.name!r} has no experts: want expert_load_cv 0, got {cv:g}")
    most = min((most_load_cv(num_experts(layer), num_chosen(layer)) for layer in mixtures), default=0.0)
    if cv > most:
        raise ValueError(
            f"module {module.name!r}: want expert_load_cv up to {most:g}, where all tokens choose the same "
            f"experts, got {cv:g}; nearest: {most:g}"
        )
    return replace(module, layers=tuple([with_load_cv(layer, cv) for layer in module.layers]))


def most_load_cv(num_experts: int, num_chosen: int) -> float:
    """The CV where every token chooses the same experts, with equal shares of the rows; thousandths, cut."""
    return floor(1000 * sqrt(num_experts / num_chosen - 1)) / 1000


def counted_load_cv(rows: Sequence[int]) -> float:
    """The CV of the experts' shares by rows that each was counted to get, less what random choices make.

    Unbiased in its square but for the cut at 0; one microbatch with few rows for each expert says little.
    """
    total, squares = sum(rows), sum(count * count for count in rows)
    if total == 0:
        return 0.0
    return sqrt(max(0.0, len(rows) * squares / total**2 - 1 - square_of_chance(len(rows), total)))


def square_of_chance(num_experts: int, num_rows: float) -> float:
    """The squared CV of counts of so many rows, each of a random expert."""
    return (num_experts - 1) / num_rows


def stated_loads(model: ModelGraph) -> dict[str, float]:
    """Name of each module with experts -> the largest CV that any of its layers states."""
    loads = {
        module.name: [load_cv(layer) for layer in module.layers if num_experts(layer)]
        for module in model.modules
    }
    return {name: max(cvs) for name, cvs in loads.items() if cvs}


def _is_router(operator: Operator) -> TypeGuard[Matmul]:
    return isinstance(operator, Matmul) and operator.name == ROUTER


@lru_cache(maxsize=1024)
def _loaded(operators: tuple[Operator, ...], cv: float) -> tuple[Operator, ...]:
    return tuple([replace(each, load_cv=cv) if _is_router(each) else each for each in operators])
