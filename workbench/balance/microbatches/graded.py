"""Microbatches of graded size: small ones that fill and drain a pipeline, even ones between them."""

from collections.abc import Sequence
from itertools import pairwise

from workbench.balance.microbatches.assignment import MicrobatchAssignment, hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import even_match
from workbench.balance.microbatches.replicas import check_works, heaviest_first
from workbench.float_sum import float_sum


def graded_assignment(
    encoder_s: Sequence[float], llm_s: Sequence[float], *, num_microbatches: int, num_small: int
) -> MicrobatchAssignment:
    """Put the lightest samples in `num_small` microbatches by size, and balance all others by deferral.

    Ours: a pipeline is half empty while it fills and drains, for as long as its first and last
    microbatches take; Entrain's even ones are never smaller than the mean. `num_small` 0 is
    `hierarchical_assignment` for one replica with `even_match`, `num_small` K cuts all samples by size,
    as DistTrain does (section 5.2). The order is left to `order_units`.

    Args:
        encoder_s, llm_s: [S] work of each sample of one replica, >= 0.
        num_microbatches: K wanted; the result has fewer where single samples are heavy, as in Entrain,
            or where there are fewer samples.
        num_small: 0..K. Numbers of samples in small microbatches differ by one at most, and their
            mean is that of all microbatches.

    Returns:
        Even microbatches first, then the small ones from heavy to light. Nothing is deferred into or
        out of the small ones.

    Raises:
        ValueError: as `hierarchical_assignment`; num_small out of range.

    Complexity: that of `hierarchical_assignment`.
    """
    check_works(encoder_s, llm_s)
    if not 0 <= num_small <= num_microbatches:
        raise ValueError(f"num_small must be 0..{num_microbatches}, got {num_small}")
    work_s = [float_sum(pair) for pair in zip(encoder_s, llm_s, strict=True)]
    ordered = heaviest_first(range(len(work_s)), work_s)
    num_even_samples = len(ordered) * (num_microbatches - num_small) // num_microbatches
    even, small = sorted(ordered[:num_even_samples]), ordered[num_even_samples:]
    chunks = runs(small, num_small) if small else ()
    if not even:
        return MicrobatchAssignment(encoder=chunks, deferred=((),) * len(chunks), llm=chunks)
    (assignment,) = hierarchical_assignment(
        [encoder_s[sample] for sample in even],
        [llm_s[sample] for sample in even],
        num_replicas=1,
        num_microbatches=num_microbatches - num_small,
        match=even_match,
    )
    return MicrobatchAssignment(
        encoder=(*_original(assignment.encoder, even), *chunks),
        deferred=(*_original(assignment.deferred, even), *((),) * len(chunks)),
        llm=(*_original(assignment.llm, even), *chunks),
    )


def runs(samples: Sequence[int], num: int) -> tuple[tuple[int, ...], ...]:
    """Split samples into up to `num` non-empty runs, each sorted; lengths differ by at most one."""
    num = min(num, len(samples))
    ends = [len(samples) * index // num for index in range(num + 1)]
    return tuple(tuple(sorted(samples[a:b])) for a, b in pairwise(ends))


def _original(microbatches: Sequence[Sequence[int]], samples: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(samples[index] for index in microbatch) for microbatch in microbatches)
