"""The questions that a plan answers; a search may leave each as it was."""

from enum import StrEnum


class Question(StrEnum):
    """What a move changes.

    LAYOUT: degrees, replicas and placement of modules, with the cuts that follow.
    ORDER: schedule, its parameters, and stage boundaries.
    GROUPING: which samples share microbatches, of which replica and in which order.
    TOKENS: which context-parallel rank owns which tokens, and how keys are exchanged.
    MEMORY: recomputation, sharding and its instances, sequence parallelism.
    """

    LAYOUT = "layout"
    ORDER = "order"
    GROUPING = "grouping"
    TOKENS = "tokens"
    MEMORY = "memory"
