"""What the ranks' notes of one step say beside its times, as details of its trace."""

from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import harmonic_mean

from runtime.step.timing import Notes
from workbench.drift import YARDSTICK
from workbench.float_sum import float_sum
from workbench.timing.provenance import load_detail

Detail = tuple[str, str]


def details_of(notes: Sequence[Notes]) -> tuple[Detail, ...]:
    """The yardstick of a step and the loads of its experts, where they were read."""
    return (*_yardstick(notes), *_expert_loads(notes))


def _yardstick(notes: Sequence[Notes]) -> Iterator[Detail]:
    """Yield the slowest rank's reading, mean of before and after.

    Where some ranks do not read it, ranks share cores and take any free one: the mean speed counts.
    """
    read = [note.yardstick_s for note in notes if note.yardstick_s]
    if read:
        of_step = harmonic_mean if len(read) < len(notes) else max
        yield YARDSTICK, repr(harmonic_mean([of_step(each) for each in zip(*read, strict=True)]))


def _expert_loads(notes: Sequence[Notes]) -> Iterator[Detail]:
    """Yield the CV of each module's loads beyond chance: root of the mean square of all ranks' forwards."""
    loads = [load for note in notes for load in note.expert_loads if load.num_forwards]
    for module in dict.fromkeys(load.module for load in loads):
        own = [load for load in loads if load.module == module]
        square = float_sum(load.excess for load in own) / float_sum(load.num_forwards for load in own)
        yield load_detail(module, sqrt(max(0.0, square)))
