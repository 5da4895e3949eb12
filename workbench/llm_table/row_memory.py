"""A row's plan as its memory account needs it: masks, results of experts, narrow inputs."""

from dataclasses import replace
from itertools import compress

from workbench.cost.products import ProductFormat
from workbench.llm_table.llm_row import LlmRow, YesNo
from workbench.memory.megatron import DROPPED
from workbench.memory.narrow_inputs import with_kept_inputs
from workbench.model.experts import JOIN
from workbench.model.layer import Layer, LayerKind, Operator, Pointwise
from workbench.plan.plan import Plan


def as_kept(plan: Plan, row: LlmRow) -> Plan:
    """The plan with layers for which `memory` counts what the row's training system keeps.

    Sums after dropout keep its mask, and nothing without one. Experts' results are kept where shares multiply
    them. Linear layers of blocks keep their input as `with_kept_inputs` says, for a plan that then has no
    format of products.

    Complexity: O(layers).
    """
    operators_by_id: dict[int, tuple[Operator, ...]] = {}

    def kept(layer: Layer) -> Layer:
        if layer.kind is not LayerKind.BLOCK:
            return layer
        if id(layer.operators) not in operators_by_id:
            narrowed = with_kept_inputs(layer, row.narrow, beside_attention=True).operators
            is_kept = (_keeps(each, row) for each in narrowed)
            operators_by_id[id(layer.operators)] = tuple(compress(narrowed, is_kept))
        return replace(layer, operators=operators_by_id[id(layer.operators)])

    modules = tuple(replace(m, layers=tuple(kept(layer) for layer in m.layers)) for m in plan.model.modules)
    settings = tuple(replace(each, products=ProductFormat.SAME) for each in plan.settings.modules)
    return replace(
        plan,
        model=replace(plan.model, modules=modules),
        settings=replace(plan.settings, modules=settings),
    )


def _keeps(operator: Operator, row: LlmRow) -> bool:
    if isinstance(operator, Pointwise) and operator.name.endswith(DROPPED):
        return row.dropout is YesNo.YES
    return operator.name != JOIN or row.keeps_results is YesNo.YES
