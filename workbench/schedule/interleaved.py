"""Interleaved 1F1B: each rank holds several stages of the chain, p apart."""

from collections.abc import Sequence
from itertools import pairwise

from workbench.schedule.action import Action, Pass


def interleaved_1f1b(
    stages: Sequence[int], num_ranks: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """One forward one backward, in rounds of microbatches that go through all stages of a rank.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", SC, section 2.2. With v stages per rank, each of f / v and b / v, and a
    multiple of p microbatches, all ranks together idle (p - 1)(f + b) / v at both ends.
    Differs: any number of microbatches from p on. They form max(1, m // p) rounds whose sizes
    differ by at most one; the paper wants rounds of p. (A round of fewer than p would make the
    first rank wait for backwards that wait for its next forward.)

    Args:
        stages: [p v] ids, first to last; rank r holds those at r, p + r, 2p + r, ...
        num_ranks: p.
        num_microbatches: m.

    Returns:
        [p] programs, each of m v forwards and m v backwards.

    Raises:
        ValueError: stages that p does not divide, or fewer microbatches than ranks.

    Complexity: O(p v m).
    """
    if num_ranks < 1 or len(stages) % num_ranks or len(set(stages)) != len(stages) or not stages:
        raise ValueError(
            f"interleaved: {len(stages)} stages must differ and be a multiple of {num_ranks} ranks"
        )
    if num_microbatches < num_ranks:
        raise ValueError(
            f"interleaved: want at least as many microbatches as the {num_ranks} ranks, "
            f"got {num_microbatches}; the nearest is {num_ranks}"
        )
    num_chunks, rounds = len(stages) // num_ranks, _rounds(num_microbatches, num_ranks)
    forwards = [(chunk, own) for members in rounds for chunk in range(num_chunks) for own in members]
    backwards = [
        (chunk, own) for members in rounds for chunk in reversed(range(num_chunks)) for own in members
    ]
    programs = []
    for rank in range(num_ranks):
        mine = stages[rank::num_ranks]
        ahead = (num_chunks - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank)
        warmup = min(ahead, len(forwards))
        program = [Action(mine[chunk], Pass.F, own) for chunk, own in forwards[:warmup]]
        for place, (chunk, own) in enumerate(backwards, start=warmup):
            if place < len(forwards):
                program.append(Action(mine[forwards[place][0]], Pass.F, forwards[place][1]))
            program.append(Action(mine[chunk], Pass.B, own))
        programs.append(tuple(program))
    return tuple(programs)


def _rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    """Consecutive microbatches in rounds, the longer ones first."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_rounds)
    ends = [round_ * size + min(round_, longer) for round_ in range(num_rounds + 1)]
    return [range(first, end) for first, end in pairwise(ends)]
