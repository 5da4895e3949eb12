"""A plan's predicted peak of memory beside the measured one, where one rank has its device for itself."""

from dataclasses import dataclass, replace

import torch

from runtime.data.batches import DataSource
from runtime.emulation.emulate import emulate
from runtime.run_settings import Collect, RunSettings
from runtime.step.first_weights import DrawnWeights
from runtime.world.device import CPU
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.lowered import Lowered

WARMUP = 1  # the optimizer's state exists from the second step on


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Most bytes held at once in a step, by the plan's account and as measured."""

    rank: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def peak_memory(
    lowered: Lowered,
    settings: RunSettings,
    *,
    device: torch.device = CPU,
    source: DataSource | None = None,
    drawn: DrawnWeights | None = None,
) -> PeakMemory:
    """Run two steps of a plan of one rank, and hold the second one's peak against the plan's account.

    On a GPU its allocator is asked (`runtime.step.activations.AllocatorBytes`), on a CPU every tensor is
    counted as it is made and dropped (`Allocations`). Neither counts the step's data, nor does the account.

    Args:
        settings: seed, precision and weights; how many steps it says does not count.
        drawn: as of `emulate`.

    Raises:
        ValueError: a plan of several ranks, and what `emulate` refuses.
    """
    if len(lowered.plan.ranks) != 1:
        raise ValueError(
            f"peak memory is measured for plans of one rank, got {len(lowered.plan.ranks)} ranks"
        )
    (rank,) = lowered.plan.ranks
    watched = replace(settings, steps=1, warmup=WARMUP, repetitions=1, collect=Collect.MEMORY, export=None)
    emulation = emulate(lowered, watched, device=device, source=source, drawn=drawn)
    return PeakMemory(
        rank=rank,
        predicted_bytes=peak_bytes(lowered, memory_table(lowered))[rank],
        measured_bytes=emulation.peaks[rank],
    )
