"""What tensor parallelism makes of a weight."""

from enum import Enum

from torch import nn


class CutKind(Enum):
    """What becomes of a module's weights.

    FUSED: several column cuts side by side in one weight. PARTIAL: whole, but applied to what
    members hold apart, so that each has a part of the gradient.
    """

    WHOLE = "whole"
    COLUMN = "column"
    ROW = "row"
    FUSED = "fused"
    EXPERTS = "experts"
    PARTIAL = "partial"


# Local names of modules, or their classes, and what becomes of their weights.
CutRules = tuple[tuple[str | type[nn.Module], CutKind], ...]
