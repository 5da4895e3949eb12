"""Interleaved 1F1B: each rank holds several stages of the chain, p apart."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from workbench.schedule.action import Action, Pass
from workbench.schedule.spec import ScheduleSpec


def interleaved_1f1b(
    stages: Sequence[int], num_ranks: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return 1F1B in rounds of microbatches that go through all stages of a rank.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", SC, section 2.2. With v stages per rank, each of f / v and b / v, and a
    multiple of p microbatches, all ranks together idle (p - 1)(f + b) / v at both ends.
    Differs: any number of microbatches. They form max(1, m // p) rounds whose sizes differ by at most
    one; the paper wants rounds of p. (One of several rounds with fewer than p would make the first
    rank wait for backwards that wait for its next forward.)

    A single round never deadlocks, for any m and p: there are times that grow along every program
    and from a pass's inputs to the pass. With M = m + p and d = p - 1 - r on rank r:
    F of chunk c < v - 1 and microbatch i at c M + i + r; F of the last chunk at v M + i - d, its B at
    v M + i + d + 1/2, as F i + 2d + 1 follows B i there; and B of chunk c < v - 1 at
    (2v + 1 - c) M + i + d, after all forwards, since a rank has at most m of them left when its
    m backwards of the last chunk begin.

    Args:
        stages: [p v] ids, first to last; rank r holds those at r, p + r, 2p + r, ...
        num_ranks: p.
        num_microbatches: m.

    Returns:
        [p] programs, each of m v forwards and m v backwards.

    Raises:
        ValueError: stages that p does not divide, or no microbatch.

    Complexity: O(p v m).
    """
    if num_ranks < 1 or len(stages) % num_ranks or len(set(stages)) != len(stages) or not stages:
        raise ValueError(
            f"interleaved: {len(stages)} stages must differ and be a multiple of {num_ranks} ranks"
        )
    if num_microbatches < 1:
        raise ValueError(f"interleaved: want at least one microbatch, got {num_microbatches}")
    turns = turns_of(len(stages) // num_ranks, num_ranks, num_microbatches)
    forwards, backwards = turns.forwards, turns.backwards
    programs = []
    for rank in range(num_ranks):
        own_stages = stages[rank::num_ranks]
        warmup = min(turns.ahead + 2 * (num_ranks - 1 - rank), len(forwards))
        program = [Action(own_stages[chunk], Pass.F, microbatch) for chunk, microbatch in forwards[:warmup]]
        for index, (chunk, microbatch) in enumerate(backwards, start=warmup):
            if index < len(forwards):
                program.append(Action(own_stages[forwards[index][0]], Pass.F, forwards[index][1]))
            program.append(Action(own_stages[chunk], Pass.B, microbatch))
        programs.append(tuple(program))
    return tuple(programs)


class Turns(NamedTuple):
    """The order in which every rank goes through its v stages, counted from the first: chunks.

    Args:
        forwards, backwards: [m v] (chunk, microbatch).
        ahead: one less than the forwards of the last rank before its first backward is possible.
    """

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    ahead: int


def turns_of(num_chunks: int, num_ranks: int, num_microbatches: int) -> Turns:
    """Return the turns, round after round of microbatches through all chunks and back."""
    rounds, chunks = _rounds(num_microbatches, num_ranks), range(num_chunks)
    return Turns(
        forwards=[(chunk, microbatch) for members in rounds for chunk in chunks for microbatch in members],
        backwards=[
            (chunk, microbatch) for members in rounds for chunk in reversed(chunks) for microbatch in members
        ],
        ahead=(num_chunks - 1) * len(rounds[0]),
    )


def _rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    """Split consecutive microbatches into rounds, the longer ones first."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_rounds)
    ends = [round_ * size + min(round_, longer) for round_ in range(num_rounds + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


SPEC = ScheduleSpec(
    name="interleaved",
    summary="1F1B with several stages per rank, assigned round-robin: divides the bubble by their number",
    chain=interleaved_1f1b,
    usual_virtual_stages=2,
    takes_more_stages=True,
    torch_name="Interleaved1F1B",
)
