"""Mamba-2 mixers of any architecture of transformers: how ranks cut them, first weights, items one by one."""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.adapter import CutKind, CutRules
from runtime.models.initialise import Fill, constant
from runtime.models.item_by_item import ItemByItem


def cuts(name: str, mixer: type[nn.Module], gated_norm: type[nn.Module]) -> CutRules:
    """Rules for the mixers of blocks, which are their part of that name; last products go by their name."""
    return (
        (f"block.{name}.in_proj", CutKind.FUSED),
        (nn.Conv1d, CutKind.FUSED),
        (mixer, CutKind.HEADS),
        (gated_norm, CutKind.HEADS),
    )


def fills(name: str) -> tuple[tuple[str, Fill], ...]:
    """First decays, skips and norms of the mixers of blocks."""
    ones = constant(1.0)
    return ((f"{name}.A_log", _log_decays), (f"{name}.D", ones), (f"{name}.norm.weight", ones))


def _log_decays(shape: Any, generator: torch.Generator) -> Tensor:
    """Logarithms of 1, 2, 3, ..., as transformers begins."""
    del generator
    return torch.arange(1, shape[0] + 1, dtype=torch.float32).log()


def run_by_items(layer: nn.Module, mixer: type[nn.Module]) -> None:
    """Let the mixer in a layer, if any, run item by item."""
    for module in layer.modules():
        if isinstance(module, mixer):
            module.forward = ItemByItem(module)
