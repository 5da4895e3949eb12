"""Bytes of a checkpoint: what `workbench run` and `workbench elastic` write of a model."""

from workbench.memory.layer import MUON_MOMENTS, state_bytes_of
from workbench.model.model_graph import ModelGraph
from workbench.model.trained import num_trained, num_weights
from workbench.plan.muon import matrices_of
from workbench.plan.plan import Settings


def checkpoint_bytes(model: ModelGraph, settings: Settings) -> int:
    """Return the bytes of all weights, frozen ones too, and of the optimizer state of the trained ones.

    Each counts once: tied weights, those that tensor-parallel ranks all hold, and what replicas share.

    Complexity: O(parameters).
    """
    size = state_bytes_of(settings)
    saved_by_muon = size.optimizer - state_bytes_of(settings, MUON_MOMENTS).optimizer
    total = 0
    for module in model.modules:
        matrices = {m.name: m.num_elements for layer in module.layers for m in matrices_of(settings, layer)}
        total += num_weights(module.layers) * size.weight + num_trained(module.layers) * size.optimizer
        total -= sum(matrices.values()) * saved_by_muon
    return total
