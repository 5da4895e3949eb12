"""A row's plan as its memory account needs it: no masks without dropout, narrow inputs of narrow products."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workbench.cost.products import NARROW, WIDE_BYTES, ProductFormat
from workbench.llm_table.llm_row import LlmRow, YesNo
from workbench.memory.megatron import DROPPED
from workbench.model.layer import Attention, Layer, LayerKind, Matmul, Operator, Pointwise
from workbench.plan.plan import Plan

ROUTER = "mlp.router"


def as_kept(plan: Plan, row: LlmRow) -> Plan:
    """The plan with layers for which `memory` counts what the row's training system keeps.

    Sums after dropout keep its mask, and nothing without one. Linear layers of blocks keep their input for
    the weight gradient as it is multiplied: cast to the narrow format (Transformer Engine, `_Linear`);
    after an attention, which keeps its output itself, that is a second tensor. With a scale a row they keep
    it as it is, for the cast that the gradient needs (torchao, `float8_linear.py`).

    Complexity: O(layers).
    """
    if row.dropout is YesNo.YES and _kept_format(row) is None:
        return plan
    operators_by_id: dict[int, tuple[Operator, ...]] = {}

    def kept(layer: Layer) -> Layer:
        if layer.kind is not LayerKind.BLOCK:
            return layer
        if id(layer.operators) not in operators_by_id:
            operators_by_id[id(layer.operators)] = tuple(_kept(layer.operators, row))
        return replace(layer, operators=operators_by_id[id(layer.operators)])

    modules = tuple(replace(m, layers=tuple(kept(layer) for layer in m.layers)) for m in plan.model.modules)
    return replace(plan, model=replace(plan.model, modules=modules))


def _kept_format(row: LlmRow) -> ProductFormat | None:
    """The narrow format in which inputs are kept, if it is one."""
    return None if row.narrow is None or NARROW[row.narrow].keeps_wide else row.narrow


def _kept(operators: Sequence[Operator], row: LlmRow) -> Iterator[Operator]:
    previous: Operator | None = None
    narrow = _kept_format(row)
    for each in operators:
        is_sum = isinstance(each, Pointwise) and each.name.endswith(DROPPED)
        if is_sum and row.dropout is YesNo.NO:
            continue
        if isinstance(each, Matmul) and narrow is not None and not each.name.startswith(ROUTER):
            share = NARROW[narrow].element_bytes / WIDE_BYTES
            share += isinstance(previous, Attention)
            yield replace(each, in_features=max(1, round(each.in_features * share)))
        else:
            yield each
        previous = each
