"""Blocks of a kernel's grid on the compute units of one GPU: list scheduling in launch order.

The hardware gives the next block of the grid to the first unit that is free. With a grid in
its natural order the long rows of a causal mask come last and leave a tail; sorted longest
first, the same dispatcher is Graham's LPT rule (Graham 1969, "Bounds on Multiprocessing
Timing Anomalies"): at most 4/3 - 1/(3 units) of the optimum.

Differs: a unit runs one block at a time at a constant rate. Clocks, the L2 cache and blocks
that share a multiprocessor are left out.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.arrays import Floats, Ints
from workbench.compiled import compiled

# Streaming multiprocessors by `Node.device`: NVIDIA's architecture papers, or CUDA cores of its data sheets
# over those of a multiprocessor (64 on Volta and GA100, 128 on others). The A10G, B300, GB200, GB300 and
# AMD's devices are left out: no such document states one number for them.
COMPUTE_UNITS = {
    "A10": 72,
    "A100-40GB": 108,
    "A100-80GB": 108,
    "A100-PCIe-80GB": 108,
    "A40": 84,
    "A800-80GB": 108,
    "B200": 148,
    "GH200-144GB": 132,
    "GH200-96GB": 132,
    "H100": 132,
    "H100-500W": 132,
    "H100-96GB-500W": 132,
    "H100-NVL": 132,
    "H100-PCIe": 114,
    "H20": 78,
    "H200": 132,
    "H800": 132,
    "L20": 92,
    "L4": 58,
    "L40S": 142,
    "RTX-3090": 82,
    "RTX-4090": 128,
    "RTX-PRO-6000": 188,
    "V100-16GB": 80,
    "V100-32GB": 80,
    "V100-PCIe-32GB": 80,
}


def compute_units(device: str) -> int:
    """Number of streaming multiprocessors of a device.

    Raises:
        ValueError: an unknown device; the message lists the known ones.
    """
    if device not in COMPUTE_UNITS:
        raise ValueError(
            f"device {device!r}: number of compute units unknown; known: {sorted(COMPUTE_UNITS)}"
        )
    return COMPUTE_UNITS[device]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Placement of the blocks of one grid: on which unit and when each ran.

    No `slots`: sums are cached on the instance. Arrays are not writeable.

    Args:
        unit: [N] compute unit of each block, in launch order.
        start_s, end_s: [N] seconds, of each block.
        free_s: [U] end of each unit's last block; the time it became free where it ran none.
    """

    unit: Ints
    start_s: Floats
    end_s: Floats
    free_s: Floats

    @property
    def num_units(self) -> int:
        return len(self.free_s)

    @cached_property
    def first_s(self) -> float:
        """Start of the first block; 0 for an empty grid."""
        return float(self.start_s.min()) if len(self.start_s) else 0.0

    @cached_property
    def makespan_s(self) -> float:
        """End of the last block; 0 for an empty grid."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0

    @cached_property
    def busy_s(self) -> float:
        """Unit-seconds of work."""
        return float((self.end_s - self.start_s).sum())


def list_schedule(
    duration_s: npt.ArrayLike, num_units: int, *, free_s: npt.ArrayLike | None = None, release_s: float = 0.0
) -> Schedule:
    """Assign each block, in launch order, to the unit that becomes free first; ties go to the lowest unit.

    Args:
        duration_s: [N] seconds of each block in launch order, >= 0.
        num_units: U, compute units, >= 1.
        free_s: [U] when each unit becomes free; None: all at 0.
        release_s: earliest start of any block.

    Raises:
        ValueError: no unit, a negative or infinite duration, or `free_s` of another length.

    Complexity: O(N log U) time, O(N + U) space; compiled.
    """
    durations = np.ascontiguousarray(duration_s, dtype=np.float64)
    if num_units < 1:
        raise ValueError(f"compute units: want >= 1, got {num_units}")
    if durations.ndim != 1 or not np.all(np.isfinite(durations) & (durations >= 0)):
        raise ValueError("block durations: want one finite number >= 0 per block")
    free = np.zeros(num_units) if free_s is None else np.array(free_s, dtype=np.float64)
    if free.shape != (num_units,):
        raise ValueError(f"free_s: want one number for each of {num_units} units, got {free.shape}")
    ready = np.maximum(free, release_s)
    order = np.argsort(ready, kind="stable").astype(np.int64)  # sorted by (time, unit): a heap
    unit, start_s, end_s = _dispatch(durations, ready[order], order, free)
    for array in (unit, start_s, end_s, free):
        array.flags.writeable = False
    return Schedule(unit=unit, start_s=start_s, end_s=end_s, free_s=free)


@compiled
def _dispatch(
    duration_s: Floats, heap_s: Floats, heap_unit: Ints, free_s: Floats
) -> tuple[Ints, Floats, Floats]:
    """Run the list schedule, on a heap of units by (time, unit); writes each unit's last end to `free_s`."""
    num_blocks, num_units = len(duration_s), len(heap_s)
    unit = np.empty(num_blocks, dtype=np.int64)
    start_s = np.empty(num_blocks)
    end_s = np.empty(num_blocks)
    for block in range(num_blocks):
        chosen = heap_unit[0]
        unit[block] = chosen
        start_s[block] = heap_s[0]
        time = heap_s[0] + duration_s[block]
        end_s[block] = free_s[chosen] = time
        index = 0
        while True:
            child = 2 * index + 1
            if child >= num_units:
                break
            right = child + 1
            if right < num_units and (
                heap_s[right] < heap_s[child]
                or (heap_s[right] == heap_s[child] and heap_unit[right] < heap_unit[child])
            ):
                child = right
            if heap_s[child] > time or (heap_s[child] == time and heap_unit[child] > chosen):
                break
            heap_s[index] = heap_s[child]
            heap_unit[index] = heap_unit[child]
            index = child
        heap_s[index] = time
        heap_unit[index] = chosen
    return unit, start_s, end_s


def longest_first(duration_s: npt.ArrayLike) -> Ints:
    """[N] launch order by descending duration; ties keep their order."""
    return np.argsort(-np.asarray(duration_s, dtype=np.float64), kind="stable").astype(np.int64)


def makespan_bounds(duration_s: npt.ArrayLike, num_units: int) -> tuple[float, float]:
    """Lower bound on the makespan of any schedule, and upper bound on that of any list schedule.

    Source: Graham 1966, "Bounds for Certain Multiprocessing Anomalies": total / U + (1 - 1/U) longest.
    """
    durations = np.asarray(duration_s, dtype=np.float64)
    if not len(durations):
        return 0.0, 0.0
    mean, longest = float(durations.sum()) / num_units, float(durations.max())
    return max(mean, longest), mean + (1 - 1 / num_units) * longest


def activity(start_s: npt.ArrayLike, end_s: npt.ArrayLike, edges_s: npt.ArrayLike, num_units: int) -> Floats:
    """Mean fraction of busy units in each interval between consecutive edges.

    Args:
        start_s, end_s: [N] of blocks; those of one unit never overlap.
        edges_s: [B + 1] ascending times in seconds.
        num_units: U, compute units.

    Returns:
        [B] numbers in [0, 1].

    Complexity: O((N + B) log N).
    """
    edges = np.asarray(edges_s, dtype=np.float64)
    if len(edges) < 2 or not np.all(np.diff(edges) > 0):
        raise ValueError(f"edges: want at least two ascending times, got {len(edges)}")
    # Work done before t is the sum of (t - start) over started blocks less that of (t - end) over ended ones.
    done = _elapsed(np.asarray(start_s, dtype=np.float64), edges)
    done -= _elapsed(np.asarray(end_s, dtype=np.float64), edges)
    share: Floats = np.diff(done) / (np.diff(edges) * num_units)
    return np.clip(share, 0.0, 1.0)


def _elapsed(events_s: Floats, times_s: Floats) -> Floats:
    """[T] sum of (time - event) over the events before each time."""
    ordered = np.sort(events_s)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, times_s, side="right")
    elapsed: Floats = times_s * count - sums[count]
    return elapsed
