"""The questions that a plan answers, each of which a search may leave as it was."""

from enum import StrEnum


class Question(StrEnum):
    """What a move changes.

    LAYOUT: degrees, replicas and places of modules, with cuts that follow from them.
    ORDER: schedule, its parameters, and boundaries between stages.
    GROUPING: which samples stand together in microbatches, of which replica and in which order.
    TOKENS: which context-parallel rank owns which tokens, and how keys travel.
    MEMORY: recomputation, sharding and its instances, sequence parallelism.
    """

    LAYOUT = "layout"
    ORDER = "order"
    GROUPING = "grouping"
    TOKENS = "tokens"
    MEMORY = "memory"
