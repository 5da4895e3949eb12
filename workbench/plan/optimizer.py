"""The rule by which weights are updated."""

from enum import StrEnum


class Optimizer(StrEnum):
    """ADAMW: two moments of every weight. MUON: one momentum of matrices of blocks, AdamW for the others."""

    ADAMW = "adamw"
    MUON = "muon"
