"""Splits samples of a replica into microbatches of equal encoder work, with small LLM pieces to defer."""

import heapq
from collections.abc import Sequence

from workbench.balance.microbatches.replicas import check_works, heaviest_first
from workbench.float_sum import float_sum


def effective_microbatches(encoder_s: Sequence[float], num_microbatches: int) -> int:
    """Return the number of microbatches, at most K, whose mean work is at least the heaviest sample's.

    Source: Entrain (dissertation, section 4.5.1; Algorithm 4, line 3),
    K_eff = min(K, floor(sum of encoder work / heaviest sample)).
    Differs: never more than there are samples; K where nothing has encoder work.

    Raises ValueError for K < 1 or no samples.
    """
    if num_microbatches < 1 or not encoder_s:
        raise ValueError(
            f"want >= 1 microbatch and >= 1 sample, got {num_microbatches} and {len(encoder_s)} samples"
        )
    heaviest_s = max(encoder_s)
    limit = len(encoder_s)
    if heaviest_s > 0:
        limit = min(limit, int(float_sum(encoder_s) / heaviest_s * (1 + 1e-12)))
    return max(1, min(num_microbatches, limit))


def coarse_and_fine(samples: Sequence[int], llm_s: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return the half with more LLM work and the half with less; the middle one of an odd number is fine.

    Source: Entrain, Algorithm 4, line 4, which does not say where the boundary is.
    """
    ordered = heaviest_first(samples, llm_s)
    half = len(ordered) // 2
    return ordered[:half], ordered[half:]


def stratified_microbatches(
    encoder_s: Sequence[float], llm_s: Sequence[float], num_microbatches: int
) -> tuple[tuple[int, ...], ...]:
    """Assign coarse samples, then fine ones, by descending encoder work to the lightest microbatch.

    Source: Entrain (dissertation, section 4.5.1; Algorithm 4, lines 3-6). The two subsets make one run
    of list scheduling, so the heaviest microbatch has at most 2 - 1/K_eff times the least possible encoder
    work (Graham 1966). It is not longest-first over all samples, whose bound is smaller.
    Differs: a sample without encoder work goes where the LLM work is least, and equal microbatches are
    taken in that order too; the printed rule would pile all text-only samples onto one microbatch.

    Args:
        encoder_s, llm_s: [S] work of each sample, >= 0.
        num_microbatches: K wanted; the result has `effective_microbatches`.

    Returns:
        [K_eff] ascending samples of each microbatch, none empty.

    Raises:
        ValueError: unequal lengths, negative work, no samples, K < 1.

    Complexity: O(S log S + S log K).
    """
    check_works(encoder_s, llm_s)
    count = effective_microbatches(encoder_s, num_microbatches)
    with_encoder_work = [sample for sample in range(len(llm_s)) if encoder_s[sample] > 0]
    without_encoder_work = [sample for sample in range(len(llm_s)) if encoder_s[sample] == 0]
    members: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0.0, 0.0, microbatch) for microbatch in range(count)]
    for part in coarse_and_fine(with_encoder_work, llm_s):
        for sample in heaviest_first(part, encoder_s):
            load_s, llm_load_s, chosen = heapq.heappop(lightest)
            members[chosen].append(sample)
            heapq.heappush(lightest, (load_s + encoder_s[sample], llm_load_s + llm_s[sample], chosen))
    by_llm = [(len(members[chosen]) > 0, llm_load_s, chosen) for _, llm_load_s, chosen in lightest]
    heapq.heapify(by_llm)
    for sample in heaviest_first(without_encoder_work, llm_s):
        _, llm_load_s, chosen = heapq.heappop(by_llm)
        members[chosen].append(sample)
        heapq.heappush(by_llm, (True, llm_load_s + llm_s[sample], chosen))
    return tuple(tuple(sorted(samples)) for samples in members)
