"""Edges between modules as one stage has them."""

from workbench.model.model_graph import Edge
from workbench.plan.plan import Plan, Stage
from workbench.plan.runnable import check_edge


def edges_into_stage(plan: Plan, stage: Stage) -> tuple[Edge, ...]:
    """Those that enter a layer of the stage; ValueError for one that cannot run."""
    edges = tuple(edge for edge in plan.model.edges_into(stage.module) if edge.entered_in(stage.layers))
    for edge in edges:
        check_edge(plan, edge)
    return edges


def edges_before_the_end(plan: Plan, stage: Stage) -> tuple[Edge, ...]:
    """Those that leave the stage before its last layer."""
    first, last = stage.layers
    return tuple(e for e in plan.model.edges_out_of(stage.module) if first <= e.after_layer < last - 1)
