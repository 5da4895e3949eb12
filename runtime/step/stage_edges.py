"""Edges between modules, from the view of one stage."""

from torch import Tensor

from workbench.model.model_graph import Edge
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_edge
from workbench.plan.stage import Stage


def edges_into_stage(plan: Plan, stage: Stage) -> tuple[Edge, ...]:
    """Edges that enter a layer of the stage; ValueError for one that cannot run."""
    edges = tuple(edge for edge in plan.model.edges_into(stage.module) if edge.entered_in(stage.layers))
    for edge in edges:
        check_edge(plan, edge)
    return edges


def edges_before_the_end(plan: Plan, stage: Stage) -> tuple[Edge, ...]:
    """Edges that leave the stage before its last layer."""
    first, last = stage.layers
    return tuple(e for e in plan.model.edges_out_of(stage.module) if first <= e.after_layer < last - 1)


def entering_part(edge: Edge, layer: int, features_ED: Tensor, *, is_aside: bool) -> Tensor:
    """[E, D] the part of an edge's features that enters a layer.

    Args:
        is_aside: whether cross-attention reads them, all of them; otherwise each layer has its own part of
            stacked features.
    """
    if is_aside or len(edge.entered) == 1:
        return features_ED
    return features_ED.chunk(len(edge.entered), dim=1)[edge.entered.index(layer)]
