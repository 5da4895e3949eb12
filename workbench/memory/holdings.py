"""Parts of a rank's memory, and the intervals of its program in which they are held."""

from enum import StrEnum
from typing import NamedTuple

from workbench.arrays import Ints


class Part(StrEnum):
    """What bytes of a rank are for.

    WEIGHTS and OPTIMIZER: parameters and optimizer state that the rank keeps. GATHERED: whole weights of
    sharded layers, between all-gather and FREE. GRADIENTS: of weights. ACTIVATIONS: what forwards keep for
    backwards, with the stage's inputs and outputs. MESSAGES: what stages send and receive. COLLECTIVES:
    what gathers, reduce-scatters and all-reduces of weights and gradients have in flight. WORKING: tensors in
    work inside the running pass or optimizer step, besides what is kept; also of collectives inside layers.
    """

    WEIGHTS = "weights"
    GATHERED = "gathered weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    MESSAGES = "messages"
    COLLECTIVES = "buffers of collectives"
    WORKING = "tensors in work"


class Holding(NamedTuple):
    """Tensors of one part by cell, a position in programs end to end.

    Args:
        part: of all of them.
        stage: that each belongs to.
        first, last: cells in which each is allocated, when the action starts, and freed, when it ends.
        num_bytes: of each.
    """

    part: Part
    stage: Ints
    first: Ints
    last: Ints
    num_bytes: Ints
