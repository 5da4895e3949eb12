"""Splits a global batch into microbatches: encoder work balanced, LLM work deferred until balanced too."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.balance.microbatches.bottleneck_match import Matching, bottleneck_match
from workbench.balance.microbatches.deferral import pairwise_deferral
from workbench.balance.microbatches.replicas import assign_to_replicas
from workbench.balance.microbatches.stratified import stratified_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchAssignment:
    """Microbatches of one replica in execution order.

    Args:
        encoder: [K] samples whose items the encoders process together.
        deferred: [K] those of them whose LLM work the next microbatch does.
        llm: [K] samples that the LLM processes together.
    """

    encoder: tuple[tuple[int, ...], ...]
    deferred: tuple[tuple[int, ...], ...]
    llm: tuple[tuple[int, ...], ...]


def hierarchical_assignment(
    encoder_s: Sequence[float],
    llm_s: Sequence[float],
    *,
    num_replicas: int,
    num_microbatches: int,
    match: Matching = bottleneck_match,
) -> tuple[MicrobatchAssignment, ...]:
    """Assign samples to replicas and to microbatches of even encoder work, and defer LLM work in pairs.

    Source: Entrain (dissertation, sections 4.3 and 4.5, Algorithm 4). Work of several encoders is
    added up: they count as one merged encoder (section 4.5).

    Args:
        encoder_s, llm_s: [B] work of each sample of the global batch, >= 0.
        num_replicas: DP.
        num_microbatches: K wanted per replica; a replica with heavy samples gets fewer.
        match: see `pairwise_deferral`.

    Returns:
        [DP] assignments; every sample is in them once for the encoders and once for the LLM.

    Raises:
        ValueError: unequal lengths, negative work, fewer samples than replicas or K < 1.

    Complexity: O(B (log B + DP)) and, per replica, that of `pairwise_deferral`.
    """
    assignments = []
    for samples in assign_to_replicas(encoder_s, llm_s, num_replicas):
        local_microbatches = stratified_microbatches(
            [encoder_s[sample] for sample in samples], [llm_s[sample] for sample in samples], num_microbatches
        )
        microbatches = [
            tuple(samples[position] for position in positions) for positions in local_microbatches
        ]
        deferral = pairwise_deferral(microbatches, llm_s, match)
        assignments.append(
            MicrobatchAssignment(
                encoder=tuple(microbatches[index] for index in deferral.order),
                deferred=deferral.deferred,
                llm=deferral.llm_microbatches(microbatches),
            )
        )
    return tuple(assignments)
