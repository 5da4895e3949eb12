"""Orchestration that counts activations of the whole pipeline: microbatches in flight to later units."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from workbench.balance.orchestration.task import Orchestration, Task


def stages_behind(orchestration: Orchestration) -> tuple[int, ...]:
    """Return, for every unit, the number of stages of the units after it."""
    counts = [degrees.pp for degrees in orchestration.degrees]
    from_here = tuple(accumulate(reversed(counts), initial=0))
    return from_here[-2::-1]


def orchestrate_in_flight(task: Task, search: Callable[[Task], Orchestration]) -> Orchestration:
    """Return what `search` finds if the first stage of a unit holds a microbatch for every stage after it.

    Under 1F1B a stage has as many microbatches in flight as there are stages from it to the last one, of all
    units. DistTrain, section 4.2, counts those of its own unit alone, which is right for the last unit only.
    Ours: search as printed, count the stages after every unit in the result, search again with these, and so
    on until the assumed counts cover the resulting ones. Counts never fall, so it ends.

    Differs: not exact. The result fits, but assumed counts may be larger than its own.

    Raises:
        ValueError: as `search`; nothing fits under the counts assumed.

    Complexity: at most as many searches as there are layers.
    """
    while True:
        orchestration = search(task)
        needed = stages_behind(orchestration)
        assumed = [unit.stages_behind for unit in task.units]
        if all(count >= least for count, least in zip(assumed, needed, strict=True)):
            return orchestration
        counts = map(max, assumed, needed)
        units = tuple(
            replace(unit, stages_behind=count) for unit, count in zip(task.units, counts, strict=True)
        )
        task = replace(task, units=units)
