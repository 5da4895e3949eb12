"""Hidden states of an encoder that its projector reads: one, or several side by side."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.model.layer import Layer, Pointwise

FeatureLayers = int | tuple[int, ...]
"""As in configurations: 0 is the embedding's state, n block n's, -1 the last block's; several in order."""


def states_read(feature_layer: FeatureLayers, num_states: int) -> tuple[int, ...]:
    """Indices of the hidden states among `num_states`, the embedding's and each block's, in the order read.

    Raises:
        ValueError: there is no such state, none is named, or one is named twice.
    """
    listed = (feature_layer,) if isinstance(feature_layer, int) else feature_layer
    for each in listed:
        if not -num_states <= each < num_states:
            raise ValueError(f"feature_layer must be from {-num_states} to {num_states - 1}, got {each}")
    states = tuple(each % num_states for each in listed)
    if not states or len(set(states)) < len(states):
        raise ValueError(
            f"feature_layer must name each hidden state once, and at least one of {num_states}, got "
            f"{list(listed)}"
        )
    return states


def num_beside(states: Sequence[int], index: int) -> int:
    """The number of earlier states that the output of layer `index` carries beside its own."""
    return sum(state < index for state in states)


def carrying(layer: Layer, width: int, num: int) -> Layer:
    """The layer with a copy of `num` earlier states of that width, which pass beside its own."""
    if not num:
        return layer
    carried = Pointwise(name="carried_residual", width=num * width, num_passes=2)
    return replace(layer, operators=(*layer.operators, carried), out_width=(1 + num) * width)
