"""Orchestration that counts what the whole pipeline holds: microbatches on their way to later units."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from workbench.balance.orchestration.task import Orchestration, Task


def stages_behind(found: Orchestration) -> tuple[int, ...]:
    """Of every unit: stages of the units behind it."""
    counts = [degrees.pp for degrees in found.degrees]
    from_here = tuple(accumulate(reversed(counts), initial=0))
    return from_here[-2::-1]


def orchestrate_in_flight(task: Task, search: Callable[[Task], Orchestration]) -> Orchestration:
    """What `search` finds when the first stage of a unit holds a microbatch for every stage behind it.

    Under 1F1B a stage has as many microbatches in flight as there are stages from it to the last one, of all
    units. DistTrain, section 4.2, counts those of its own unit alone, which is right for the last unit only.
    Ours: search as printed, count the stages behind every unit in what was found, search again with these,
    and so on until the counts that were assumed cover those found. Counts never fall, so it ends.

    Differs: not exact. What is found fits, but assumed counts may be larger than those in the end.

    Raises:
        ValueError: as `search`; nothing fits under the counts assumed.

    Complexity: at most as many searches as there are layers.
    """
    while True:
        found = search(task)
        needed = stages_behind(found)
        assumed = [unit.stages_behind for unit in task.units]
        if all(mine >= real for mine, real in zip(assumed, needed, strict=True)):
            return found
        counts = map(max, assumed, needed)
        units = tuple(
            replace(unit, stages_behind=count) for unit, count in zip(task.units, counts, strict=True)
        )
        task = replace(task, units=units)
