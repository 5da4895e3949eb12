"""Low-rank adapters of published multimodal runs: which products have them, and what trains in full beside.

A row's `lora_modules` are those of a job (`workbench.model.lora.Adapted`). `lora_without` begins the names of
products among them that have none. `lora_also` names what is trained in full: `vision`, the tower with its
projector; `embed` and `head` of the language model, of which PEFT keeps frozen copies (`modules_to_save`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from workbench.model.layer import Layer, LayerKind, Matmul, Operator
from workbench.model.lora import Adapted, Lora
from workbench.model.model_graph import Module
from workbench.model.trainable import Trainable, with_adapters, with_trainable

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
QKV, QKV_AND_UP = "qkv_proj", "linear1"  # of `workbench.model.mmdit`
COPIED_BYTES = 2  # of an element of a frozen copy

Row = Mapping[str, str]


def lora_of(row: Row) -> dict[str, Any]:
    """The entry `lora` of the row's language model in a job file."""
    if not row.get("lora_rank"):
        return {}
    sizes = {"rank": int(row["lora_rank"]), "alpha": _alpha(row)}
    return {"lora": sizes | {"modules": row["lora_modules"]}}


def _alpha(row: Row) -> float:
    """The row's scale, or its rank: costs do not depend on it."""
    return float(row.get("lora_alpha") or row["lora_rank"])


def trains_beside(row: Row, part: str) -> bool:
    """Whether a part of the model is trained in full beside adapters."""
    return part in (row.get("lora_also") or "").split()


def with_adapters_of_row(module: Module, row: Row) -> Module:
    """The module, if it is none of a job file's, frozen and with the row's adapters."""
    if not row.get("lora_rank"):
        return module
    frozen = with_trainable(replace(module, layers=tuple(map(_parted, module.layers))), Trainable.NONE)
    lora = Lora(rank=int(row["lora_rank"]), alpha=_alpha(row))
    return with_adapters(frozen, lora, Adapted(row["lora_modules"]))


def only_said(module: Module, row: Row) -> Module:
    """The module with adapters of the row's products alone, and trained embedding or head."""
    if not row.get("lora_rank"):
        return module
    without = tuple((row.get("lora_without") or "").split())
    layers = (_bare(layer, without) for layer in module.layers)
    return replace(module, layers=tuple(replace(each, trainable=_is_whole(each, row)) for each in layers))


def copied_bytes(module: Module, row: Row) -> int:
    """Bytes of frozen copies beside what is trained in full."""
    copied = (layer for layer in module.layers if row.get("lora_rank") and _is_whole(layer, row))
    return COPIED_BYTES * sum(layer.num_parameters for layer in copied)


def _is_whole(layer: Layer, row: Row) -> bool:
    return layer.kind in (LayerKind.EMBED, LayerKind.HEAD) and trains_beside(row, layer.kind.value)


def _bare(layer: Layer, without: tuple[str, ...]) -> Layer:
    """The layer without adapters of products whose names begin so."""
    if not without:
        return layer
    operators = (
        replace(each, lora=None) if isinstance(each, Matmul) and each.name.startswith(without) else each
        for each in layer.operators
    )
    return replace(layer, operators=tuple(operators))


def _parted(layer: Layer) -> Layer:
    """The layer with a product each for query, key and value, as diffusers has them, and the MLP's beside."""
    parts = tuple(part for operator in layer.operators for part in _parts(operator))
    return replace(layer, operators=parts)


def _parts(operator: Operator) -> Iterator[Operator]:
    if not isinstance(operator, Matmul) or not operator.name.endswith((QKV, QKV_AND_UP)):
        yield operator
        return
    prefix = operator.name.removesuffix(QKV).removesuffix(QKV_AND_UP)
    width = operator.in_features
    of_attention = operator.out_features // 3 if operator.name.endswith(QKV) else width
    for name in PROJECTIONS:
        yield replace(operator, name=f"{prefix}{name}", out_features=of_attention)
    if rest := operator.out_features - 3 * of_attention:
        yield replace(operator, name=f"{prefix}mlp.up", out_features=rest)
