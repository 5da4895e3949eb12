"""One attention layer under context parallelism: gathers of keys and values, launches, ranks.

Every rank owns some blocks of queries and needs all keys and values. They are gathered a few key-value
heads at a time; while one launch computes, the next heads are gathered (all-gather with overlap over heads,
as in Llama 3 and Cornstarch). A launch computes all query heads of its key-value heads as one grid.

Differs: a gather starts at the same time and takes equally long on all ranks; a GPU computes at full speed
while it communicates. With several streams, the merging kernel of one launch is queued before the blocks of
the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sim.attention.gpu import activity
from sim.attention.pieces import LaunchRun, Order, Pieces, Split, UnitTiming, cut, run_launch
from workbench.arrays import Floats
from workbench.float_sum import float_sum
from workbench.model.layer import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How a kernel orders and splits its grid, and how many launches may run concurrently."""

    order: Order = Order.LONGEST_FIRST
    split: Split = Split.WHERE_IT_PAYS
    streams: int = 1

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"streams: want >= 1, got {self.streams}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The launches of one rank: `count` of them, with `heads` query heads each."""

    count: int
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        if min(self.count, self.heads, self.kv_heads) < 1:
            raise ValueError(f"launches: want counts >= 1, got {self}")


def launches_of(operator: Attention, *, tp: int = 1, kv_heads_per_launch: int = 1) -> Launches:
    """The launches of one layer on one rank.

    Raises:
        ValueError: heads that key-value heads do not divide, or key-value heads that tp and launches do not.
    """
    local, rest = divmod(operator.num_kv_heads, tp)
    if rest or operator.num_heads % operator.num_kv_heads:
        raise ValueError(
            f"{operator.name}: {operator.num_heads} heads over {operator.num_kv_heads} key-value heads "
            f"do not divide by tp {tp}"
        )
    if kv_heads_per_launch < 1 or local % kv_heads_per_launch:
        raise ValueError(f"key-value heads per launch: want a divisor of {local}, got {kv_heads_per_launch}")
    group = operator.num_heads // operator.num_kv_heads
    return Launches(
        count=local // kv_heads_per_launch, heads=group * kv_heads_per_launch, kv_heads=kv_heads_per_launch
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Compute units of one GPU and their timing."""

    num_units: int
    timing: UnitTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Seconds of the collectives of one launch, equal on all ranks; 0 without context parallelism.

    Args:
        gather_s: all-gather of the keys and values of the launch's heads.
        scatter_s: reduce-scatter of their gradients after the launch; 0 in a forward.
        num_buffers: launches whose keys and values fit in memory at once; 2 lets the next gather overlap.
    """

    gather_s: float = 0.0
    scatter_s: float = 0.0
    num_buffers: int = 2

    def __post_init__(self) -> None:
        if min(self.gather_s, self.scatter_s) < 0 or self.num_buffers < 1:
            raise ValueError(f"wires: want times >= 0 and at least one buffer, got {self}")


@dataclass(frozen=True, kw_only=True)
class AttentionRun:
    """Times of all launches and gathers on every rank. No `slots`: sums are cached on the instance.

    Args:
        launches: [rank][launch].
        gathers_s: [launch] start and end of each gather.
        rank_s: [rank] seconds until the rank ends, including its last reduce-scatter.
    """

    num_units: int
    launches: tuple[tuple[LaunchRun, ...], ...]
    gathers_s: tuple[tuple[float, float], ...]
    rank_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds until the slowest rank ends."""
        return max(self.rank_s)

    @cached_property
    def busy_share(self) -> tuple[float, ...]:
        """[rank] fraction of unit-seconds that the rank's units work, of the slowest rank's time."""
        whole_s = self.num_units * self.makespan_s
        return tuple(float_sum(launch.busy_s for launch in launches) / whole_s for launches in self.launches)

    def activity(self, rank: int, edges_s: npt.ArrayLike) -> Floats:
        """Mean fraction of a rank's busy units in each interval between consecutive edges."""
        spans = [launch.spans_s for launch in self.launches[rank]]
        start_s = np.concatenate([start for start, _ in spans])
        end_s = np.concatenate([end for _, end in spans])
        return activity(start_s, end_s, edges_s, self.num_units)


def simulate_attention(
    tiles_by_rank: Sequence[npt.ArrayLike], launches: Launches, gpu: Gpu, wires: Wires, kernel: Kernel
) -> AttentionRun:
    """Simulate one pass of one attention layer on all ranks.

    Args:
        tiles_by_rank: per rank [rows] or [rows, slots of key positions]: work of every block of queries
            that it owns, in the order of its grid, in full tiles.
        launches: heads of the layer.
        gpu: of every rank.
        wires: collectives of one launch.
        kernel: order, split and streams.

    Raises:
        ValueError: no rank, or tiles that are negative or not finite.

    Complexity: O(ranks x launches x N log N) for N blocks of a grid; one grid per rank is
    scheduled when launches do not overlap.
    """
    if not tiles_by_rank:
        raise ValueError("attention: want the tiles of at least one rank, got none")
    works = [np.asarray(tiles, np.float64) for tiles in tiles_by_rank]
    keys = [(work.shape, work.tobytes()) for work in works]
    first = dict(zip(keys, works, strict=True))  # ranks with equal tiles run alike
    rank_of = {key: _Rank(work, launches, gpu, kernel) for key, work in first.items()}
    ranks = rank_of.values()
    gathers: list[tuple[float, float]] = []
    wire_s = scattered_s = 0.0
    for launch in range(launches.count):
        old = launch - wires.num_buffers
        free_s = max(rank.end_s(old) for rank in ranks) if old >= 0 else 0.0
        start_s = max(wire_s, free_s)
        wire_s = start_s + wires.gather_s
        gathers.append((start_s, wire_s))
        if wires.scatter_s and launch:  # the previous launch's gradients wait behind this gather
            wire_s = max(wire_s, *(rank.end_s(launch - 1) for rank in ranks)) + wires.scatter_s
        for rank in ranks:
            rank.launch(gathers[-1][1])
    if wires.scatter_s:
        scattered_s = max(wire_s, *(rank.end_s(-1) for rank in ranks)) + wires.scatter_s
    return AttentionRun(
        num_units=gpu.num_units,
        launches=tuple(tuple(rank_of[key].runs) for key in keys),
        gathers_s=tuple(gathers),
        rank_s=tuple(max(scattered_s, *(run.end_s for run in rank_of[key].runs)) for key in keys),
    )


class _Rank:
    """The launches of one rank so far."""

    def __init__(self, tiles: npt.ArrayLike, launches: Launches, gpu: Gpu, kernel: Kernel) -> None:
        self._heads, self._gpu, self._kernel = launches.heads, gpu, kernel
        units, timing = gpu.num_units, gpu.timing
        self._pieces: Pieces = cut(tiles, kernel.split, launches.heads, units, timing, kernel.order)
        self._alone = self._run(None, 0.0)
        self.runs: list[LaunchRun] = []

    def end_s(self, launch: int) -> float:
        return self.runs[launch].end_s

    def launch(self, gathered_s: float) -> None:
        """Start the next launch once its keys and values have arrived and a stream is free."""
        streams, done = self._kernel.streams, len(self.runs)
        before = done - streams
        gap_s = self._gpu.timing.launch_s
        ready_s = max(gathered_s, self.runs[before].end_s + gap_s) if before >= 0 else gathered_s
        if streams == 1 or not done:
            self.runs.append(self._alone.shifted(ready_s))
        else:
            self.runs.append(self._run(self.runs[-1].free_s, ready_s))

    def _run(self, free_s: Floats | None, release_s: float) -> LaunchRun:
        return run_launch(
            self._pieces,
            self._heads,
            self._gpu.num_units,
            self._gpu.timing,
            self._kernel.order,
            free_s=free_s,
            release_s=release_s,
        )
