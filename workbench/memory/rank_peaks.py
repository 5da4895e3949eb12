"""Peaks of single ranks with all that is in them, and the ranks that are worth a look."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workbench.memory.account import MemoryTable, memory_groups, peak_bytes, peaks_of
from workbench.memory.peak_parts import PartBytes, held_at
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.schedule.action import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """A rank's peak.

    Args:
        rank: of the plan.
        during: the action that first reaches it; None: at rest.
        parts: that are in it, largest first.
        limit_bytes: memory of its node.
        num_sharing: ranks that share this memory.
    """

    rank: int
    during: Action | None
    parts: tuple[PartBytes, ...]
    limit_bytes: int
    num_sharing: int

    @property
    def num_bytes(self) -> int:
        """The peak, as of `peak_bytes`."""
        return sum(part.num_bytes for part in self.parts)


def fullest_ranks(lowered: Lowered, table: MemoryTable) -> tuple[int, ...]:
    """Return the rank with the highest peak of each module, each once; of several the lowest."""
    plan, peaks = lowered.plan, peak_bytes(lowered, table)
    ranks = (
        {rank for stage in plan.stages if stage.module == module.name for rank in stage.flat_ranks}
        for module in plan.model.modules
    )
    return tuple(dict.fromkeys(max(group, key=lambda rank: (peaks[rank], -rank)) for group in ranks if group))


def rank_peaks(lowered: Lowered, table: MemoryTable, ranks: Iterable[int]) -> Iterator[RankPeak]:
    """Yield the peaks of these ranks.

    Raises:
        ValueError: a rank that the plan does not use.

    Complexity: O(ranks x (actions + rows)).
    """
    plan = lowered.plan
    peaks, group_of = peaks_of(plan, table), _groups(plan)
    for rank in ranks:
        if rank not in peaks:
            raise ValueError(
                f"rank {rank} is not in the plan; want one of {plan.ranks[0]} to {plan.ranks[-1]}"
            )
        position = peaks[rank].position
        yield RankPeak(
            rank=rank,
            during=None if position is None else plan.program[rank][position],
            parts=held_at(lowered, rank, position),
            limit_bytes=plan.cluster.nodes[plan.cluster.node_of(rank)].memory_bytes,
            num_sharing=group_of[rank],
        )


def _groups(plan: Plan) -> dict[int, int]:
    """Map each rank to the number of ranks that share memory with it."""
    return {rank: len(group) for _, group in memory_groups(plan) for rank in group}
