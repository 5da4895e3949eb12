"""Layers that read keys which an earlier layer chose, with which they stay on one stage."""

from workbench.model.layer import Attention, Layer


def reads_choice(layer: Layer) -> bool:
    """Whether an attention of the layer reads the keys that the indexer of an earlier one chose."""
    attentions = (operator for operator in layer.operators if isinstance(operator, Attention))
    return any(each.top_k is not None and each.indexer is None for each in attentions)
