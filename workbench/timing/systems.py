"""Who executes a step: training systems of which no run was compared with its prediction lose time besides.

A price is what kernels and links allow. A profile that was calibrated on a machine has the overheads of this
project's runtime there; a shipped profile does not say who executes the step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from workbench.timing.interval import Doubt, Interval, interval

# Factor on all other deviations of a step whose system is known or has a deviation of its own, so that
# intervals cover 80 % of published rows (`experiments.public.coverage`): the largest of the factors with one
# data set left out, as new rows are further off than known ones.
STRETCH = 0.45

# Median of the logarithm of measured over predicted seconds of 37 data sets without numbers fitted to them,
# each the mean of its rows; and the deviation of which four fifths of them lie within 1.28
# (`experiments.public.coverage`).
LOST_BY_SYSTEM, OF_SYSTEM = 0.18, 0.24
# The same of 13 data sets of multimodal models.
LOST_BY_MULTIMODAL, OF_MULTIMODAL = 0.55, 0.54

KERNELS_AND_LINKS = "kernels and links alone"
ANY_SYSTEM = Doubt("a training system that was not compared", OF_SYSTEM, centre=LOST_BY_SYSTEM)
MULTIMODAL_TRAINER = Doubt(
    "a research trainer of multimodal models", OF_MULTIMODAL, centre=LOST_BY_MULTIMODAL
)


@dataclass(frozen=True, slots=True)
class Within:
    """The interval of a step, by who executes it.

    Args:
        executor: in words; `KERNELS_AND_LINKS` if nothing is lost beside them.
        interval: of the step's seconds.
    """

    executor: str
    interval: Interval


def of_system(doubts: Iterable[Doubt], system: Doubt) -> tuple[Doubt, ...]:
    """The doubts about a step of a system that was not compared: all others stretched, and its own."""
    return (*stretched(doubts), system)


def stretched(doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
    """The doubts with the deviations that published rows have, see `STRETCH`."""
    return tuple(replace(doubt, deviation=STRETCH * doubt.deviation) for doubt in doubts)


def by_executor(step_s: float, doubts: Iterable[Doubt], *, is_multimodal: bool) -> tuple[Within, ...]:
    """Intervals of a step on a machine on which no executor's overheads were measured, narrowest first."""
    given = tuple(doubts)
    systems = (ANY_SYSTEM, MULTIMODAL_TRAINER) if is_multimodal else (ANY_SYSTEM,)
    return (
        Within(KERNELS_AND_LINKS, interval(step_s, given)),
        *(Within(system.about, interval(step_s, of_system(given, system))) for system in systems),
    )
