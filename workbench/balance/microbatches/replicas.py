"""Assigns samples to data-parallel replicas by two workloads at once."""

from collections.abc import Sequence


def assign_to_replicas(
    encoder_s: Sequence[float], llm_s: Sequence[float], num_replicas: int
) -> tuple[tuple[int, ...], ...]:
    """Assign samples, heaviest encoder work first, each to the replica with the least LLM work so far.

    Source: Entrain (dissertation, section 4.3; Algorithm 4, lines 1-2). Replicas get equal numbers of
    samples ("each receiving a minibatch of size B/DP"), so a full replica takes no more.
    Differs: where the batch does not divide, numbers differ by one.

    Args:
        encoder_s: [B] encoder work of each sample, summed over its items and over all encoders, >= 0.
        llm_s: [B] LLM work of each sample, >= 0.
        num_replicas: DP.

    Returns:
        [DP] samples of each replica, ascending. Of equal replicas the lowest is taken.

    Raises:
        ValueError: unequal lengths, negative work, or fewer samples than replicas.

    Complexity: O(B log B + B DP).
    """
    check_works(encoder_s, llm_s)
    num_samples = len(llm_s)
    if not 1 <= num_replicas <= num_samples:
        raise ValueError(f"want 1..{num_samples} replicas for {num_samples} samples, got {num_replicas}")
    least, num_with_one_more = divmod(num_samples, num_replicas)
    loads_s = [0.0] * num_replicas
    members: list[list[int]] = [[] for _ in range(num_replicas)]
    for sample in heaviest_first(range(num_samples), encoder_s):
        num_larger = sum(len(samples) > least for samples in members)
        room = least + (num_larger < num_with_one_more)
        open_replicas = [r for r in range(num_replicas) if len(members[r]) < room]
        chosen = min(open_replicas, key=lambda r: (loads_s[r], r))
        members[chosen].append(sample)
        loads_s[chosen] += llm_s[sample]
    return tuple(tuple(sorted(samples)) for samples in members)


def heaviest_first(samples: Sequence[int], work_s: Sequence[float]) -> list[int]:
    """Sort samples by descending work, ties by index."""
    return sorted(samples, key=lambda sample: (-work_s[sample], sample))


def check_works(encoder_s: Sequence[float], llm_s: Sequence[float]) -> None:
    """Raise ValueError unless every sample has two workloads, finite and >= 0."""
    if len(encoder_s) != len(llm_s):
        raise ValueError(f"want both workloads of every sample, got {len(encoder_s)} and {len(llm_s)}")
    for name, works in (("encoder", encoder_s), ("LLM", llm_s)):
        for sample, work in enumerate(works):
            if not 0 <= work < float("inf"):
                raise ValueError(f"sample {sample}: {name} work must be >= 0 and finite, got {work}")
